"""Gradients that token-level losses miss in MDPs: one part of the question at a time, every number exact."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.loss.resolve import resolve
from kltest.moments import dynamic, exact
from kltest.truth import gradient, gradient_again, value

from ..arrays import cosine, norm
from ..enumerated import value_again
from ..jacobians import asymmetry, jacobian
from . import ends, environments, settings
from .settings import ENUMERATED
from .settings import SETTINGS as SETTINGS

Configuration = Mapping[str, Any]
Row = dict[str, Any]


def compute(configuration: Configuration) -> list[Row]:
    """The rows of one part with its settings."""
    options = {name: value for name, value in configuration.items() if name != "part"}
    return [{**configuration, **row} for row in COMPUTE[configuration["part"]](**options)]


def _environments(environment: str, horizon: int, slip: float, seed: int) -> list[Row]:
    """Share missed, and distance of the token-level gradient from any function's; enumerated if it fits."""
    instance = environments.instance(environment, horizon, slip, seed)
    whole, local = (gradient(f"{name}reverse_kl", instance) for name in ("", "local_"))
    row = {
        "missed": norm(whole - local) / norm(whole),
        "cosine": cosine(local, whole),
        "asymmetry": asymmetry(jacobian("local_reverse_kl", instance)),
        "off_again": None,
        "off_dynamics": None,
    }
    if horizon <= ENUMERATED["horizon"] and instance.environment.count() <= ENUMERATED["most"]:
        again = [gradient_again(f"{name}reverse_kl", instance) for name in ("", "local_")]
        row["off_again"] = max(norm(found - second) for found, second in zip((whole, local), again, strict=True))
        row["off_again"] /= norm(whole)
        row["off_dynamics"] = _dynamics(instance)
    return [row]


def _dynamics(instance: Instance) -> float:
    """Difference of log P_π − log P_ref, of whole trajectories with their dynamics, from the sum of log π − log ref."""
    paths = instance.paths
    with_dynamics = paths.log_probability(instance.policy) - paths.log_probability(instance.reference)
    return float(np.abs(with_dynamics - paths.along(instance.policy - instance.reference)).max())


def _estimators(environment: str, estimator: str, seed: int) -> list[Row]:
    """The expected gradient of an implementation, by dynamic programming and over all rollouts."""
    instance = environments.instance(environment, ENUMERATED["horizon"], ENUMERATED["slip"], seed)
    whole, local = (gradient(f"{name}reverse_kl", instance) for name in ("", "local_"))
    loss = resolve(estimator)
    found, again = dynamic(loss, instance).gradient, exact(loss, instance).gradient
    return [
        {
            "bias": norm(found - whole) / norm(whole),
            "off_local": norm(found - local) / norm(whole),
            "off_again": norm(found - again) / norm(whole),
            "off_value": abs(value("kl", instance) / value_again("kl", instance) - 1),
        }
    ]


def _picture() -> list[Row]:
    """A row a cell: what it is like, and which way the descent of the KL moves the policy there, as (right, up)."""
    instance, away = environments.picture()
    columns = settings.PICTURE["columns"]
    environment, chances = instance.environment, np.exp(instance.policy)
    kl = (chances * (instance.policy - instance.reference)).sum(axis=1)
    moves = np.array(environments.MOVES, dtype=float)
    # A push has a direction only where actions have: those of the grid are its moves.
    pushes = {
        name: -gradient(row, instance)
        for name, row in (("whole", "reverse_kl"), ("local", "local_reverse_kl"), ("future", "future_reverse_kl"))
    }
    rows = []
    for cell in range(environment.n_contexts):
        row: Row = {"x": cell % columns, "y": cell // columns, "away": int(away[cell])}
        row |= {"reward": float(environment.reward[cell, 0]), "kl": float(kl[cell])}
        row["start"] = bool(environment.start_distribution()[cell] > 0)
        for name, each in (("policy", chances), ("reference", np.exp(instance.reference)), *pushes.items()):
            row |= {f"{name}_{axis}": float((each @ moves)[cell, at]) for at, axis in enumerate(("right", "up"))}
        row |= {f"{name}_size": norm(each[cell]) for name, each in pushes.items()}
        rows.append(row)
    return rows


def _length(beta: float, reference: float) -> list[Row]:
    """Rest points of going on or stopping, under the token-level loss and under ∇KL(π‖ref), in closed form.

    A policy has one number here, so that the sign of what training follows says where every start ends: dynamic
    programming is asked at each rest point and on both of its sides.
    """
    rows = []
    band = dict(zip(("band_from", "band_to"), ends.band(reference), strict=False))
    for followed, solve in (("local_reverse_kl", ends.token_level), ("reverse_kl", ends.true)):
        rests = solve(beta, reference)
        between = [-ends.SIDE, *((one + other) / 2 for one, other in pairwise(rests)), ends.SIDE]
        asked = [(logit, *_pushes(beta, reference, logit, followed)) for logit in sorted([*rests, *between])]
        off = max(abs(push - formula) for _, push, formula in asked)
        for logit in rests:
            at = next(index for index, (asked_at, _, _) in enumerate(asked) if asked_at == logit)
            stable = asked[at - 1][1] > 0 > asked[at + 1][1]
            chance = float(1 / (1 + np.exp(-logit)))
            rows.append({"followed": followed, "chance": chance, "stable": stable, "off_formula": off, **band})
    return rows


def _pull(beta: float, reference: float, logit: float, followed: str) -> float:
    """logit ref + Q/β − logit p: what going on brings, against where one stands.

    Under the token-level loss Q = 1/(1 − γp), the reward of going on and of all that follows it; under ∇KL(π‖ref) the
    KL that follows is taken off.
    """
    stop, go = (float(one) for one in table(np.array([[0.0, logit]]))[0])
    chance, own = np.exp(go), np.log(reference) - np.log1p(-reference)
    kl = chance * (go - np.log(reference)) + np.exp(stop) * (stop - np.log1p(-reference))
    follows = settings.CONTINUES * (chance - (beta * kl if followed == "reverse_kl" else 0.0))
    return float(own + (1 + follows / (1 - settings.CONTINUES * chance)) / beta - logit)


def _pushes(beta: float, reference: float, logit: float, followed: str) -> tuple[float, float]:
    """Return the field of training at the logit, by dynamic programming and as β·p·(1 − p)/(1 − γp) of the pull."""
    instance = environments.going_on(reference, logit)
    found = gradient("expected_reward", instance) - beta * gradient(followed, instance)
    stop, chance = np.exp(instance.policy[0])
    scale = beta * chance * stop / (1 - settings.CONTINUES * chance)
    return float(found[0, 1]), float(scale * _pull(beta, reference, logit, followed))


def _rotation(beta: float, seed: int) -> list[Row]:
    """Eigenvalues of the training field at its fixed point, in random processes: complex ones turn."""
    rows = []
    for number in range(settings.ROTATION["environments"]):
        process, reference = environments.ending(seed, number)
        for followed, soft in (("local_reverse_kl", False), ("reverse_kl", True)):
            instance = Instance.of(process, environments.rest(process, reference, beta, soft), reference)
            reward, penalty = (gradient(name, instance) for name in ("expected_reward", followed))
            matrix = jacobian("expected_reward", instance) - beta * jacobian(followed, instance)
            rows.append(
                {"followed": followed}
                | {"off_rest": norm(reward - beta * penalty) / norm(reward), **_eigenvalues(matrix, instance)}
            )
    return rows


def _eigenvalues(matrix: np.ndarray, instance: Instance) -> Row:
    """Of changes of logits that change a policy: the one with the most imaginary part for its real one, in `turn`."""
    contexts, actions = instance.policy.shape
    basis = np.kron(np.eye(contexts), np.linalg.svd(np.ones((1, actions)))[2][1:].T)
    found = np.linalg.eigvals(basis.T @ matrix @ basis)
    turn = np.abs(found.imag) / np.abs(found.real)
    most = found[np.argmax(turn)]
    return {
        "turn": float(turn.max()),
        "real": float(most.real),
        "imaginary": abs(float(most.imag)),
    }


COMPUTE: dict[str, Callable[..., list[Row]]] = {
    "environments": _environments,
    "estimators": _estimators,
    "picture": _picture,
    "length": _length,
    "rotation": _rotation,
}
