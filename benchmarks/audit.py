"""Coverage and power of audits on the enumerated transformer, whose exact gradients are known.

    python -m benchmarks.audit [--repetitions 200] [--units 128] > benchmarks/audit.csv
    python -m benchmarks.audit --power > benchmarks/audit_power.csv

All pairs of rollouts are measured once, as an audit measures them; repetitions then draw units from that list. A
gradient at the logits stands for the one at all weights: it is multiplied by a square root of JJᵀ, with J the
derivative of the logits by the weights, so that inner products are those at the weights.
"""

import argparse
import sys
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
from tests.audited import models, rollouts

SEED = 0
GROUP = 2
BLOCKS = 64
MARGIN = 0.05
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
        chances = instance.rollout_weights(sampler)
        self.pairs = list(product(range(len(chances)), repeat=GROUP))
        self.chances = np.array([chances[list(pair)].prod() for pair in self.pairs])
        self.sketch = Sketch(self.models.policy.language.model)
        self.signs = torch.zeros(self.sketch.size, dtype=torch.float64)
        for weight in self.sketch.weights:
            self.sketch.fold(weight, torch.ones_like(weight), self.signs)
        self.vectors = self.of(resolve("k1-loss"), self.parts)

    def of(self, loss, parts=()):
        """(units, 2 + parts, D) what an audit measures in each unit."""
        found = []
        with self.sketch.listening():
            for pair in self.pairs:
                unit = narrowed(rollouts(self.instance, pair, self.sampler, given=False))
                found.append(measure(loss, self.models, unit, list(parts), self.sketch).vectors * self.signs)
        return torch.stack(found).numpy() @ self.root

    def vector(self, combination):
        found = np.zeros(2 + len(self.parts))
        for name, scale in combination.items():
            for part in self.names.get(name, ()):
                found[2 + self.parts.index(part)] += scale
        return found

    def drawn(self, units, generator):
        """A sample of so many units, as an audit keeps it."""
        rows = generator.choice(len(self.pairs), size=units, p=self.chances)
        each = max(1, units // BLOCKS)
        blocks = self.vectors[rows].reshape(-1, each, *self.vectors.shape[1:]).mean(1)
        return Sample(blocks).controlled(self.controls)

    def exact(self):
        """(Q, Q) inner products of expectations."""
        mean = np.tensordot(self.chances, self.vectors, 1)
        mean[1] = mean[0]
        return mean @ mean.T


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
    exact, own = found.exact(), np.eye(found.vectors.shape[1])[1]
    truth, near = found.vector({"reverse_kl": 1.0}), found.vector({"local_forward_kl": 1.0})
    with np.errstate(all="ignore"):
        right = [float(one(exact)) for one in (coefficient(own, truth), coefficient(own, near), cosine(own, truth))]
        away = float(np.sqrt(max(norm(own - truth)(exact) / norm(truth)(exact), 0.0)))
    zero = norm(own)(exact) < 1e-20 * norm(truth)(exact)
    held, bounds, heavy, verdicts = np.zeros(3), 0, 0, []
    for _ in range(repetitions):
        sample = found.drawn(units, generator)
        intervals = [sample.interval(coefficient(own, one), 0.05) for one in (truth, near)]
        for k, (one, number) in enumerate(zip([*intervals, angle(sample, own, truth, 0.05)], right, strict=True)):
            # Exact ones have an interval as wide as rounding.
            held[k] += one.low - ROUNDING <= number <= one.high + ROUNDING
        heavy += sample.effective(coefficient(own, truth)) < HEAVY * len(sample)
        named = np.stack([found.vector({name: 1.0}) for name in found.names])
        bound = distance(sample, own - truth, truth, named, found.controls, 0.01)
        bounds += bound.low <= away + ROUNDING and bound.high >= away - ROUNDING
        verdicts.append("confirmed" if bound.high <= MARGIN else "refuted" if bound.low > MARGIN else "")
    return {
        "coefficient": held[0] / repetitions,
        "coefficient_forward": held[1] / repetitions,
        "cosine": "" if zero else held[2] / repetitions,
        "distance": bounds / repetitions,
        "exact_distance": round(away, 4),
        "heavy": heavy / repetitions,
        **{f"{word}": verdicts.count(word) / repetitions for word in ("confirmed", "refuted")},
    }


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


def power(found, planted, repetitions, rate):
    """How often each loss is confirmed and refuted, by the number of prompts of two rollouts."""
    own = np.eye(found.vectors.shape[1])[1]
    named = np.stack([found.vector({name: 1.0}) for name in found.names])
    for what, (loss, expect) in planted.items():
        declared = found.vector({expect: 1.0})
        found.vectors[:, 0] = found.of(resolve(loss) if isinstance(loss, str) else bind(loss))[:, 0]
        exact = found.exact()
        row = {"planted": what, "declared": expect}
        row["distance"] = round(float(np.sqrt(max(norm(own - declared)(exact), 0) / norm(declared)(exact))), 3)
        for units in (64, 256, 1024):
            generator, verdicts = np.random.default_rng([SEED, units]), []
            for _ in range(repetitions):
                sample = found.drawn(units, generator)
                bound = distance(sample, own - declared, declared, named, found.controls, rate)
                verdicts.append("confirmed" if bound.high <= MARGIN else "refuted" if bound.low > MARGIN else "")
            for word in ("confirmed", "refuted"):
                row[f"{word}_{units}"] = verdicts.count(word) / repetitions
        yield row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--samplers", nargs="*", default=["current", "stale"])
    parser.add_argument("--power", action="store_true")
    asked = parser.parse_args()
    if asked.power:
        pairs = ((population("current"), PLANTED), (padded(), PADDED))
        print(as_csv([row for pair in pairs for row in power(*pair, asked.repetitions, 0.01)]), end="")
        return
    rows: list[dict[str, object]] = []
    numbers = {cell: number for number, cell in enumerate(product(("current", "stale"), registry()))}
    for sampler in asked.samplers:
        found = population(sampler)
        names = [name for name in registry() if name in (asked.only or registry())]
        with Progress(f"audits, {sampler}", len(names), stream=sys.stderr) as progress:
            for name in names:
                found.vectors[:, 0] = found.of(resolve(name))[:, 0]
                generator = np.random.default_rng([SEED, numbers[sampler, name]])
                row = {"estimator": name, "sampler": sampler, "units": asked.units}
                rows.append(row | coverage(found, asked.repetitions, asked.units, generator))
                progress.advance(name)
    print(as_csv(rows), end="")


if __name__ == "__main__":
    main()
