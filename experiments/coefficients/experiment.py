"""Trains with every estimator at every coefficient, and says where that ends beside where it should."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import logsumexp

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.loss.calling import bind
from kltest.loss.placement import place
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.sweeps.run import Batching
from kltest.sweeps.store import digest
from kltest.training import Run, train

from .ends import FRONTIER, best, distance, entropy, frontier, measured, predicted
from .environments import problem
from .limits import limit
from .settings import BUDGET_BETA, CENTRED, COLLAPSED, FIXED_POINTS, OPTIMUM
from .settings import SETTINGS as SETTINGS

BATCHING = Batching(("seed", "beta", "learning_rate", "estimator"), size=54)

Row = dict[str, Any]
Configuration = Mapping[str, Any]

# The rate of exact ascent is rate/max(β, floor), floor after floor: while the policy has far to go, steps as long as
# 1/β would settle on whichever action is tried first.
FLOORS = (1.0, 0.3, 0.1)


def compute_batch(configurations: Sequence[Configuration]) -> list[list[Row]]:
    part = configurations[0]["part"]
    if part == "frontier":
        return [_frontier(one) for one in configurations]
    if part == "limit":
        return [[{**one, **row} for row in limit(one["environment"], one["seed"])] for one in configurations]
    together = {
        "exact": _exact,
        "sampled": _sampled,
        "budget": _budget,
        "fixed-points": _fixed_points,
        "optimum": _optimum,
    }[part]
    return [[row] for row in together(configurations)]


def _estimator(one: Configuration) -> str | None:
    return None if one["estimator"] == "none" else one["estimator"]


def _exact(configurations: Sequence[Configuration]) -> list[Row]:
    """Ascent on expected gradients, at a rate that rises as the policy comes nearer."""
    problems = [problem(one["environment"], one["seed"]) for one in configurations]
    history = ascend(configurations, problems)
    rows = []
    for index, one in enumerate(configurations):
        found = _measured(history, index, one)
        rows.append({**one, **found, **_against(one, history.logits[index], found)})
    return rows


def ascend(configurations: Sequence[Configuration], problems: Sequence[Any]) -> Any:
    """The History of the last stage of exact training, the start of the first in its place."""
    start, diverged, first = [which.start for which in problems], np.full(len(problems), -1), None
    for floor in FLOORS:
        runs = [
            Run(
                replace(which, start=logits),
                _estimator(one),
                beta=one["beta"],
                learning_rate=one["learning_rate"] / max(one["beta"], floor),
            )
            for one, which, logits in zip(configurations, problems, start, strict=True)
        ]
        history = train(runs, steps=configurations[0]["steps"] // len(FLOORS))
        first = history if first is None else first
        # A run that has diverged once stays where it was.
        diverged = np.where(diverged >= 0, diverged, history.diverged)
        start = list(history.logits)
    columns = {
        name: np.stack([getattr(first, name)[0], getattr(history, name)[-1]])
        for name in ("reward", "kl", "kl_to_optimum")
    }
    return replace(history, **columns, diverged=diverged)


def _measured(history: Any, index: int, one: Configuration) -> Row:
    """Return the end of a run; it collapsed if it diverged, or if little is left of the entropy that π* has."""
    end = {name: float(getattr(history, name)[-1, index]) for name in ("reward", "kl", "kl_to_optimum", "entropy")}
    diverged = bool(history.diverged[index] >= 0)
    optimal = entropy(one["environment"], one["beta"], one.get("seed", 0))
    return {**end, "diverged": diverged, "collapsed": diverged or end["entropy"] < COLLAPSED * optimal}


def _against(one: Configuration, logits: np.ndarray, found: Row) -> Row:
    """The end beside the frontier of all optima and beside the predicted fixed point, if there is one."""
    environment, beta, seed = one["environment"], one["beta"], one["seed"]
    row = _beside_frontier(environment, seed, found["kl"], found["reward"])
    expected = predicted(environment, one["estimator"], beta, seed)
    if expected is None:
        return row
    kl, reward = measured(environment, seed, expected)
    numbers = {
        "kl": kl,
        "reward": reward,
        "coefficient": frontier(environment, seed).same_kl(kl),
        "kl_to_optimum": distance(environment, seed, expected, best(environment, beta, seed)),
    }
    row |= {f"predicted_{name}": number for name, number in numbers.items()}
    return row | {"kl_to_predicted": distance(environment, seed, logits, expected)}


def _beside_frontier(environment: str, seed: int, kl: float, reward: float) -> Row:
    """The coefficient of the optimum with the same KL, and the share of the gain at that KL that is missing."""
    curve = frontier(environment, seed)
    same_kl = curve.same_kl(kl)
    most = None if same_kl is None else curve.at(same_kl)[1]
    return {
        "gain": reward - curve.floor,
        "coefficient_by_kl": same_kl,
        "shortfall": None if most is None else (most - reward) / (most - curve.floor),
    }


def _frontier(one: Configuration) -> list[Row]:
    """The frontier itself: what optima gain over the reference, and at which KL."""
    curve = frontier(one["environment"], 0)
    points = zip(FRONTIER[::2], curve.kl[::2], curve.reward[::2], strict=True)
    return [{**one, "beta": float(b), "kl": float(kl), "gain": float(reward - curve.floor)} for b, kl, reward in points]


def _repeated(one: Configuration, beta: float, rate: float, *name: object, first: int = 0) -> list[Run]:
    """The runs of a configuration, each with random numbers of its own."""
    which, numbers = problem(one["environment"], one["seed"]), range(first, first + one["runs"])
    return [Run(which, _estimator(one), beta=beta, learning_rate=rate, seed=_seed(*name, n)) for n in numbers]


def _sampled(configurations: Sequence[Configuration]) -> list[Row]:
    """Several runs of each configuration; medians and quartiles of where they end."""
    first, runs = configurations[0], []
    for one in configurations:
        beta, rate = one["beta"], one["learning_rate"] / max(1.0, one["beta"])
        runs += _repeated(one, beta, rate, "sampled", one["environment"], beta, first=one["seed"] * one["runs"])
    history = train(runs, steps=first["steps"], batch_size=first["batch_size"])
    rows = []
    for index, one in enumerate(configurations):
        floor = measured(one["environment"], one["seed"], problem(one["environment"], one["seed"]).reference)[1]
        ends = [_measured(history, index * one["runs"] + number, one) for number in range(one["runs"])]
        row = {**one, "collapsed": sum(end["collapsed"] for end in ends), "diverged": sum(e["diverged"] for e in ends)}
        for end in ends:
            end["gain"] = end["reward"] - floor
        for name in ("gain", "kl", "kl_to_optimum"):
            low, middle, high = np.quantile([end[name] for end in ends], (0.25, 0.5, 0.75))
            row |= {name: float(middle), f"{name}_low": float(low), f"{name}_high": float(high)}
        rows.append(row)
    return rows


def _budget(configurations: Sequence[Configuration]) -> list[Row]:
    """KL(π‖π*) of many runs in their second half, and at the end as bias and spread."""
    first, runs = configurations[0], []
    for one in configurations:
        about, rate = ("budget", one["environment"], one["batch_size"], one["seed"]), one["learning_rate"] / BUDGET_BETA
        runs += _repeated(one, BUDGET_BETA, rate, *about)
    steps = first["steps"]
    recorded = range(steps // 2, steps + 1, max(1, steps // 40))
    history = train(runs, steps=steps, batch_size=first["batch_size"], record=recorded)
    rows = []
    for index, one in enumerate(configurations):
        mine = slice(index * one["runs"], (index + 1) * one["runs"])
        by_run = history.kl_to_optimum[1:, mine].mean(axis=0)
        settled = predicted(one["environment"], one["estimator"], BUDGET_BETA, one["seed"])
        optimal = best(one["environment"], BUDGET_BETA, one["seed"])
        rows.append(
            {
                **one,
                "kl_to_optimum": float(by_run.mean()),
                "standard_error": float(by_run.std(ddof=1) / np.sqrt(len(by_run))),
                **_bias_and_spread(one["environment"], one["seed"], history.logits[mine]),
                "predicted_bias": distance(one["environment"], one["seed"], settled, optimal),
                "noise": noise(one["environment"], one["estimator"], BUDGET_BETA, one["batch_size"], one["seed"]),
                "diverged": int((history.diverged[mine] >= 0).sum()),
            }
        )
    return rows


def _bias_and_spread(environment: str, seed: int, logits: np.ndarray) -> Row:
    """With π̄ the mixture of runs i as rollouts go, mean KL(π_i‖π*) = KL(π̄‖π*) + mean KL(π_i‖π̄), exactly."""
    paths = problem(environment, seed).environment.enumerate()
    ends = np.array([paths.log_probability(table(one)) for one in logits])
    mixture, target = (
        logsumexp(ends, axis=0) - np.log(len(ends)),
        paths.log_probability(best(environment, BUDGET_BETA, seed)),
    )
    return {
        "at_end": float((np.exp(ends) * (ends - target)).sum(axis=1).mean()),
        "bias": float(np.exp(mixture) @ (mixture - target)),
        "spread": float((np.exp(ends) * (ends - mixture)).sum(axis=1).mean()),
    }


def noise(environment: str, estimator: str, beta: float, batch: int, seed: int = 0) -> float:
    """batch × the trace of the covariance of one update's ascent direction at π*, exactly.

    The reward's baseline is the mean of the other rollouts. So with r the centred reward, G = Σ_t g_t and k the
    gradient of one rollout's penalty:  tr Cov(r·G − β·k) + (Var r·E‖G‖² + ‖E[r·G]‖²)/(batch − 1).
    A penalty that is centred in the same way is part of r.
    """
    which = problem(environment, seed)
    instance = Instance.of(which.environment, best(environment, beta, seed), which.reference)
    paths, chances = instance.paths, instance.rollout_weights("current")
    reward = which.environment.returns(paths)
    centred = estimator == CENTRED
    if centred:
        reward = reward - beta * paths.along(instance.policy - instance.reference)
    mean = float(chances @ reward)
    penalty = resolve(estimator)

    def pushed(rollout: Any) -> Any:
        """The centred reward's own loss."""
        earned = rollout.reward - mean
        if centred:
            earned = earned - beta * (rollout.logp.detach() - rollout.ref_logp).sum(dim=1)
        return -earned * rollout.logp.sum(dim=1)

    def step(rollout: Any) -> Any:
        """The whole loss of one rollout: the reward's, and the penalty as it is placed."""
        if centred:
            return pushed(rollout)
        value = penalty.returned(rollout, 1.0).loss
        placed = place(value, rollout.logp, rollout.mask, penalty.placement, penalty.credit)
        return pushed(rollout) + beta * placed

    alone = exact(bind(step), instance).variance
    push = exact(bind(pushed), instance).gradient
    scores = exact(bind(lambda logp: logp.sum(dim=1)), instance).second_moment
    spread = float(chances @ (reward - mean) ** 2)
    return float(alone + (spread * scores + (push**2).sum()) / (batch - 1))


def _fixed_points(configurations: Sequence[Configuration]) -> list[Row]:
    """Short sequences, exact ascent: how far from where theory says the end is."""
    problems = [problem("short", one["seed"]) for one in configurations]
    names = [one["estimator"] for one in configurations] + [None] * len(configurations)
    runs = [Run(*which, **_training(FIXED_POINTS)) for which in zip(problems * 2, names, strict=True)]
    ended = train(runs, steps=FIXED_POINTS["steps"])
    rows = []
    for index, (one, which) in enumerate(zip(configurations, problems, strict=True)):
        expected = ended.logits[len(configurations) + index]
        if one["estimator"] != "k1-loss":
            expected = predicted("short", one["estimator"], FIXED_POINTS["beta"], one["seed"])
        rows.append(
            {
                **one,
                "kl_to_predicted": distance("short", one["seed"], ended.logits[index], expected),
                "moved": distance("short", one["seed"], ended.logits[index], which.start),
                "kl_to_optimum": float(ended.kl_to_optimum[-1, index]),
            }
        )
    return rows


def _optimum(configurations: Sequence[Configuration]) -> list[Row]:
    """V = 5, L = 4: KL(π‖π*) at the end of exact ascent from the reference."""
    runs = [Run(problem("long", one["seed"]), one["estimator"], **_training(OPTIMUM)) for one in configurations]
    ends = train(runs, steps=OPTIMUM["steps"]).kl_to_optimum[-1]
    return [{**one, "kl_to_optimum": float(kl)} for one, kl in zip(configurations, ends, strict=True)]


def _training(constants: Mapping[str, Any]) -> dict[str, Any]:
    return {name: constants[name] for name in ("beta", "learning_rate")}


def _seed(*parts: object) -> int:
    return int(digest(*parts), 16) % 2**32
