"""The decision processes of this experiment: a chain, a grid and random ones, actions that slip, rollouts that end."""

from dataclasses import replace

import numpy as np

from kltest.environments import END, Environment, Instance, mdp, tabular
from kltest.environments.policies import table

from ..arrays import generator
from . import settings

# Right, up, left, down.
MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))


def environment(name: str, horizon: int, slip: float, seed: int) -> Environment:
    """One of the named environments, whose actions slip; `seed` draws the random ones."""
    if name == "chain":
        states = settings.CHAIN
        targets = np.clip(np.arange(states)[:, None] + [-1, 0, 1], 0, states - 1)
        return slippery("chain", targets, slip, horizon, start=states // 2)
    if name == "grid":
        return grid(*settings.GRID, horizon, slip, start=0)
    drawn = mdp(**settings.RANDOM, horizon=horizon, seed=int(generator("world", seed).integers(2**31)))
    dense = drawn.transition.toarray().reshape(drawn.n_contexts, drawn.vocabulary, drawn.n_contexts)
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


def instance(name: str, horizon: int, slip: float, seed: int) -> Instance:
    """An environment with a policy and a reference that both differ from a common table."""
    process = environment(name, horizon, slip, seed)
    drawn = generator("policies", name, seed)
    shape = (process.n_contexts, process.vocabulary)
    common = settings.SPREAD["common"] * drawn.standard_normal(shape)
    policy, reference = (common + settings.SPREAD["own"] * drawn.standard_normal(shape) for _ in range(2))
    return Instance.of(process, policy, reference)


def picture() -> tuple[Instance, np.ndarray]:
    """A grid with a coin: reward 1 for every step made on its cell. Also (S,) each cell's steps from the coin.

    The reference drifts to the right everywhere. The policy is the reference except within two steps of the coin, where
    it goes for the coin.
    """
    chosen = settings.PICTURE
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
    dense = np.array([[[0.0], [settings.CONTINUES]]])
    process = from_dense("length", dense, settings.STEPS, np.ones(1))
    process = replace(process, reward=np.array([[0.0, 1.0]]))
    return Instance.of(process, np.array([[0.0, logit]]), np.log([[1 - reference, reference]]))


def ending(seed: int, number: int) -> tuple[Environment, np.ndarray]:
    """A random process that ends with chance 1 − CONTINUES a step, and the logits of a reference."""
    size = {name: settings.ROTATION[name] for name in ("states", "actions", "branches")}
    drawn = generator("ending", seed, number)
    start = np.full(size["states"], 1 / size["states"])
    process = mdp(**size, horizon=settings.STEPS, seed=int(drawn.integers(2**31)), start=start)
    dense = process.transition.toarray().reshape(process.n_contexts, process.vocabulary, process.n_contexts)
    return (
        from_dense("ending", settings.CONTINUES * dense, settings.STEPS, process),
        drawn.standard_normal((process.n_contexts, process.vocabulary)),
    )


def rest(process: Environment, reference: np.ndarray, beta: float, soft: bool) -> np.ndarray:
    """(S, A) log-probs at rest of a process that ends by itself, by iterating π ∝ ref·exp(Q/β) to rounding.

    `soft`: Q counts the KL still to come, as ∇KL(π‖ref) does; else it is of the reward alone, as under a token-level
    loss. Half of every step is kept, so that it settles.
    """
    dense = process.transition.toarray().reshape(process.n_contexts, process.vocabulary, process.n_contexts)
    log_reference = table(reference)
    policy = log_reference
    for _ in range(2000):
        chances = np.exp(policy)
        paid = process.reward - (beta * (policy - log_reference) if soft else 0.0)
        step = np.einsum("sa,sak->sk", chances, dense)
        value = np.linalg.solve(np.eye(len(step)) - step, (chances * paid).sum(axis=1))
        moved = table(0.5 * policy + 0.5 * (log_reference + (process.reward + dense @ value) / beta))
        settled = np.abs(moved - policy).max() < 1e-14
        policy = moved
        if settled:
            break
    return policy
