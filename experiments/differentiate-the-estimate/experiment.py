"""Exact expected gradients of one step: two examples, a line of binary policies, and random ones ever further away."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from kltest.environments import Instance, bandit
from kltest.environments.policies import table
from kltest.estimators import find, registry
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.truth import divergences, gradient, value

from ..arrays import code_of, generator
from .settings import EXAMPLES, FOLLOWED, LEVELS, PROBABILITIES, QUANTILES
from .settings import SETTINGS as SETTINGS

Row = dict[str, Any]
# Below this share of the true gradient's length a component is rounding, and has no sign.
SILENT = 1e-9


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The examples for every registered estimator of one step, the binary line for some, then the grid."""
    for name, estimator in registry().items():
        # Those that compare the rows of a batch, or their sampler with their policy, are the matter of others.
        if not (estimator.spec.couples or estimator.spec.off_policy_only):
            yield {"part": "examples", "estimator": name, "_code": code_of(estimator)}
    yield from ({"part": "binary", "estimator": name} for name in FOLLOWED)
    for configuration in configurations:
        yield {"part": "distance", **configuration}


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """Rows of one part: an example each, a probability each, or a distance each."""
    return {"examples": _examples, "binary": _binary, "distance": _distances}[configuration["part"]](configuration)


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
                "part": "examples",
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


def _binary(configuration: Mapping[str, Any]) -> list[Row]:
    p = np.array(PROBABILITIES)
    instance = _instance(np.log(np.stack([p, 1 - p], axis=1)), np.log(np.full((len(p), 2), 0.5)))
    found, truth = _expected(configuration["estimator"], instance), _gradient("reverse_kl", instance)
    scale = p * (1 - p)
    columns = {"probability": p, "derivative": found[:, 0] / scale, "true_derivative": truth[:, 0] / scale}
    return [
        {
            "part": "binary",
            "estimator": configuration["estimator"],
            **dict(zip(columns, map(float, values), strict=True)),
        }
        for values in zip(*columns.values(), strict=True)
    ]


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
        row = {"part": "distance", **about, "kl": kl, "reached": int(here.sum())}
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
