"""Gradients of an estimate of the KL that is differentiated: of one step, of two Gaussians, of sequences by length.

*One step*: two examples, a line of binary policies, and random ones ever further from their reference. *Gaussians*,
after Schulman 2020: values and gradients of k1, k2 and k3, integrated. *Lengths*, after Shah et al. 2025
(A Comedy of Estimators), Fig. 2: a pair of binary autoregressive policies. Their parameters are unpublished. Ours:
contexts are the start, a 0 and a 1. The reference says 1 with probability 1/2 at the start, 0.4 after a 0 and 0.6 after
a 1; the policy's logit of a 1 is higher by s·(1, 2, 1/2). The scale s is what sets the distance.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from kltest.environments import Instance, Paths, bandit, ngram
from kltest.environments.policies import table
from kltest.errors import InvalidEnvironmentError
from kltest.estimators import find, registry
from kltest.loss.placement import place
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.reproduce.frames import Row
from kltest.sweeps.settings import Setting, Settings
from kltest.truth import divergences, gradient, value

from ..arrays import code_of, generator
from ..records import rounded
from ..rollouts import gradients, moments

# π and ref; Tang & Munos 2025 use the first, the second is the smallest in which a sign turns visibly.
EXAMPLES = {"binary": ((0.8, 0.2), (0.5, 0.5)), "four actions": ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4))}

# Registered estimators that are followed over distances; the examples have all of one step.
FOLLOWED = ("k1-loss", "k2-loss", "k3-loss", "k3-inverted", "abs-loss", "k2-reward", "k3-reward", "top-k")
MORE = ("k1-reward", "k3-both", "full-loss", "k3-clamped", "k3-straight-through", "top-k-detached")

# Paths of a policy away from its reference: π ∝ ref·e^(t·d), t such that KL(π‖ref) is as wanted, and d random;
# the log-probs of the reference, so that the policy sharpens; or one action alone, the reference's least likely taken
# up or its likeliest dropped.
PATHS = ("random", "sharpened", "taken up", "dropped")
# The other paths are for those whose direction or size is in question there.
EVERYWHERE = ("k2-loss", "k3-loss", "k3-reward", "abs-loss")

# Estimators that Gaussians and sequences compare.
ESTIMATORS = ("k1-loss", "k2-loss", "k3-loss")
PLACEMENTS = ("loss", "reward", "both")
NINE = tuple((estimator, placement) for estimator in ESTIMATORS for placement in PLACEMENTS)
# Of sequences those that the source compares.
PUBLISHED = (("k1-loss", "loss"), ("k1-loss", "reward"), ("k3-loss", "loss"), ("k3-loss", "reward"))

PARTS: dict[str, Mapping[str, str]] = {
    "examples": {},
    "binary": {},
    "distance": {name: name for name in ("estimator", "vocabulary", "path", "pairs", "seed")},
    "gaussians": {"kl": "gaussian_kl"},
    "orders": {},
    "length": {name: name for name in ("length", "kl", "hold")},
    "equal noise": {"length": "length"},
    "random": {"kl": "kl", "pairs": "random_pairs", "seed": "seed"},
}


SETTINGS = Settings(
    title="Differentiating an estimate of the value",
    tags=("exact", "gradient", "bias", "variance", "one-step"),
    parts=PARTS,
    # Some paths are for some estimators.
    applies=lambda one: one["part"] != "distance" or one["path"] == "random" or one["estimator"] in EVERYWHERE,
    values={
        "part": tuple(PARTS),
        "estimator": Setting(FOLLOWED, full=FOLLOWED + MORE, allowed=FOLLOWED + MORE),
        "vocabulary": Setting((2, 4, 32, 128), full=(2, 3, 4, 8, 32, 128, 512), allowed=(2, 2048)),
        "path": Setting(PATHS, allowed=PATHS),
        # Random references, and directions.
        "pairs": Setting(100, full=200, allowed=(2, 1000)),
        # Gaussians: Schulman's two levels, one between them and one beyond.
        "gaussian_kl": Setting(
            (0.005, 0.05, 0.5, 1.0), full=(0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75, 1.0), allowed=(1e-4, 1.5)
        ),
        # Sequences: lengths, and KL(π‖ref) near the reference and where the order of the variances is another.
        "length": Setting(tuple(range(5, 21)), allowed=(2, 40)),
        "kl": Setting((0.05, 0.8), full=(0.0125, 0.05, 0.2, 0.8), allowed=(1e-4, 1.0)),
        # Quantities that stay as length grows: the KL of whole sequences, or the pair of policies.
        "hold": ("kl", "pair"),
        "random_pairs": Setting(100, full=500, allowed=(1, 100_000)),
    },
    seeds={"quick": 1, "full": 2},
)

# Half decades of KL(π‖ref).
LEVELS = tuple(float(f"{10 ** (power / 2):.3g}") for power in range(-12, 2))
# Probabilities of the first action at which the binary example is drawn, its reference being ½.
PROBABILITIES = tuple(round(0.025 * step, 3) for step in range(1, 40))
QUANTILES = (0.1, 0.5, 0.9)

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
        expected, truth = exact(resolve(spec.name), instance), _gradient("reverse_kl", instance)[0]
        found = expected.gradient[0]
        rows.append(
            {
                "estimator": spec.name,
                "example": example,
                "gradient": found.tolist(),
                "truth": truth.tolist(),
                "std": float(np.sqrt(expected.variance) / np.linalg.norm(truth)),
                **{name: column[0] for name, column in _against(found[None], truth[None]).items()},
                "flipped": int(_flipped(found[None], truth[None]).sum()),
                # With two actions ∂/∂p is the gradient of the first logit over p(1 − p).
                "derivative": float(found[0] / (policy[0] * policy[1])) if example == "binary" else None,
            }
        )
    return rows


def _binary(_: Mapping[str, Any]) -> list[Row]:
    """Derivative of each estimator at every probability of the first of two actions, the reference being ½."""
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
    columns = {name: np.array(values, float) for name, values in _against(found, truth).items()}
    flipped = _flipped(found, truth)
    rows = []
    for kl in LEVELS:
        here = levels == kl
        if not here.any():
            continue
        row = {**about, "kl": kl, "reached": int(here.sum())}
        for name, values in columns.items():
            row |= _spread(name, values[here])
        turned = flipped[here]
        rows.append({**row, "flipped": float(turned.mean()), "any_flipped": float(turned.any(axis=1).mean())})
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
    """(N, V) the expected gradient of each bandit, with respect to its logits.

    That of k3 in both places is a sum, in which weights ref/π cancel: to one call of many bandits, what rounding leaves
    of weights of 1e10 looks as if its rows were coupled.
    """
    placed = {"k3-both": ("k3-loss", "k3-reward")}.get(estimator, (estimator,))
    return sum(exact(resolve(one), instance).gradient for one in placed) * len(instance.policy)


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
    found = [rounded(float(one), 8) for one in np.quantile(known, QUANTILES)] if len(known) else [None] * len(QUANTILES)
    return dict(zip((f"{name}_low", name, f"{name}_high"), found, strict=True))


def _flipped(found: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Components that point the other way."""
    loud = np.minimum(np.abs(found), np.abs(truth)) > SILENT * np.linalg.norm(truth, axis=1, keepdims=True)
    return (found * truth < 0) & loud


# --- Gaussians -------------------------------------------------------------------------------------------------------
# The trapezoidal rule on a smooth integrand that dies out at both ends errs by less than rounding at this step.
NODES = np.linspace(-30.0, 30.0, 3001)
WEIGHTS = np.exp(-(NODES**2) / 2) / np.sqrt(2 * np.pi) * (NODES[1] - NODES[0])
# ∇log π at d + e with respect to the mean and to the logarithm of the width, of a policy as wide as its reference.
SCORES = {"mean": NODES, "width": NODES**2 - 1}


def gaussian_kl(shift: float, width: float = 1.0) -> float:
    """KL(N(d, s²)‖N(0, 1)) = −log s + (s² + d² − 1)/2."""
    return -math.log(width) + (width**2 + shift**2 - 1) / 2


def _gaussians(one: Mapping[str, Any]) -> list[Row]:
    """For each estimator a row for the value, and one a placement and parameter."""
    shift, rows = math.sqrt(2 * one["kl"]), []
    for estimator in ESTIMATORS:
        found = evaluate(estimator, shift)
        rows.append({"kind": "value", "estimator": estimator, "truth": one["kl"], **_integrated(found["value"])})
        for placement in PLACEMENTS:
            for parameter, truth in (("mean", shift), ("width", 0.0)):
                about = {"kind": "gradient", "estimator": estimator, "placement": placement, "parameter": parameter}
                rows.append({**about, "truth": truth, **_integrated(found[placement] * SCORES[parameter])})
    return rows


def evaluate(estimator: str, shift: float) -> dict[str, np.ndarray]:
    """The estimator's value at each node, and what it multiplies the score with in each placement."""
    function, nodes = find(estimator).function, torch.from_numpy(NODES)[:, None]
    # Factors that both densities share cancel.
    ref_logp, log_probability = -((shift + nodes) ** 2) / 2, -(nodes**2) / 2
    found = {"value": function(logp=log_probability, ref_logp=ref_logp)[:, 0].numpy()}
    for placement in PLACEMENTS:
        logp = log_probability.clone().requires_grad_()
        value = function(logp=logp, ref_logp=ref_logp)
        objective = place(value, logp, torch.ones_like(logp), placement)
        (gradient,) = torch.autograd.grad(objective.sum(), logp)
        found[placement] = gradient[:, 0].numpy()
    return found


def _integrated(values: np.ndarray) -> dict[str, float]:
    mean = float(WEIGHTS @ values)
    return {"mean": mean, "variance": float(WEIGHTS @ (values - mean) ** 2)}


def _orders(_: Mapping[str, Any]) -> list[Row]:
    """The KL between equally wide Gaussians at which k2 and k3 stop erring less than k1 with one sample."""

    def error(shift: float, estimator: str) -> float:
        found = _integrated(evaluate(estimator, shift)["value"])
        return found["variance"] + (found["mean"] - gaussian_kl(shift)) ** 2

    def gap(shift: float, name: str) -> float:
        return error(shift, name) - error(shift, "k1-loss")

    return [
        {"one": name, "other": "k1-loss", "until": gaussian_kl(brentq(gap, 0.2, 1.7, args=(name,), xtol=1e-14))}
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
# Random pairs: three contexts, logits of the reference and direction of the policy standard normal.
RANDOM_LENGTH = 10
# The distance of equal variances is looked for between these.
BRACKET = (1e-3, 1.0)

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


def _moments(instance: Instance, which: tuple[str, str]) -> tuple[np.ndarray, float]:
    """Mean and total variance of a rollout's gradient, of an estimator and its placement, by types."""
    paths = types(instance.environment.horizon)
    weights = np.exp(paths.log_probability(instance.policy))
    estimator, placement = which
    return moments(weights, gradients(estimator, instance, paths, placement, "return"))  # type: ignore[arg-type]


def _length(one: Mapping[str, Any]) -> list[Row]:
    instance = at_distance(one["length"], one["kl"], one["hold"])
    truth, rows = gradient("reverse_kl", instance).ravel(), []
    size = np.linalg.norm(truth)
    about = {"rollout_kl": value("kl", instance), "types": len(types(one["length"]))}
    for which in NINE:
        mean, variance = _moments(instance, which)
        row = {**dict(zip(("estimator", "placement"), which, strict=True)), **about}
        rows.append({**row, "bias": float(np.linalg.norm(mean - truth) / size), "std": float(np.sqrt(variance) / size)})
    return rows


def _equal_noise(one: Mapping[str, Any]) -> list[Row]:
    """The distance at which k1 in the loss becomes the less noisy of two, compared with k1 in the reward."""

    def gap(kl: float) -> float:
        instance = at_distance(one["length"], kl)
        return _moments(instance, ("k1-loss", "loss"))[1] - _moments(instance, ("k1-loss", "reward"))[1]

    equal = float(brentq(gap, *BRACKET, xtol=1e-12)) if gap(BRACKET[0]) > 0 > gap(BRACKET[1]) else None
    return [{"equal_at": equal}]


def _random(one: Mapping[str, Any]) -> list[Row]:
    """For how many random pairs the published orders hold; directions that never lead so far away are drawn again."""
    drawn = generator("random", one["kl"], one["seed"])
    counts: Counter[str] = Counter()
    pairs = 0
    while pairs < one["pairs"]:
        reference, direction = drawn.standard_normal((2, 3, 2))
        try:
            instance = at_distance(RANDOM_LENGTH, one["kl"], "kl", reference, direction)
        except InvalidEnvironmentError:
            continue
        pairs += 1
        truth = gradient("reverse_kl", instance).ravel()
        found = {which: _moments(instance, which) for which in (*PUBLISHED, ("k3-loss", "both"))}
        most = max(PUBLISHED, key=lambda which: np.linalg.norm(found[which][0] - truth))
        counts["most_biased_is_k3_reward"] += most == ("k3-loss", "reward")
        less = found["k3-loss", "both"][1] < found["k1-loss", "reward"][1]
        counts["k3_both_less_noisy_than_k1_reward"] += less
    return [{name: int(count) for name, count in counts.items()}]
