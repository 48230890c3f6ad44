"""Coverage and power of audits on the enumerated transformer, whose exact gradients are known.

    python -m benchmarks.audit [--repetitions 200] [--units 128]    # writes audit.csv
    python -m benchmarks.audit --power                              # writes audit_power.csv
    python -m benchmarks.audit --missed                             # writes audit_missed.csv

All pairs of rollouts are measured once, as an audit measures them; repetitions then draw units from that list. A
gradient at the logits stands for the one at all weights: it is multiplied by a square root of JJᵀ, with J the
derivative of the logits by the weights, so that inner products are those at the weights.
"""

from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas
import torch
import typer
from rich.progress import track

from benchmarks.measure import record
from kltest.auditing.named import columns_of
from kltest.auditing.passes import measure
from kltest.auditing.units import narrowed
from kltest.environments import Instance, ragged, sequence
from kltest.estimators.spec import registry
from kltest.identify.instances import instances, network, seeds
from kltest.loss.resolve import resolve
from kltest.samples.blocks import HEAVY, Sample, angle, coefficient, cosine, norm
from kltest.samples.fits import distance
from kltest.samples.sketch import Sketch
from tests.audited import Signs, every_pair, models, rollouts

SEED = 0
GROUP = 2
BLOCKS = 64
MARGIN, RATE = 0.05, 0.01
# Intervals of what is known without noise are as wide as rounding of ‖E d‖², whose root this is.
ROUNDING = 1e-6


class Population:
    """Every unit of two rollouts under one sampler, with its probability."""

    def __init__(self, instance: Instance, root: np.ndarray, sampler: str) -> None:
        self.instance, self.root, self.sampler = instance, root, sampler
        full = sampler == "stale"
        self.models = models(instance, full=full)
        names, self.parts, self.controls = columns_of(stale=full, full=full, rewarded=True)
        self.pairs, self.chances = zip(*every_pair(instance, sampler), strict=True)
        self.sketch = Sketch(self.models.policy.language.model)
        self.signs = Signs(self.sketch).signs
        self.vectors = self._measured(resolve("k1-loss"), self.parts)
        self.own = np.eye(2 + len(self.parts))[1]
        self.named = {name: self._vector(parts) for name, parts in names.items()}

    def _measured(self, loss, parts=()):
        """(units, 2 + parts, D) what an audit measures in each unit."""
        found = []
        with self.sketch.listening():
            for pair in self.pairs:
                unit = narrowed(rollouts(self.instance, pair, self.sampler, given=False))
                found.append(measure(loss, self.models, unit, list(parts), self.sketch).vectors * self.signs)
        return torch.stack(found).numpy() @ self.root

    def _vector(self, parts):
        """The combination of rows that is a named gradient."""
        return sum(np.eye(2 + len(self.parts))[2 + self.parts.index(part)] for part in parts)

    def audit(self, loss, expect, units, repetitions, generator):
        """Audit a loss many times on units drawn anew.

        Returns:
            Its exact distance from the declared gradient; the shares of audits with each verdict, and warned of few
            blocks; and how often intervals at 95 %, one at a time, and bounds on the distance at 99 % hold the truth.
        """
        self.vectors[:, 0] = self._measured(resolve(loss))[:, 0]
        own, declared = self.own, self.named[expect]
        mean = np.tensordot(self.chances, self.vectors, 1)
        mean[1] = mean[0]
        exact = mean @ mean.T
        named = {"coefficient": declared, "coefficient_forward": self.named["local_forward_kl"]}
        with np.errstate(all="ignore"):
            truth = {name: float(coefficient(own, one)(exact)) for name, one in named.items()}
            truth["cosine"] = float(cosine(own, declared)(exact))
        truth["distance"] = float(np.sqrt(max(norm(own - declared)(exact) / norm(declared)(exact), 0.0)))
        counts: Counter[str] = Counter()
        for _ in range(repetitions):
            rows = generator.choice(len(self.pairs), size=units, p=self.chances)
            blocks = self.vectors[rows].reshape(-1, max(1, units // BLOCKS), *self.vectors.shape[1:]).mean(1)
            sample = Sample(blocks).controlled(self.controls)
            columns = np.stack([*self.named.values()])
            bound = distance(sample, own - declared, declared, columns, self.controls, RATE)
            intervals = {name: sample.interval(coefficient(own, one), 0.05) for name, one in named.items()}
            intervals |= {"cosine": angle(sample, own, declared, 0.05), "distance": bound}
            for name, one in intervals.items():
                counts[name] += bool(one.low - ROUNDING <= truth[name] <= one.high + ROUNDING)
            counts["heavy"] += sample.effective(coefficient(own, declared)) < HEAVY * len(sample)
            counts["confirmed"] += bound.high <= MARGIN
            counts["refuted"] += bound.low > MARGIN
        shares = {name: count / repetitions for name, count in counts.items()}
        if norm(own)(exact) < 1e-20 * norm(declared)(exact):
            shares["cosine"] = np.nan
        return truth["distance"], shares

    def missed(self, units, repetitions, generator):
        """Return the share of ∇KL(π‖ref) that a token-level term misses, and how often an interval at 99 % holds it.

        And how often it lies below that, and above, and the median of the width.
        """
        parts = [self.named[name] for name in ("future_reverse_kl", "reverse_kl")]
        exact = np.tensordot(self.chances, self.vectors, 1)
        truth = float(np.sqrt(norm(parts[0])(exact @ exact.T) / norm(parts[1])(exact @ exact.T)))
        found = []
        for _ in range(repetitions):
            rows = generator.choice(len(self.pairs), size=units, p=self.chances)
            sample = Sample(self.vectors[rows].reshape(-1, max(1, units // BLOCKS), *self.vectors.shape[1:]).mean(1))
            found.append(distance(sample, *parts, np.stack([*self.named.values()]), self.controls, RATE))
        below = np.mean([one.high < truth - ROUNDING for one in found])
        above = np.mean([one.low > truth + ROUNDING for one in found])
        width = np.median([one.width for one in found])
        return {"share": truth, "held": 1 - below - above, "below": below, "above": above, "median_width": width}


def transformer(sampler="current"):
    """Rollouts of the transformer in which `kltest grade` names gradients."""
    instance = instances("transformer", SEED, GROUP)[0]
    (_, seed), *_ = seeds("transformer", SEED)
    made = network(instance.environment.vocabulary)
    rows = torch.func.jacrev(partial(made.table, environment=instance.environment))(made.drawn((seed,)))
    jacobian = torch.cat([one.flatten(2).flatten(0, 1) for one in rows.values()], dim=1).numpy()
    return Population(instance, np.linalg.qr(jacobian.T, mode="r").T, sampler)


def padded():
    """Rollouts of one to three tokens from a table, whose weights are its logits."""
    instance = Instance.draw(ragged(3, 3), SEED)
    return Population(instance, np.eye(instance.policy.size), "current")


def context_free():
    """Rollouts of a table that gives every context the same distribution, policy and reference: nothing is missed."""
    environment = sequence(2, 3)
    generator = np.random.default_rng(SEED)
    tables = (np.broadcast_to(generator.standard_normal(2), (environment.n_contexts, 2)) for _ in range(2))
    return Population(Instance.of(environment, *tables), np.eye(2 * environment.n_contexts), "current")


def shares(repetitions):
    """Yield what audits say of the share of ∇KL(π‖ref) that a token-level term misses; no loss has a part in it."""
    populations = {
        "transformer": transformer,
        "transformer, another sampler": partial(transformer, "stale"),
        "table, one to three tokens": padded,
        "context-free table": context_free,
    }
    for where, made in track(populations.items(), "shares"):
        population = made()
        for units in (32, 128, 512):
            row = population.missed(units, repetitions, np.random.default_rng([SEED, units]))
            yield {"rollouts_of": where, "units": units, **{name: round(float(one), 4) for name, one in row.items()}}


def coverage(repetitions, units):
    """Yield what audits at the gradient of KL(π‖ref) say of every registered estimator."""
    populations = {sampler: transformer(sampler) for sampler in ("current", "stale")}
    for number, (sampler, name) in enumerate(track(list(product(populations, registry())), "audits")):
        generator = np.random.default_rng([SEED, number])
        away, shares = populations[sampler].audit(name, "reverse_kl", units, repetitions, generator)
        yield {"estimator": name, "sampler": sampler, "units": units, "exact_distance": round(away, 4), **shares}


PLANTED = {
    "right (k2 as a loss)": (lambda logp, ref_logp: 0.5 * (logp - ref_logp) ** 2, "local_reverse_kl"),
    "coefficient 10 % too large": (lambda logp, ref_logp: 0.55 * (logp - ref_logp) ** 2, "local_reverse_kl"),
    "coefficient 10 % too small": (lambda logp, ref_logp: 0.45 * (logp - ref_logp) ** 2, "local_reverse_kl"),
    "forward instead of reverse": (lambda logp, ref_logp: (ref_logp - logp).exp() - 1 + logp, "local_reverse_kl"),
    "first token left out": (lambda logp, ref_logp: 0.5 * (logp - ref_logp)[:, 1:].square().sum(1), "local_reverse_kl"),
    "no credit for later tokens": (lambda logp, ref_logp: 0.5 * (logp - ref_logp) ** 2, "reverse_kl"),
    "right (k1 as a reward to go)": ("k1-reward-to-go", "reverse_kl"),
    "immediate credit": ("k1-reward-immediate", "reverse_kl"),
}
"""Losses by what was planted in them, and the gradient that they declare."""
PADDED = {
    "right, some rollouts shorter": (lambda logp, ref_logp: 0.5 * (logp - ref_logp) ** 2, "local_reverse_kl"),
    "padding not masked": (lambda logp, ref_logp: 0.5 * (logp - ref_logp).square().sum(1), "local_reverse_kl"),
}


def detection(repetitions):
    """Yield how often each planted loss is confirmed and refuted, by the number of prompts of two rollouts."""
    for found, planted in ((transformer(), PLANTED), (padded(), PADDED)):
        for what, (loss, expect) in track(planted.items(), "power"):
            row = {"planted": what, "declared": expect}
            for units in (64, 256, 1024):
                away, shares = found.audit(loss, expect, units, repetitions, np.random.default_rng([SEED, units]))
                row["distance"] = round(away, 3)
                row |= {f"{word}_{units}": shares[word] for word in ("confirmed", "refuted")}
            yield row


def main(repetitions: int = 200, units: int = 128, *, power: bool = False, missed: bool = False) -> None:
    """Write the table."""
    name = "audit_power" if power else "audit_missed" if missed else "audit"
    found = detection(repetitions) if power else shares(repetitions) if missed else coverage(repetitions, units)
    record(Path(__file__).with_name(f"{name}.csv"), pandas.DataFrame(found))


if __name__ == "__main__":
    typer.run(main)
