"""Coverage and power of audits on the enumerated transformer, whose exact gradients are known.

    python -m benchmarks.audit [--repetitions 200] [--units 128] > benchmarks/audit.csv
    python -m benchmarks.audit --power > benchmarks/audit_power.csv

All pairs of rollouts are measured once, as an audit measures them; repetitions then draw units from that list. A
gradient at the logits stands for the one at all weights: it is multiplied by a square root of JJᵀ, with J the
derivative of the logits by the weights, so that inner products are those at the weights.
"""

import argparse
import sys
from collections import Counter
from itertools import product

import numpy as np
import torch

from kltest.auditing.named import controls_of, parts_of
from kltest.auditing.passes import measure
from kltest.auditing.units import narrowed
from kltest.environments import Instance, ragged
from kltest.estimators.spec import registry
from kltest.files import as_csv
from kltest.identify.instances import instances, network, seeds
from kltest.loss.resolve import bind, resolve
from kltest.samples.blocks import HEAVY, Sample, angle, coefficient, cosine, norm
from kltest.samples.fits import distance
from kltest.samples.sketch import Sketch
from kltest.sweeps.progress import Progress
from tests.audited import every_pair, models, rollouts

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
        self.names = parts_of(stale=full, full=full, rewarded=True)
        named = list(dict.fromkeys(part for parts in self.names.values() for part in parts))
        self.parts = [*named, *controls_of(stale=full, full=full)]
        self.controls = range(2 + len(named), 2 + len(self.parts))
        self.pairs, self.chances = zip(*every_pair(instance, sampler), strict=True)
        self.sketch = Sketch(self.models.policy.language.model)
        self.signs = torch.zeros(self.sketch.size, dtype=torch.float64)
        for weight in self.sketch.weights:
            self.sketch.fold(weight, torch.ones_like(weight), self.signs)
        self.vectors = self.of(resolve("k1-loss"), self.parts)
        self.own = np.eye(2 + len(self.parts))[1]
        self.named = np.stack([self.vector(name) for name in self.names])

    def of(self, loss, parts=()):
        """(units, 2 + parts, D) what an audit measures in each unit."""
        found = []
        with self.sketch.listening():
            for pair in self.pairs:
                unit = narrowed(rollouts(self.instance, pair, self.sampler, given=False))
                found.append(measure(loss, self.models, unit, list(parts), self.sketch).vectors * self.signs)
        return torch.stack(found).numpy() @ self.root

    def vector(self, name):
        """The combination of rows that is a named gradient."""
        found = np.zeros(2 + len(self.parts))
        for part in self.names[name]:
            found[2 + self.parts.index(part)] += 1
        return found

    def samples(self, declared, units, repetitions, generator):
        """Yield samples of so many units, as an audit keeps them, and the bounds on the distance from a gradient."""
        for _ in range(repetitions):
            rows = generator.choice(len(self.pairs), size=units, p=self.chances)
            blocks = self.vectors[rows].reshape(-1, max(1, units // BLOCKS), *self.vectors.shape[1:]).mean(1)
            sample = Sample(blocks).controlled(self.controls)
            yield sample, distance(sample, self.own - declared, declared, self.named, self.controls, RATE)

    def exact(self, declared):
        """(Q, Q) inner products of expectations, and the distance of the loss's gradient from the declared one."""
        mean = np.tensordot(self.chances, self.vectors, 1)
        mean[1] = mean[0]
        pairs = mean @ mean.T
        return pairs, float(np.sqrt(max(norm(self.own - declared)(pairs) / norm(declared)(pairs), 0.0)))


def verdict(bound):
    return "confirmed" if bound.high <= MARGIN else "refuted" if bound.low > MARGIN else "inconclusive"


def population(sampler):
    instance = instances("transformer", SEED, GROUP)[0]
    (_, seed), *_ = seeds("transformer", SEED)
    made = network(instance.environment.vocabulary)
    weights = {name: one.requires_grad_() for name, one in made.drawn((seed,)).items()}
    table = made.table(weights, instance.environment)
    rows = [
        torch.autograd.grad(one, list(weights.values()), retain_graph=True, materialize_grads=True)
        for one in table.flatten()
    ]
    jacobian = torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).numpy()
    values, basis = np.linalg.eigh(jacobian @ jacobian.T)
    return Population(instance, basis * np.sqrt(np.maximum(values, 0.0)), sampler)


def padded():
    """Rollouts of one to three tokens from a table, whose weights are its logits."""
    instance = Instance.draw(ragged(3, 3), SEED)
    return Population(instance, np.eye(instance.policy.size), "current")


def coverage(found, repetitions, units, generator):
    """How often intervals at 95 %, one at a time, and bounds on the distance at 99 % miss the truth."""
    own, truth, near = found.own, found.vector("reverse_kl"), found.vector("local_forward_kl")
    exact, away = found.exact(truth)
    with np.errstate(all="ignore"):
        right = [float(one(exact)) for one in (coefficient(own, truth), coefficient(own, near), cosine(own, truth))]
    counts: Counter[str] = Counter()
    for sample, bound in found.samples(truth, units, repetitions, generator):
        intervals = [sample.interval(coefficient(own, one), 0.05) for one in (truth, near)]
        cells = zip(("coefficient", "coefficient_forward", "cosine"), right, strict=True)
        counts[verdict(bound)] += 1
        counts["heavy"] += sample.effective(coefficient(own, truth)) < HEAVY * len(sample)
        intervals += [angle(sample, own, truth, 0.05), bound]
        for (name, number), one in zip([*cells, ("distance", away)], intervals, strict=True):
            # Exact ones have an interval as wide as rounding.
            counts[name] += bool(one.low - ROUNDING <= number <= one.high + ROUNDING)
    names = ("coefficient", "coefficient_forward", "cosine", "distance", "heavy", "confirmed", "refuted")
    shares = {name: counts[name] / repetitions for name in names}
    if norm(own)(exact) < 1e-20 * norm(truth)(exact):
        shares["cosine"] = ""
    return {"exact_distance": round(away, 4), **shares}


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


def power(found, planted, repetitions):
    """How often each loss is confirmed and refuted, by the number of prompts of two rollouts."""
    for what, (loss, expect) in planted.items():
        declared = found.vector(expect)
        found.vectors[:, 0] = found.of(resolve(loss) if isinstance(loss, str) else bind(loss))[:, 0]
        row = {"planted": what, "declared": expect, "distance": round(found.exact(declared)[1], 3)}
        for units in (64, 256, 1024):
            drawn = found.samples(declared, units, repetitions, np.random.default_rng([SEED, units]))
            counts = Counter(verdict(bound) for _, bound in drawn)
            row |= {f"{word}_{units}": counts[word] / repetitions for word in ("confirmed", "refuted")}
        yield row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--power", action="store_true")
    given = parser.parse_args()
    rows: list[dict[str, object]] = []
    if given.power:
        for found, planted in ((population("current"), PLANTED), (padded(), PADDED)):
            rows += power(found, planted, given.repetitions)
    else:
        populations = {sampler: population(sampler) for sampler in ("current", "stale")}
        with Progress("audits", 2 * len(registry()), stream=sys.stderr) as progress:
            for number, (sampler, name) in enumerate(product(populations, registry())):
                found, generator = populations[sampler], np.random.default_rng([SEED, number])
                found.vectors[:, 0] = found.of(resolve(name))[:, 0]
                row = {"estimator": name, "sampler": sampler, "units": given.units}
                rows.append(row | coverage(found, given.repetitions, given.units, generator))
                progress.advance(name)
    print(as_csv(rows), end="")


if __name__ == "__main__":
    main()
