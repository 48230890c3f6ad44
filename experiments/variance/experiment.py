"""Exact variances of values and gradients: the published pair, random environments, what can be gained, the bandit."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kltest.environments import Instance, sequence
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import Moments, exact

from ..arrays import generator
from ..rollouts import gradients
from . import bandit, budget, freedom, rewarded
from .prefixes import Environments, Form, best_coefficient, bootstrapped, rao_blackwell, sampled
from .recorded import recorded
from .settings import ENUMERATED, EXACT, PUBLISHED, SURE, VOCABULARY
from .settings import SETTINGS as SETTINGS

Row = dict[str, Any]
# So many prefixes are worked on at a time.
CHUNK = 2**16

# What a recursion gives, and what is called to enumerate the same: estimator, placement, credit.
AGAIN = {
    "return": ("k1-reward", None, None),
    "to go": ("k1-reward-to-go", None, None),
    "k3 in both": ("k3-both", None, None),
    "k3 in both, to go": ("k3-both", "both", "to-go"),
    "rao-blackwell": ("rao-blackwell", None, None),
}


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """Rows of the part that the configuration names."""
    compute_part = {
        "pair": _pair,
        "rates": _rates,
        "ladder": _ladder,
        "mixtures": _mixtures,
        "freedom": lambda one: freedom.counts(),
        "noise": bandit.noise,
        "bandit": bandit.training,
        "budget": budget.of_budget,
        "language": lambda one: recorded(),
        "reward": rewarded.of_path,
    }[configuration["part"]]
    return [{**configuration, **row} for row in compute_part(configuration)]


def _exact(instance: Instance, name: str) -> Moments:
    estimator, placement, credit = AGAIN[name]
    return exact(resolve(estimator, Call(placement, credit)), instance)  # type: ignore[arg-type]


def published_pair(first: float) -> Instance:
    """The pair of two binary tokens; `first` is the reference's chance of a 0 at first."""
    policy = np.array([[0.5, 0.5], [0.5, 0.5], [SURE, 1 - SURE]])
    reference = np.array([[first, 1 - first], [0.5, 0.5], [1 - SURE, SURE]])
    return Instance.of(sequence(2, 2), np.log(policy), np.log(reference))


def _pair(one: Mapping[str, Any]) -> list[Row]:
    """Variances of the value, and of the gradient, by enumeration of the registered estimators."""
    instance = published_pair(one["reference"])
    plain, blackwell = _exact(instance, "to go"), _exact(instance, "rao-blackwell")
    assert plain.value is not None
    assert blackwell.metric is not None
    weights = instance.rollout_weights("current")
    one_value, other = plain.value.rows, blackwell.metric.rows
    both = np.cov(one_value, other, aweights=weights, bias=True)
    # The best share of the Monte Carlo value in a mixture of the two.
    share = (both[1, 1] - both[0, 1]) / (both[0, 0] + both[1, 1] - 2 * both[0, 1])
    row = {
        "kl": plain.value.mean,
        "monte_carlo": plain.value.std**2,
        "rao_blackwell": blackwell.metric.std**2,
        "share": float(share),
        "mixture": float(both[1, 1] - share * (both[1, 1] - both[0, 1])),
        "threshold": _with_threshold(instance),
        **_as_drawn(instance, one, one_value, other),
    }
    return [row]


def _with_threshold(instance: Instance) -> float:
    """Variance of the value with exact KLs at the prefixes where that removes noise, and sampled ones elsewhere."""
    levels = ([table[None, :1], table[None, 1:]] for table in (instance.policy, instance.reference))
    environments = Environments(*levels)
    return float(budget.variances(environments, 0, budget.threshold(budget.gains(environments)["value"]))[0])


def _as_drawn(instance: Instance, one: Mapping[str, Any], *values: np.ndarray) -> Row:
    """The two variances among rollouts drawn token by token, with standard errors; at the published pair only."""
    names = ("monte_carlo", "rao_blackwell")
    if one["reference"] != PUBLISHED:
        return {f"{name}_{what}": None for name in names for what in ("drawn", "error")}
    paths = instance.environment.sample(instance.policy, one["samples"], generator("pair", one["samples"]))
    rollout = 2 * paths.tokens[:, 0] + paths.tokens[:, 1]
    found: Row = {}
    for name, value in zip(names, values, strict=True):
        drawn = value[rollout]
        squares = (drawn - drawn.mean()) ** 2
        found[f"{name}_drawn"] = float(squares.mean())
        found[f"{name}_error"] = float(squares.std() / np.sqrt(len(squares)))
    return found


def _chunks(one: Mapping[str, Any], vocabulary: int, count: int, spread: float = 1.0) -> Iterator[Environments]:
    """Random environments, some at a time."""
    length, distance = one["length"], one["distance"]
    size = max(1, CHUNK // vocabulary**length)
    for first in range(0, count, size):
        drawn = generator(vocabulary, length, distance, spread, one["seed"], first)
        yield Environments.draw(min(size, count - first), vocabulary, length, distance, drawn, spread)


def _rates(one: Mapping[str, Any]) -> list[Row]:
    """In how many environments Rao–Blackwell is the noisier one, of value and of gradient, and by how much."""
    found: dict[str, list[np.ndarray]] = {"value": [], "gradient": [], "baselines": [], "kl": [], "identity": []}
    off: float | None = None
    for number, environments in enumerate(_chunks(one, one["vocabulary"], one["environments"], one["spread"])):
        kl, plain = environments.value_moments(environments.u)
        blackwell = environments.value_moments()[1]
        forms = {"to go": sampled(environments, credit="to-go"), "rao-blackwell": rao_blackwell(environments)}
        noise = {name: environments.noise(form).variance for name, form in forms.items()}
        best = {
            name: environments.noise(environments.with_baseline(form, by_prefix=False)).variance
            for name, form in forms.items()
        }
        found["kl"].append(kl)
        found["value"].append(blackwell / plain)
        found["gradient"].append(noise["rao-blackwell"] / noise["to go"])
        found["baselines"].append(best["rao-blackwell"] / best["to go"])
        own = environments.own_noise()
        gap = np.abs(plain - blackwell - own - 2 * environments.steering())
        found["identity"].append(gap / (plain + blackwell + own))
        if number == 0 and one["vocabulary"] ** one["length"] <= ENUMERATED:
            off = _off(environments, noise, plain, blackwell)
    all_of = {name: np.concatenate(parts) for name, parts in found.items()}
    row: Row = {"kl": float(np.median(all_of["kl"])), "off_again": off, "off_identity": float(all_of["identity"].max())}
    for name in ("value", "gradient", "baselines"):
        ratio = all_of[name]
        row |= {
            f"{name}_fails": int((ratio > 1).sum()),
            f"{name}_worst": float(ratio.max()),
        }
    return [row]


def _off(
    environments: Environments, noise: Mapping[str, np.ndarray], plain: np.ndarray, blackwell: np.ndarray
) -> float:
    """In the first environment, the largest relative difference from enumeration of the registered estimators."""
    instance = _instance(environments, 0)
    enumerated = {name: _exact(instance, name) for name in noise}
    value, metric = enumerated["to go"].value, enumerated["rao-blackwell"].metric
    assert value is not None
    assert metric is not None
    # Of nearly deterministic policies the variance is a small difference, and rounding is that of the second moment.
    differences = [(noise[name][0] - moments.variance) / moments.second_moment for name, moments in enumerated.items()]
    differences += [plain[0] / value.std**2 - 1, blackwell[0] / metric.std**2 - 1]
    return float(np.abs(differences).max())


def _instance(environments: Environments, environment: int) -> Instance:
    policy, reference = environments.tables(environment)
    return Instance.of(sequence(policy.shape[1], environments.length), policy, reference)


def ladder(environments: Environments) -> Iterator[tuple[str, Form]]:
    """Unbiased estimators, from what needs least knowledge to what needs most."""
    to_go, exact = sampled(environments, credit="to-go"), rao_blackwell(environments)
    yield "return", sampled(environments, credit="return")
    yield "k3 in both", sampled(environments, 1.0, credit="return", both=True)
    yield "to go", to_go
    yield "k3 in both, to go", sampled(environments, 1.0, credit="to-go", both=True)
    yield "to go, best λ", sampled(environments, _best(environments), credit="to-go", both=True)
    yield "to go, one baseline", environments.with_baseline(to_go, by_prefix=False)
    yield "to go, baseline by prefix", environments.with_baseline(to_go, by_prefix=True)
    yield "to go, critic", environments.with_baseline(bootstrapped(environments), by_prefix=True)
    yield "rao-blackwell", exact
    yield "rao-blackwell, one baseline", environments.with_baseline(exact, by_prefix=False)
    yield "rao-blackwell, baseline by prefix", environments.with_baseline(exact, by_prefix=True)
    yield (
        "rao-blackwell, critic",
        environments.with_baseline(rao_blackwell(environments, critic=True), by_prefix=True),
    )


def _best(environments: Environments) -> np.ndarray:
    """(W,) the λ of the least noisy gradient: the variance is quadratic in it."""
    forms = (sampled(environments, lam, credit="to-go", both=True) for lam in (-1.0, 0.0, 1.0))
    return best_coefficient([environments.noise(form).variance for form in forms])


def _ladder(one: Mapping[str, Any]) -> list[Row]:
    """Each estimator's variance over the least possible, and its parts over ‖∇KL‖²; medians."""
    found: dict[str, list[np.ndarray]] = {}
    kl: list[np.ndarray] = []
    off: float | None = None
    for number, environments in enumerate(_chunks(one, VOCABULARY, one["compared"])):
        kl.append(environments.value_moments()[0])
        size = environments.squared_gradient(rao_blackwell(environments))
        for name, form in ladder(environments):
            noise = environments.noise(form)
            if name == "return":
                whole = noise.variance
            columns = [
                noise.variance / noise.visits,
                *(part / size for part in (noise.visits, noise.token, noise.future)),
                noise.variance > whole * (1 + EXACT),
            ]
            found.setdefault(name, []).append(np.stack(columns))
            if number == 0 and name in AGAIN and VOCABULARY ** one["length"] <= ENUMERATED:
                again = _exact(_instance(environments, 0), name)
                square = float((again.gradient**2).sum())
                off = max(off or 0.0, abs(noise.variance[0] / again.variance - 1), abs(size[0] / square - 1))
    rows = []
    for name, parts in found.items():
        over, visits, token, future, noisier = np.concatenate(parts, axis=1)
        rows.append(
            {
                "estimator": name,
                "kl": float(np.median(np.concatenate(kl))),
                "over_floor": float(np.median(over)),
                "least_over_floor": float(over.min()),
                **{
                    part: float(np.median(values))
                    for part, values in (("visits", visits), ("token", token), ("future", future))
                },
                "variance": float(np.median(visits + token + future)),
                "noisier_than_return": int(noisier.sum()),
                "off_again": off if off is None else float(off),
            }
        )
    return rows


# Mixtures are of these, with weights that add up to 1, and of the bare score, whose mean is zero, with any.
SAMPLED_ONLY = ("return", "to go", "k3 in both", "k3 in both, to go")
SCORE = ("k1-loss", None, None)


def _mixtures(one: Mapping[str, Any]) -> list[Row]:
    """Medians over environments of the least noisy linear combination of the registered estimators."""
    found: dict[str, list[float]] = {}
    for number in range(one["mixed"]):
        drawn = generator("mixtures", one["length"], one["distance"], one["seed"], number)
        environments = Environments.draw(1, VOCABULARY, one["length"], one["distance"], drawn)
        instance = _instance(environments, 0)
        each = {
            name: gradients(estimator, instance, instance.paths, placement, credit)  # type: ignore[arg-type]
            for name, (estimator, placement, credit) in (AGAIN | {"score": SCORE}).items()
        }
        weights = instance.rollout_weights("current")
        floor = float(environments.noise(rao_blackwell(environments)).visits[0])
        mixtures = {
            "sampled log-probs": SAMPLED_ONLY,
            "rao-blackwell, one baseline": ("rao-blackwell",),
            "all": (*SAMPLED_ONLY, "rao-blackwell"),
        }
        for name, mixed in mixtures.items():
            variance, chosen = mixture([each[one] for one in mixed], each["score"], weights)
            found.setdefault(f"{name}: over_floor", []).append(variance / floor)
            if name == "all":
                found.setdefault("weight of rao-blackwell", []).append(float(chosen[-1]))
    return [{name: float(np.median(values)) for name, values in found.items()}]


def mixture(each: list[np.ndarray], score: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """Least variance of Σ aᵢ·ĝᵢ + b·score with Σ aᵢ = 1, and the aᵢ; gradients are (N, D), `weights` (N,)."""
    first, *others = each
    mean = weights @ first
    root = np.sqrt(weights)[:, None]
    towards = np.stack([(root * part).ravel() for part in (score, *(other - first for other in others))], axis=1)
    start = (root * (first - mean)).ravel()
    found, *_ = np.linalg.lstsq(towards, -start, rcond=None)
    left = start + towards @ found
    return float(left @ left), np.array([1 - found[1:].sum(), *found[1:]])
