"""Gradients of an estimate of the KL that is differentiated: of one step, of two Gaussians, of sequences by length.

*One step*: two examples, a line of binary policies, and random ones ever further from their reference. *Gaussians*,
after Schulman 2020: values and gradients of k1, k2 and k3, integrated and sampled. *Lengths*, after Shah et al. 2025
(A Comedy of Estimators), Fig. 2: a pair of binary autoregressive policies. Their parameters are unpublished. Ours:
contexts are the start, a 0 and a 1. The reference says 1 with probability 1/2 at the start, 0.4 after a 0 and 0.6 after
a 1; the policy's logit of a 1 is higher by s·(1, 2, 1/2). The scale s is what sets the distance.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from kltest.environments import Instance, Paths, bandit, ngram
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError
from kltest.estimators import find, registry
from kltest.loss.outcome import Call
from kltest.loss.placement import place
from kltest.loss.resolve import resolve
from kltest.moments import dynamic, exact
from kltest.sweeps.settings import Settings
from kltest.truth import divergences, gradient, value

from ..arrays import code_of, generator
from ..rollouts import gradients

# π and ref; Tang & Munos 2025 use the first, the second is the smallest in which a sign turns visibly.
EXAMPLES = {"binary": ((0.8, 0.2), (0.5, 0.5)), "four actions": ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4))}

# Which of the registered estimators are followed over distances; the examples have all of one step.
FOLLOWED = ("k1-loss", "k2-loss", "k3-loss", "k3-inverted", "abs-loss", "k2-reward", "k3-reward", "top-k")
MORE = ("k1-reward", "k3-both", "full-loss", "k3-clamped", "k3-straight-through", "top-k-detached")

# How a policy leaves its reference: π ∝ ref·e^(t·d), with t such that KL(π‖ref) is what it should be and d random;
# the log-probs of the reference, so that the policy sharpens; or one action alone, the reference's least likely taken
# up or its likeliest dropped.
PATHS = ("random", "sharpened", "taken up", "dropped")
# The other paths are for those whose direction or size is in question there.
EVERYWHERE = ("k2-loss", "k3-loss", "k3-reward", "abs-loss")

# What Gaussians and sequences compare.
ESTIMATORS = ("k1-loss", "k2-loss", "k3-loss")
PLACEMENTS = ("loss", "reward", "both")
NINE = tuple((estimator, placement) for estimator in ESTIMATORS for placement in PLACEMENTS)
# Of sequences those that have no bias, and those that the source compares.
UNBIASED = (("k1-loss", "reward"), ("k1-loss", "both"), ("k3-loss", "both"))
PUBLISHED = (("k1-loss", "loss"), ("k1-loss", "reward"), ("k3-loss", "loss"), ("k3-loss", "reward"))

PARTS: dict[str, Mapping[str, str]] = {
    "examples": {},
    "binary": {},
    "distance": {name: name for name in ("estimator", "vocabulary", "path", "pairs", "seed")},
    "gaussians": {"kl": "gaussian_kl", "width": "width", "samples": "gaussian_samples", "seed": "seed"},
    "orders": {},
    "length": {name: name for name in ("length", "kl", "hold", "batches", "samples", "every", "seed")},
    "equal noise": {"length": "length"},
    "random": {"kl": "kl", "pairs": "random_pairs", "seed": "seed"},
}


def applies(one: Mapping[str, Any]) -> bool:
    """Some paths are for some estimators; a width alone may be further away; without samples nothing is random."""
    if one["part"] == "distance":
        return one["path"] == "random" or one["estimator"] in EVERYWHERE
    if one["part"] == "gaussians":
        return Gaussians(0.0, one["width"]).kl <= one["kl"]
    return one["part"] != "length" or one["hold"] == SAMPLED or one["seed"] == 0


SETTINGS = Settings(
    title="Differentiating an estimate of the value",
    tags=("exact", "sampled", "gradient", "bias", "variance", "one-step"),
    parts=PARTS,
    applies=applies,
    values={
        "part": tuple(PARTS),
        "estimator": FOLLOWED,
        "vocabulary": (2, 4, 32, 128),
        "path": PATHS,
        # Random references, and directions.
        "pairs": 100,
        # Gaussians: Schulman's two levels, one between them and one beyond.
        "gaussian_kl": (0.005, 0.05, 0.5, 1.0),
        # Standard deviation of the policy, that of the reference being 1.
        "width": (1.0, 0.8, 1.25),
        "gaussian_samples": 2**18,
        # Sequences: lengths, and KL(π‖ref) near the reference and where the order of the variances is another.
        "length": tuple(range(5, 21)),
        "kl": (0.05, 0.8),
        # What stays as length grows: the KL of whole sequences, or the pair of policies.
        "hold": ("kl", "pair"),
        # The published 200 × 1,000: so many gradients, each the mean over so many rollouts.
        "batches": 200,
        "samples": 1000,
        # They are drawn at every so many lengths.
        "every": 3,
        "random_pairs": 100,
    },
    full={
        "estimator": FOLLOWED + MORE,
        "vocabulary": (2, 3, 4, 8, 32, 128, 512),
        "pairs": 200,
        "gaussian_kl": (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75, 1.0),
        "width": (1.0, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0),
        "gaussian_samples": 2**20,
        "kl": (0.0125, 0.05, 0.2, 0.8),
        "samples": 2000,
        "every": 1,
        "random_pairs": 500,
    },
    seeds={"quick": 1, "full": 2},
    allowed={
        "estimator": FOLLOWED + MORE,
        "vocabulary": (2, 2048),
        "path": PATHS,
        "pairs": (2, 1000),
        "gaussian_kl": (1e-4, 1.5),
        # Narrower than 0.8, and the integrals that the registered functions are put into want a longer line.
        "width": (0.8, 2.0),
        "gaussian_samples": (2**10, 2**24),
        "length": (2, 40),
        "kl": (1e-4, 1.0),
        "batches": (10, 10_000),
        "samples": (10, 100_000),
        "every": (1, 20),
        "random_pairs": (1, 100_000),
    },
)

# Half decades of KL(π‖ref).
LEVELS = tuple(float(f"{10 ** (power / 2):.3g}") for power in range(-12, 2))
# Probabilities of the first action at which the binary example is drawn, its reference being ½.
PROBABILITIES = tuple(round(0.025 * step, 3) for step in range(1, 40))
QUANTILES = (0.1, 0.5, 0.9)

Row = dict[str, Any]
# Below this share of the true gradient's length a component is rounding, and has no sign.
SILENT = 1e-9


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The examples once for every registered estimator of one step; else the grid."""
    for one in configurations:
        if one["part"] != "examples":
            yield one
            continue
        for name, estimator in registry().items():
            # Those that compare the rows of a batch, or their sampler with their policy, are the matter of others.
            if not (estimator.spec.couples or estimator.spec.off_policy_only):
                yield {**one, "estimator": name, "_code": code_of(estimator)}


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """The rows of one part."""
    compute_part = {
        "examples": _examples,
        "binary": _binary,
        "distance": _distances,
        "gaussians": _gaussians,
        "orders": _orders,
        "length": _length,
        "equal noise": _equal_noise,
        "random": _random,
    }[configuration["part"]]
    return [{**configuration, **row} for row in compute_part(configuration)]


def _examples(configuration: Mapping[str, Any]) -> list[Row]:
    rows = []
    spec = find(configuration["estimator"]).spec
    for example, (policy, reference) in EXAMPLES.items():
        instance = _instance(np.log([policy]), np.log([reference]))
        moments = exact(resolve(spec.name), instance)
        truth = _gradient("reverse_kl", instance)[0]
        found = moments.gradient[0]
        rows.append(
            {
                "estimator": spec.name,
                "example": example,
                "kl": value("kl", instance),
                "logged": None if moments.value is None else float(moments.value.mean),
                "gradient": found.tolist(),
                "truth": truth.tolist(),
                "std": float(np.sqrt(moments.variance) / np.linalg.norm(truth)),
                **{name: column[0] for name, column in _against(found[None], truth[None]).items()},
                "flipped": int(_flipped(found[None], truth[None]).sum()),
                # With two actions ∂/∂p is the gradient of the first logit over p(1 − p).
                "derivative": float(found[0] / (policy[0] * policy[1])) if example == "binary" else None,
                "named": spec.expectation("bandit", "current"),
            }
        )
    return rows


def _binary(_: Mapping[str, Any]) -> list[Row]:
    """What each estimator gives for every probability of the first of two actions, the reference being ½."""
    p = np.array(PROBABILITIES)
    policies = np.log(np.stack([p, 1 - p], axis=1))
    instance = _instance(policies, np.full_like(policies, np.log(0.5)))
    truth, rows = _gradient("reverse_kl", instance)[:, 0] / (p * (1 - p)), []
    for name in FOLLOWED:
        found = _expected(name, instance)[:, 0] / (p * (1 - p))
        columns = {"probability": p, "derivative": found, "true_derivative": truth}
        rows += [
            {"estimator": name, **dict(zip(columns, map(float, one), strict=True))}
            for one in zip(*columns.values(), strict=True)
        ]
    return rows


def _distances(configuration: Mapping[str, Any]) -> list[Row]:
    about = {name: configuration[name] for name in ("estimator", "vocabulary", "path", "pairs", "seed")}
    policies, references, levels = family(about["vocabulary"], about["path"], about["pairs"], about["seed"])
    instance = _instance(policies, references)
    found, truth = _expected(about["estimator"], instance), _gradient("reverse_kl", instance)
    half_square = _gradient("squared_log_ratio", instance) - truth
    columns = {name: np.array(values, float) for name, values in _against(found, truth).items()}
    second_order = np.array(_against(truth + half_square, truth)["relative_error"])
    flipped = _flipped(found, truth)
    off = _flips_off(about["estimator"], flipped, instance, levels[:, None])
    rows = []
    for kl in LEVELS:
        here = levels == kl
        if not here.any():
            continue
        row = {**about, "kl": kl, "reached": int(here.sum())}
        for name, values in columns.items():
            row |= _spread(name, values[here])
        row["second_order"] = _short(np.median(second_order[here]))
        row |= {"flipped": float(flipped[here].mean()), "any_flipped": float(flipped[here].any(axis=1).mean())}
        rows.append({**row, "flips_off": None if off is None else int(off[here].sum())})
    return rows


@cache
def family(vocabulary: int, path: str, pairs: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits (N, V) of policies and references, and the level of each; pairs that cannot get so far are left out.

    All estimators see the same policies.
    """
    about = {"vocabulary": vocabulary, "path": path, "pairs": pairs, "seed": seed}
    drawn = generator(about)
    references = table(drawn.standard_normal((pairs, vocabulary)))
    directions = {
        "random": lambda: drawn.standard_normal(references.shape),
        "sharpened": lambda: references,
        "taken up": lambda: np.eye(vocabulary)[references.argmin(axis=1)],
        "dropped": lambda: -np.eye(vocabulary)[references.argmax(axis=1)],
    }[path]()
    found = []
    for kl in LEVELS:
        steps, reached = _steps(references, directions, kl)
        policies = references + steps[:, None] * directions
        found.append((policies[reached], references[reached], np.full(int(reached.sum()), kl)))
    policies, references, levels = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return policies, references, levels


def _steps(references: np.ndarray, directions: np.ndarray, kl: float) -> tuple[np.ndarray, np.ndarray]:
    """(N,) t with KL(π_t‖ref) = kl, by halving, since it grows with t; and which pairs get there at all."""

    def at(steps: np.ndarray) -> np.ndarray:
        return divergences.kl(table(references + steps[:, None] * directions), references)

    low, high = np.full(len(references), 1e-8), np.full(len(references), 60.0)
    reached = at(high) > kl
    for _ in range(60):
        middle = np.sqrt(low * high)
        short = at(middle) < kl
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return np.sqrt(low * high), reached


def _instance(policies: np.ndarray, references: np.ndarray) -> Any:
    """Each row a bandit of its own, as equally likely prompts of one environment."""
    count, vocabulary = policies.shape
    return Instance.of(bandit(vocabulary, prompts=np.full(count, 1 / count)), policies, references)


def _expected(estimator: str, instance: Any) -> np.ndarray:
    """(N, V) the expected gradient of each bandit, with respect to its logits."""
    return exact(resolve(estimator), instance).gradient * len(instance.policy)


def _gradient(name: str, instance: Any) -> np.ndarray:
    return gradient(name, instance) * len(instance.policy)


def _against(found: np.ndarray, truth: np.ndarray) -> dict[str, list[float | None]]:
    """Row by row: ‖found − truth‖/‖truth‖, the cosine (None for no gradient) and ‖found‖/‖truth‖."""
    length, size = np.linalg.norm(truth, axis=1), np.linalg.norm(found, axis=1)
    silent = size < SILENT * length
    cosine = (found * truth).sum(axis=1) / np.where(silent, 1.0, size * length)
    return {
        "relative_error": (np.linalg.norm(found - truth, axis=1) / length).tolist(),
        "cosine": [None if none else float(value) for none, value in zip(silent, cosine, strict=True)],
        "size": np.where(silent, 0.0, size / length).tolist(),
    }


def _spread(name: str, values: np.ndarray) -> Row:
    """Quantiles over pairs, None where there is nothing to have quantiles of."""
    known = values[~np.isnan(values)]
    found = [_short(one) for one in np.quantile(known, QUANTILES)] if len(known) else [None] * len(QUANTILES)
    return dict(zip((f"{name}_low", name, f"{name}_high"), found, strict=True))


def _short(value: float) -> float:
    """Eight figures: enough for any comparison that is made, and a third of the file."""
    return float(f"{value:.8g}")


def _flipped(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Components that point the other way."""
    loud = np.minimum(np.abs(found), np.abs(truth)) > SILENT * np.linalg.norm(truth, axis=1, keepdims=True)
    return (found * truth < 0) & loud


def _flips_off(estimator: str, flipped: np.ndarray, instance: Any, kl: np.ndarray) -> np.ndarray | None:
    """(N, V) actions whose sign is not what theory says, for k3.

    The truth is π(u − KL), k3 in the loss π − ref = π(1 − w), k3 in the reward π(k3 − KL). Actions where any of them is
    too small for its sign to be more than rounding do not count.
    """
    u = instance.policy - instance.reference
    follows = {"k3-loss": -np.expm1(-u), "k3-reward": np.expm1(-u) + u - kl}.get(estimator)
    if follows is None:
        return None
    chance, true = np.exp(instance.policy), u - kl
    pull = chance * np.minimum(np.abs(true), np.abs(follows))
    heard = pull > 1e-6 * np.linalg.norm(chance * true, axis=1, keepdims=True)
    return (flipped != (follows * true < 0)) & heard


# --- Gaussians -------------------------------------------------------------------------------------------------------
# The trapezoidal rule on a smooth integrand that dies out at both ends errs by less than rounding at this step. What
# reaches furthest is w²: at a width of 0.8 and KL 1.5 a Gaussian around −10 with a standard deviation of 1.9; both ends
# are ten of those away.
NODES = np.linspace(-30.0, 30.0, 3001)
WEIGHTS = np.exp(-(NODES**2) / 2) / np.sqrt(2 * np.pi) * (NODES[1] - NODES[0])
# Sample sizes at which the error of the value is also measured.
SIZES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Gaussians:
    """A policy N(d, s²) and its reference N(0, 1): `shift` d, `width` s."""

    shift: float
    width: float = 1.0

    @classmethod
    def at(cls, kl: float, width: float = 1.0) -> "Gaussians":
        """The pair of that width at that KL(π‖ref); the nearest one if the width alone is further away."""
        return cls(math.sqrt(max(2 * (kl - cls(0.0, width).kl), 0.0)), width)

    @property
    def kl(self) -> float:
        """KL(π‖ref) = −log s + (s² + d² − 1)/2."""
        return -math.log(self.width) + (self.width**2 + self.shift**2 - 1) / 2

    def scores(self, e: np.ndarray) -> dict[str, np.ndarray]:
        """∇log π at d + s·e, with respect to the mean and to the logarithm of the width."""
        return {"mean": e / self.width, "width": e**2 - 1}


def _gaussians(one: Mapping[str, Any]) -> list[Row]:
    """For each estimator a row for the value, one a sample size, one a placement and parameter."""
    pair, samples, rows = Gaussians.at(one["kl"], one["width"]), one["samples"], []
    # All estimators see the same samples.
    drawn = generator({name: one[name] for name in ("kl", "width", "samples", "seed")}).standard_normal(samples)
    truths = {"mean": pair.shift, "width": pair.width**2 - 1}
    for estimator in ESTIMATORS:
        here, there = evaluate(estimator, pair, NODES), evaluate(estimator, pair, drawn)
        values = _integrated_and_sampled(here["value"], there["value"])
        rows.append({"kind": "value", "estimator": estimator, "truth": pair.kl, **values})
        for size in SIZES:
            averages = there["value"][: samples // size * size].reshape(-1, size).mean(axis=1)
            squares = (averages - pair.kl) ** 2
            found = {
                "error": values["variance"] / size + (values["mean"] - pair.kl) ** 2,
                "sampled": float(squares.mean()),
                "standard_error": float(squares.std(ddof=1) / np.sqrt(len(squares))),
            }
            rows.append({"kind": "error", "estimator": estimator, "size": size, **found})
        for placement in PLACEMENTS:
            for parameter, truth in truths.items():
                at_nodes, at_drawn = (
                    weights[placement] * pair.scores(e)[parameter] for weights, e in ((here, NODES), (there, drawn))
                )
                about = {"kind": "gradient", "estimator": estimator, "placement": placement, "parameter": parameter}
                rows.append({**about, "truth": truth, **_integrated_and_sampled(at_nodes, at_drawn)})
    return rows


def evaluate(estimator: str, pair: Gaussians, e: np.ndarray) -> dict[str, np.ndarray]:
    """The estimator's value at each e, and what it multiplies the score with in each placement."""
    function = find(estimator).function
    x = torch.from_numpy(pair.shift + pair.width * e)[:, None]
    constant = 0.5 * np.log(2 * np.pi)
    ref_logp = -(x**2) / 2 - constant
    log_probability = -(torch.from_numpy(e)[:, None] ** 2) / 2 - constant - np.log(pair.width)
    found = {"value": function(logp=log_probability, ref_logp=ref_logp)[:, 0].numpy()}
    for placement in PLACEMENTS:
        logp = log_probability.clone().requires_grad_()
        value = function(logp=logp, ref_logp=ref_logp)
        objective = place(value, logp, torch.ones_like(logp), placement)
        (gradient,) = torch.autograd.grad(objective.sum(), logp)
        found[placement] = gradient[:, 0].numpy()
    return found


def _integrated(values: np.ndarray) -> tuple[float, float]:
    mean = float(WEIGHTS @ values)
    return mean, float(WEIGHTS @ (values - mean) ** 2)


def _integrated_and_sampled(at_nodes: np.ndarray, drawn: np.ndarray) -> Row:
    mean, variance = _integrated(at_nodes)
    return {"mean": mean, "variance": variance, "sampled_mean": float(drawn.mean())}


def _orders(_: Mapping[str, Any]) -> list[Row]:
    """The KL between equally wide Gaussians at which k2 and k3 stop erring less than k1 with one sample."""

    def gap(shift: float, name: str) -> float:
        pair = Gaussians(shift)
        errors = []
        for estimator in (name, "k1-loss"):
            mean, variance = _integrated(evaluate(estimator, pair, NODES)["value"])
            errors.append(variance + (mean - pair.kl) ** 2)
        return errors[0] - errors[1]

    return [
        {"one": name, "other": "k1-loss", "until": Gaussians(brentq(gap, 0.2, 1.7, args=(name,), xtol=1e-14)).kl}
        for name in ("k2-loss", "k3-loss")
    ]


# --- lengths ---------------------------------------------------------------------------------------------------------
# A policy that sees the last token only has the same gradient on two sequences with the same first token and the same
# numbers of transitions 0→0, 0→1, 1→0 and 1→1. Those of one *type* are counted: with n zeros beyond the first of each
# of r runs of zeros there are C(n + r − 1, r − 1) ways to place them, and likewise for ones. So an estimator that adds
# up tokens, or multiplies such sums, is called on one sequence of each type: some hundreds, instead of 2²⁰.
REFERENCE = (0.5, 0.4, 0.6)
DIRECTION = (1.0, 2.0, 0.5)

# Of one pair for all lengths, the KL is given at this length.
ANCHOR = 20
# Samples are drawn where the KL is held, from this length on.
SAMPLED = "kl"
SHORTEST = 5
# All 2^T sequences are enumerated as well up to here: a second route.
ENUMERATED = 10
# Random pairs: three contexts, logits of the reference and direction of the policy standard normal.
RANDOM_LENGTH = 10
# Where the two variances are equal is looked for between these distances.
BRACKET = (1e-3, 1.0)

# Sums of a few hundred to a few thousand terms by two routes in float64.
EXACT = 1e-10
# A scale at which every random direction has made the policy all but deterministic.
FURTHEST = 30.0


def at_distance(
    length: int, kl: float, hold: str = "kl", reference: np.ndarray | None = None, direction: np.ndarray | None = None
) -> Instance:
    """The pair at this KL of whole sequences: of this length, or where one pair is held, of the anchor's length.

    `reference` and `direction` (3, 2) are logits; the stated ones by default. Raises InvalidEnvironmentError if the
    direction does not lead so far away.
    """
    if reference is None or direction is None:
        ones = np.array(REFERENCE)
        reference = np.stack([np.log1p(-ones), np.log(ones)], axis=1)
        direction = np.stack([np.zeros(3), np.array(DIRECTION)], axis=1)

    def pair(scale: float, tokens: int) -> Instance:
        return Instance.of(ngram(2, tokens, 2), reference + scale * direction, reference)

    measured = length if hold == "kl" else ANCHOR
    if value("kl", pair(FURTHEST, measured)) < kl:
        raise InvalidEnvironmentError(
            f"in this direction {measured} tokens never come to a KL of {kl:g} from the reference"
        )
    scale = brentq(lambda scale: value("kl", pair(scale, measured)) - kl, 0.0, FURTHEST, xtol=1e-14, rtol=1e-14)
    return pair(scale, length)


@cache
def types(length: int) -> Paths:
    """One sequence of each type, the logarithm of how many there are as its weight."""
    rows = list(_types(length))
    tokens = np.array([_sequence(*row[:5]) for row in rows])
    return _paths(tokens, np.log(np.array([row[5] for row in rows], dtype=float)))


def types_of(paths: Paths) -> tuple[Paths, np.ndarray]:
    """One of the given rollouts for each type that occurs, and (N,) which of them each rollout is like."""
    length = paths.shape[1]
    cell = 2 * paths.contexts + paths.tokens
    counts = np.stack([(cell == one).sum(axis=1) for one in range(6)], axis=1)
    key = counts @ (length + 1) ** np.arange(6)
    _, first, like = np.unique(key, return_index=True, return_inverse=True)
    return paths.take(first), like


def _types(length: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """First token, transitions 0→0, 0→1, 1→0 and 1→1, and how many sequences have these."""
    for first in (0, 1):
        for up in range(length):
            for down in (up, up - 1) if first == 0 else (up, up + 1):
                left = length - 1 - up - down
                if down < 0 or left < 0:
                    continue
                zeros, ones = down + (first == 0), up + (first == 1)
                for stay in range(left + 1):
                    ways = _placed(stay, zeros) * _placed(left - stay, ones)
                    if ways:
                        yield first, stay, up, down, left - stay, ways


def _placed(tokens: int, runs: int) -> int:
    """In how many ways further tokens are shared out among runs."""
    return math.comb(tokens + runs - 1, runs - 1) if runs else int(tokens == 0)


def _sequence(first: int, stay0: int, up: int, down: int, stay1: int) -> list[int]:
    """All further zeros in the first run of zeros, all further ones in the first run of ones."""
    tokens, further = [first], [stay0, stay1]
    for _ in range(up + down + 1):
        here = tokens[-1]
        tokens += [here] * further[here] + [1 - here]
        further[here] = 0
    return tokens[:-1]


def _paths(tokens: np.ndarray, log_weight: np.ndarray) -> Paths:
    contexts = np.concatenate([np.zeros((len(tokens), 1), dtype=np.int64), 1 + tokens[:, :-1]], axis=1)
    return Paths(contexts, tokens, np.ones(tokens.shape, dtype=bool), np.zeros(len(tokens), dtype=np.int64), log_weight)


SAMPLES = ("sampled_bias", "sampled_bias_error", "sampled_std", "sampled_std_error", "z_mean", "z_std")


def _length(one: Mapping[str, Any]) -> list[Row]:
    instance = at_distance(one["length"], one["kl"], one["hold"])
    paths, truth = types(one["length"]), gradient("reverse_kl", instance).ravel()
    weights = np.exp(paths.log_probability(instance.policy))
    size = np.linalg.norm(truth)
    sampled = one["hold"] == SAMPLED and (one["length"] - SHORTEST) % one["every"] == 0
    sample = _draw(instance, one) if sampled else None
    rows = []
    for estimator, placement in NINE:
        mean, covariance = _moments(gradients(estimator, instance, paths, placement, "return"), weights)
        variance = float(np.trace(covariance))
        row = {
            "estimator": estimator,
            "placement": placement,
            "rollout_kl": value("kl", instance),
            "types": len(paths),
            "bias": float(np.linalg.norm(mean - truth) / size),
            "std": float(np.sqrt(variance) / size),
            "off_again": _again(estimator, placement, instance, mean, variance, size),
            **dict.fromkeys(SAMPLES),
        }
        if sample is not None:
            drawn, like, batch = sample
            each = gradients(estimator, instance, drawn, placement, "return")
            row |= _sampled(each, like, batch, mean, covariance, truth)
        rows.append(row)
    return rows


def _moments(each: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = weights @ each
    centred = each - mean
    return mean, (centred * weights[:, None]).T @ centred


def _again(
    estimator: str, placement: str, instance: Any, mean: np.ndarray, variance: float, size: float
) -> float | None:
    """Relative difference of a second route from the truth: enumeration of all sequences, else dynamic programming.

    Dynamic programming gives the mean of all nine, and the variance of those in the loss.
    """
    loss = resolve(estimator, Call(placement, "return"))
    if instance.environment.horizon <= ENUMERATED:
        found = exact(loss, instance)
        again: float | None = found.variance
    else:
        expected = dynamic(loss, instance, variance=placement == "loss")
        found, again = expected, expected.variance
    off = np.linalg.norm(found.gradient.ravel() - mean) / size
    return float(off if again is None else max(off, abs(again - variance) / size**2))


def _draw(instance: Any, one: Mapping[str, Any]) -> tuple[Any, np.ndarray, np.ndarray]:
    """Rollouts drawn token by token: one of each type that occurs, which each is like, and the batch that it is in."""
    own = {name: one[name] for name in ("length", "kl", "hold", "batches", "samples", "seed")}
    paths = instance.environment.sample(instance.policy, one["batches"] * one["samples"], generator(own))
    found, like = types_of(paths)
    return found, like, np.repeat(np.arange(one["batches"]), one["samples"])


def _sampled(
    each: np.ndarray, like: np.ndarray, batch: np.ndarray, mean: np.ndarray, covariance: np.ndarray, truth: np.ndarray
) -> Row:
    """Bias and spread of one rollout's gradient from the mean gradients of batches, beside the exact ones.

    `z_mean` is the largest deviation of a component of the overall mean in exact standard errors, `z_std` that of the
    spread between batches in its own standard error.
    """
    batches, rollouts, size = int(batch[-1]) + 1, len(batch), np.linalg.norm(truth)
    counts = np.zeros((batches, len(each)))
    np.add.at(counts, (batch, like), 1.0)
    means = counts @ each / (rollouts / batches)
    overall = means.mean(axis=0)
    squares = ((means - mean) ** 2).sum(axis=1) * (rollouts / batches)
    variance, variance_error = squares.mean(), squares.std(ddof=1) / np.sqrt(batches)
    exact = np.trace(covariance)
    # A component that never changes has no error, and must be right to rounding.
    errors = np.maximum(np.sqrt(np.diag(covariance) / rollouts), EXACT * size)
    found = (
        np.linalg.norm(overall - truth) / size,
        np.sqrt(exact / rollouts) / size,
        np.sqrt(variance) / size,
        variance_error / (2 * np.sqrt(exact)) / size,
        (np.abs(overall - mean) / errors).max(),
        (variance - exact) / variance_error,
    )
    return {name: float(number) for name, number in zip(SAMPLES, found, strict=True)}


def _equal_noise(one: Mapping[str, Any]) -> list[Row]:
    """The distance at which k1 in the loss becomes the less noisy of two, compared with k1 in the reward."""

    def gap(kl: float) -> float:
        instance = at_distance(one["length"], kl)
        return _trace(instance, "k1-loss", "loss") - _trace(instance, "k1-loss", "reward")

    equal = float(brentq(gap, *BRACKET, xtol=1e-12)) if gap(BRACKET[0]) > 0 > gap(BRACKET[1]) else None
    return [{"equal_at": equal}]


def _trace(instance: Any, estimator: str, placement: Any) -> float:
    """Trace of the covariance."""
    paths = types(instance.environment.horizon)
    weights = np.exp(paths.log_probability(instance.policy))
    return float(np.trace(_moments(gradients(estimator, instance, paths, placement, "return"), weights)[1]))


def _random(one: Mapping[str, Any]) -> list[Row]:
    """For how many random pairs the published orders hold; directions that never lead so far away are drawn again."""
    drawn = generator("random", one["kl"], one["seed"])
    paths = types(RANDOM_LENGTH)
    counts: Counter[str] = Counter()
    worst = 0.0
    pairs = 0
    while pairs < one["pairs"]:
        reference, direction = drawn.standard_normal((2, 3, 2))
        try:
            instance = at_distance(RANDOM_LENGTH, one["kl"], "kl", reference, direction)
        except InvalidEnvironmentError:
            continue
        pairs += 1
        weights = np.exp(paths.log_probability(instance.policy))
        truth = gradient("reverse_kl", instance).ravel()
        bias, noise = {}, {}
        for which in NINE:
            mean, covariance = _moments(gradients(which[0], instance, paths, which[1], "return"), weights)
            bias[which], noise[which] = np.linalg.norm(mean - truth), np.trace(covariance)
        most, noisiest = (max(PUBLISHED, key=of.__getitem__) for of in (bias, noise))
        counts["most_biased_is_k3_reward"] += most == ("k3-loss", "reward")
        counts["most_biased_is_k1_loss"] += most == ("k1-loss", "loss")
        counts["k1_loss_noisiest"] += noisiest == ("k1-loss", "loss")
        counts["k1_loss_less_noisy_than_k1_reward"] += noise["k1-loss", "loss"] < noise["k1-loss", "reward"]
        counts["k3_both_less_noisy_than_k1_reward"] += noise["k3-loss", "both"] < noise["k1-loss", "reward"]
        worst = max(worst, *(bias[which] / np.linalg.norm(truth) for which in UNBIASED))
    return [{name: int(count) for name, count in counts.items()} | {"bias_of_unbiased": float(worst)}]
