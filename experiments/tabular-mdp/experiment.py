"""Gradients that token-level losses miss in MDPs: one part of the question at a time, every number exact."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit

from kltest.environments import END, Environment, Instance, mdp, tabular
from kltest.loss.resolve import resolve
from kltest.moments import dynamic
from kltest.reproduce.frames import Row
from kltest.sweeps.settings import Setting, Settings
from kltest.truth import gradient

from ..arrays import generator, norm
from ..jacobians import asymmetry, jacobian, next_contexts

# Settings that each part varies; it takes no notice of the others.
PARTS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "environments": ("environment", "horizon", "slip", "seed"),
    "estimators": {"environment": "environment", "estimator": "estimator", "seed": "draw"},
    "picture": (),
    "length": ("beta", "reference"),
}

SETTINGS = Settings(
    title="What a token-level loss misses in decision processes",
    tags=("exact", "gradient", "mdp"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        "environment": ("chain", "grid", "random"),
        "horizon": Setting(
            (1, 2, 4, 8, 16, 32, 64), full=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256), allowed=(1, 1000)
        ),
        "slip": Setting(
            (0.0, 0.25, 0.5, 0.75, 1.0),
            full=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
            allowed=(0.0, 1.0),
        ),
        "estimator": Setting(
            ("k2-loss", "full-loss", "k3-loss", "k1-reward-immediate", "k1-reward-to-go", "k1-reward"),
            allowed=(
                *("k1-loss", "k2-loss", "k3-loss", "abs-loss", "full-loss", "k3-straight-through", "k3-inverted"),
                *("k1-reward", "k1-reward-to-go", "k1-reward-immediate", "k2-reward", "k3-reward"),
            ),
        ),
        # Policies and references for which estimators are judged.
        "draw": Setting(0, full=tuple(range(10)), allowed=(0, 1000)),
        "beta": Setting((0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0), allowed=(0.2, 10.0)),
        "reference": Setting(
            (0.02, 0.1), full=(0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5), allowed=(0.001, 0.9)
        ),
    },
    seeds={"quick": 3, "full": 20},
)

# The environments. An action that slips is one that was drawn uniformly.
CHAIN = 9  # states in a row: left, stay or right
GRID = (5, 4)  # columns, rows: right, up, left or down, or where one is at a wall
RANDOM = {"states": 12, "actions": 3, "branches": 3}
# Policy and reference have independent normal logits of these standard deviations around a common table.
SPREAD = {"common": 0.7, "own": 0.7}
# The processes in which estimators are judged.
JUDGED = {"horizon": 4, "slip": 0.25}

# The picture: where the reference drifts to the right, and the policy departs from it around a coin only.
PICTURE = {"columns": 9, "rows": 5, "horizon": 14, "slip": 0.1, "drift": 1.0, "coin": (6, 3), "pull": 2.0}

# Length: at every step one goes on, which pays 1, or stops; a step that goes on leads on with this chance.
CONTINUES = 0.9
STEPS = 350  # 0.9^350 is 1e-16: nothing is left of a rollout by then


# Relative differences below this are rounding.
EXACT = 1e-10


# --- environments ---
# The decision processes of this experiment: a chain, a grid and random ones, actions that slip, rollouts that end.
# Right, up, left, down.
MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))


def environment(name: str, horizon: int, slip: float, seed: int) -> Environment:
    """One of the named environments, whose actions slip; `seed` draws the random ones."""
    if name == "chain":
        states = CHAIN
        targets = np.clip(np.arange(states)[:, None] + [-1, 0, 1], 0, states - 1)
        return slippery("chain", targets, slip, horizon, start=states // 2)
    if name == "grid":
        return grid(*GRID, horizon, slip, start=0)
    drawn = mdp(**RANDOM, horizon=horizon, seed=int(generator("world", seed).integers(2**31)))
    dense = next_contexts(drawn)
    return from_dense("random", (1 - slip) * dense + slip * dense.mean(axis=1, keepdims=True), horizon, drawn)


def grid(columns: int, rows: int, horizon: int, slip: float, start: int) -> Environment:
    """Cells are numbered row by row from the bottom left; a step against a wall stays where it is."""
    at = [(x, y) for y in range(rows) for x in range(columns)]
    targets = np.array(
        [[min(max(y + b, 0), rows - 1) * columns + min(max(x + a, 0), columns - 1) for a, b in MOVES] for x, y in at]
    )
    return slippery("grid", targets, slip, horizon, start=start)


def slippery(name: str, targets: np.ndarray, slip: float, horizon: int, start: int) -> Environment:
    """The process in which an action leads to its target, (S, A), or with chance `slip` to that of a uniform action."""
    states = len(targets)
    dense = (1 - slip) * np.eye(states)[targets]
    dense += slip * np.eye(states)[targets].mean(axis=1, keepdims=True)
    return from_dense(name, dense, horizon, np.eye(states)[start])


def from_dense(name: str, dense: np.ndarray, horizon: int, first: np.ndarray | Environment) -> Environment:
    """From (S, A, S) chances of going on; what is missing from 1 ends the rollout."""
    start = first.start_distribution() if isinstance(first, Environment) else first
    reward = first.reward if isinstance(first, Environment) else np.zeros(dense.shape[:2])
    ends = np.maximum(1 - dense.sum(axis=2, keepdims=True), 0.0)
    ends[ends < 1e-12] = 0.0
    chances = np.concatenate([dense, ends], axis=2)
    branches = int((chances > 0).sum(axis=2).max())
    order = np.argsort(chances <= 0, axis=2, kind="stable")[:, :, :branches]
    successors = np.where(order == dense.shape[2], END, order)
    chances = np.take_along_axis(chances, order, axis=2)
    return tabular(successors, chances / chances.sum(axis=2, keepdims=True), reward, horizon, start=start, name=name)


def instance_of(name: str, horizon: int, slip: float, seed: int) -> Instance:
    """An environment with a policy and a reference that both differ from a common table."""
    process = environment(name, horizon, slip, seed)
    drawn = generator("policies", name, seed)
    shape = (process.n_contexts, process.vocabulary)
    common = SPREAD["common"] * drawn.standard_normal(shape)
    policy, reference = (common + SPREAD["own"] * drawn.standard_normal(shape) for _ in range(2))
    return Instance.of(process, policy, reference)


def picture() -> tuple[Instance, np.ndarray]:
    """A grid with a coin: reward 1 for every step made on its cell. Also (S,) each cell's steps from the coin.

    The reference drifts to the right everywhere. The policy is the reference except within two steps of the coin, where
    it goes for the coin.
    """
    chosen = PICTURE
    columns, rows = chosen["columns"], chosen["rows"]
    process = grid(columns, rows, chosen["horizon"], chosen["slip"], start=(rows // 2) * columns)
    x, y = np.arange(process.n_contexts) % columns, np.arange(process.n_contexts) // columns
    away = np.abs(x - chosen["coin"][0]) + np.abs(y - chosen["coin"][1])
    reference = np.tile([chosen["drift"], 0.0, 0.0, 0.0], (process.n_contexts, 1))
    nearer = np.stack(
        [np.sign(chosen["coin"][axis] - place) * step for axis, place in ((0, x), (1, y)) for step in (1, -1)], axis=1
    )[:, [0, 2, 1, 3]]
    policy = reference + np.where((away <= 2)[:, None], chosen["pull"] * nearer, 0.0)
    reward = np.repeat((away == 0)[:, None], process.vocabulary, axis=1).astype(float)
    return Instance.of(replace(process, reward=reward), policy, reference), away


def going_on(reference: float, logit: float) -> Instance:
    """One state: stop (0), or go on (1), which pays 1 and leads back with chance CONTINUES.

    `reference` is its chance of going on, `logit` the policy's of going on against stopping.
    """
    dense = np.array([[[0.0], [CONTINUES]]])
    process = from_dense("length", dense, STEPS, np.ones(1))
    process = replace(process, reward=np.array([[0.0, 1.0]]))
    return Instance.of(process, np.array([[0.0, logit]]), np.log([[1 - reference, reference]]))


# --- ends ---
# Rest points of going on or stopping, in closed form: under a token-level loss, and under ∇KL(π‖ref).
#
# With x the logit of the chance p of going on, a that of the reference and γ the chance of coming back, training with a
# token-level loss rests where (1 − γp)(x − a) = 1/β. The left side grows with p but for a stretch between two *folds*,
# at which its derivative vanishes:
#
#     a = x − (1 − γp)/(γp(1 − p)),    with    β = γp(1 − p)/(1 − γp)².
#
# The first has its largest value at p = 1/(2 − γ): a smaller a has one fold on either side of it, and two stable ends
# with a tipping point between them for the β between those of its folds; a larger a has one end for every β.
#
# ∇KL(π‖ref) rests at x = a + (1 + γV)/β, where V = β·log(1 − ref + ref·e^((1 + γV)/β)) is the value of being there. The
# right side has the slope γp < 1 in V, so that there is one such V.
# Beyond this logit a policy is further from any of the references than any of the coefficients allows.
SIDE = 60.0
CUSP = logit(1 / (2 - CONTINUES))


def folds(reference: float) -> list[float]:
    """The logits of the two folds, the smaller first; none if the reference goes on too often."""

    def excess(x: float) -> float:
        chance = expit(x)
        return float(x - (1 - CONTINUES * chance) / (CONTINUES * chance * expit(-x)) - logit(reference))

    return [_root(excess, -SIDE, CUSP), _root(excess, CUSP, SIDE)] if excess(CUSP) > 0 else []


def band_of(reference: float) -> list[float]:
    """The smallest and the largest β with two stable ends, those of the folds; none if there is no such β."""
    chances = [(expit(x), expit(-x)) for x in folds(reference)]
    return sorted(float(CONTINUES * p * stop / (1 - CONTINUES * p) ** 2) for p, stop in chances)


def token_level(beta: float, reference: float) -> list[float]:
    """The logits at rest under a token-level loss: one at most below, between and above the folds."""

    def pull(x: float) -> float:
        return float(logit(reference) + 1 / (beta * (1 - CONTINUES * expit(x))) - x)

    parts = pairwise([-SIDE, *folds(reference), SIDE])
    return [_root(pull, low, high) for low, high in parts if pull(low) > 0 > pull(high) or pull(low) < 0 < pull(high)]


def true(beta: float, reference: float) -> list[float]:
    """The one logit at rest under ∇KL(π‖ref)."""

    def excess(value: float) -> float:
        paid = np.logaddexp(np.log1p(-reference), np.log(reference) + (1 + CONTINUES * value) / beta)
        return float(value - beta * paid)

    return [float(logit(reference) + (1 + CONTINUES * _root(excess, 0.0, 1 / (1 - CONTINUES))) / beta)]


def _root(of: Callable[[float], float], low: float, high: float) -> float:
    return float(brentq(of, low, high, xtol=1e-14, rtol=1e-15))


Configuration = Mapping[str, Any]


def compute(configuration: Configuration) -> list[Row]:
    """The rows of one part with its settings."""
    options = {name: value for name, value in configuration.items() if name != "part"}
    return [{**configuration, **row} for row in COMPUTE[configuration["part"]](**options)]


def _environments(environment: str, horizon: int, slip: float, seed: int) -> list[Row]:
    """Share missed, and distance of the token-level gradient from any function's."""
    instance = instance_of(environment, horizon, slip, seed)
    whole, local = (gradient(f"{name}reverse_kl", instance) for name in ("", "local_"))
    asymmetric = asymmetry(jacobian("local_reverse_kl", instance))
    return [{"missed": norm(whole - local) / norm(whole), "asymmetry": asymmetric}]


def _estimators(environment: str, estimator: str, seed: int) -> list[Row]:
    """The expected gradient of an implementation, by dynamic programming."""
    instance = instance_of(environment, JUDGED["horizon"], JUDGED["slip"], seed)
    whole, local = (gradient(f"{name}reverse_kl", instance) for name in ("", "local_"))
    found = dynamic(resolve(estimator), instance).gradient
    return [{"bias": norm(found - whole) / norm(whole), "off_local": norm(found - local) / norm(whole)}]


def _picture() -> list[Row]:
    """A row a cell: what it is like, and which way the descent of the KL moves the policy there, as (right, up)."""
    instance, away = picture()
    columns = PICTURE["columns"]
    environment, chances = instance.environment, np.exp(instance.policy)
    kl = (chances * (instance.policy - instance.reference)).sum(axis=1)
    moves = np.array(MOVES, dtype=float)
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
    programming is asked on both sides of each rest point.
    """
    rows = []
    band = dict(zip(("band_from", "band_to"), band_of(reference), strict=False))
    for followed, solve in (("local_reverse_kl", token_level), ("reverse_kl", true)):
        rests = solve(beta, reference)
        between = [-SIDE, *((one + other) / 2 for one, other in pairwise(rests)), SIDE]
        pushes = [push(beta, reference, logit, followed) for logit in between]
        for rest, (below, above) in zip(rests, pairwise(pushes), strict=True):
            stable = below > 0 > above
            rows.append({"followed": followed, "chance": float(expit(rest)), "stable": stable, **band})
    return rows


def push(beta: float, reference: float, logit: float, followed: str) -> float:
    """Return the field of training at the logit of going on."""
    instance = going_on(reference, logit)
    return float((gradient("expected_reward", instance) - beta * gradient(followed, instance))[0, 1])


COMPUTE: dict[str, Callable[..., list[Row]]] = {
    "environments": _environments,
    "estimators": _estimators,
    "picture": _picture,
    "length": _length,
}
