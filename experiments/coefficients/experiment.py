"""Trains with every estimator at every coefficient, and says where that ends beside where it should."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import log10
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import brentq
from scipy.special import logsumexp

from kltest.environments import END, Environment, Instance, bandit, ragged, sequence, tabular
from kltest.environments.policies import table
from kltest.loss.calling import bind
from kltest.loss.placement import place
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.reproduce.frames import Row
from kltest.sweeps.run import Batching
from kltest.sweeps.settings import Setting, Settings
from kltest.sweeps.store import digest
from kltest.training import Problem, Run, train
from kltest.truth import gradient, optimum, token_level_fixed_point, token_level_gap, value

from ..arrays import norm
from ..fixed_points import sequence_k3_fixed_point, token_k3_fixed_point

# Names of settings in each part, and their names here.
_OF_SAMPLING = ("batch_size", "runs", "steps", "learning_rate")
PARTS = {
    # Exact expected gradients, to the end: where does each estimator lead?
    "exact": {
        **{name: name for name in ("environment", "estimator", "beta", "seed")},
        "steps": "exact_steps",
        "learning_rate": "exact_rate",
    },
    # Sampled gradients, several runs of each configuration: what is left of that with noise?
    "sampled": {**{name: name for name in ("environment", "estimator", "beta", *_OF_SAMPLING)}, "seed": "draw"},
    # Sampled gradients at several batch sizes, at one β: when does a biased estimator end nearer to π*?
    "budget": {
        **{name: name for name in ("environment", "estimator", "seed")},
        **{name: f"budget_{name}" for name in _OF_SAMPLING},
    },
    # The five fixed points in closed form, on short sequences, and who reaches π* on long ones.
    "fixed-points": {"estimator": "estimator", "seed": "draw"},
    "optimum": {"estimator": "estimator", "seed": "draw"},
    # The coefficient that k3 comes to as β → 0, in closed form.
    "limit": {"environment": "environment", "seed": "seed"},
    # How far the fixed point of a token-level term lies below the optimum, in closed form, and bounds of it.
    "bound": {"environment": "bounded", "beta": "beta", "seed": "seed"},
    # The optima of all coefficients, to be drawn.
    "frontier": {"environment": "environment"},
}

ESTIMATORS = (
    "none",
    "k1-loss",
    "k2-loss",
    "k2-loss-sequence",
    "k3-loss",
    "k3-loss-sequence",
    "full-loss",
    "k1-reward",
    "k1-reward-to-go",
    "k1-reward-immediate",
    "k2-reward",
    "k3-reward",
    "k1-both",
    "k3-both",
    "rao-blackwell",
    "k3-ratio",
    "last-token",
    "length-normalised",
)
# The penalty less the mean of the others: in expectation k1-reward, so of interest where gradients are sampled.
CENTRED = "leave-one-out"
IN_BUDGET = ("k1-reward", "k1-both", CENTRED, "rao-blackwell", "k2-loss", "k3-loss")
BUDGET_ENVIRONMENTS = ("sequence",)
BUDGET_BETA = 1.0
IN_FIXED_POINTS = ("k1-loss", "k1-reward", "k2-loss-sequence", "k2-loss", "full-loss", "k3-loss", "k3-loss-sequence")
IN_OPTIMUM = ("k1-reward", "k2-loss-sequence", "k3-loss-sequence", "k3-loss", "k1-loss")

# Fixed points and optimum: β, updates and learning rate. The first is mild enough to come to rest; at twice the rate
# k3 goes round its rest point in one of ten draws, k3 of the sequence in three.
FIXED_POINTS: Mapping[str, Any] = {"beta": 1.0, "steps": 1500, "learning_rate": 2.0}
OPTIMUM: Mapping[str, Any] = {"beta": 0.5, "steps": 2000, "learning_rate": 12.0}

# A run collapsed if it diverged, or if its rollouts keep less than this share of the entropy that those of π* have.
COLLAPSED = 0.1


def applies(configuration: Mapping[str, Any]) -> bool:
    """Return True if a part takes a combination of settings."""
    part, estimator = configuration["part"], configuration.get("estimator")
    if part == "limit":
        return configuration["environment"] in ("bandit", "sequence")
    if part == "sampled":
        decade = log10(configuration["beta"])
        return abs(decade - round(decade)) < 1e-9  # whole decades of β are enough
    if part == "budget" and configuration["environment"] not in BUDGET_ENVIRONMENTS:
        return False
    within = {"exact": ESTIMATORS, "budget": IN_BUDGET, "fixed-points": IN_FIXED_POINTS, "optimum": IN_OPTIMUM}
    return part in ("frontier", "bound") or estimator in within[part]


SETTINGS = Settings(
    title="Coefficients: which estimators regularise as asked, at another coefficient, or not at all",
    tags=("exact", "sampled", "training"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        "environment": ("bandit", "sequence", "mdp"),
        "bounded": ("sequence", "ragged", "late", "sparse", "mdp"),
        "estimator": (*ESTIMATORS, CENTRED),
        "beta": Setting(
            (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
            full=tuple(round(10 ** (exponent / 4), 6) for exponent in range(-4, 13)),
            allowed=(0.001, 10_000.0),
        ),
        # Updates, and the learning rate in units of 1/β.
        "exact_steps": Setting(510, full=9_000, allowed=(10, 10_000_000)),
        "exact_rate": Setting(2.0, allowed=(1e-3, 4.0)),
        # Draws of the environment where it is not `seed` that says how many.
        "draw": Setting(0, full=tuple(range(10)), allowed=(0, 1000)),
        # The learning rate is that for β ≤ 1, and falls as 1/β beyond.
        "batch_size": Setting(16, allowed=(2, 4096)),
        "runs": Setting(8, full=32, allowed=(1, 10_000)),
        "steps": Setting(200, full=1000, allowed=(1, 1_000_000)),
        "learning_rate": Setting(0.5, full=0.1, allowed=(1e-6, 4.0)),
        "budget_batch_size": Setting((4, 8, 16, 32, 64), full=(2, 4, 8, 16, 32, 64, 128, 256), allowed=(2, 4096)),
        "budget_runs": Setting(8, full=40, allowed=(2, 10_000)),
        "budget_steps": Setting(800, full=8000, allowed=(10, 1_000_000)),
        "budget_learning_rate": Setting(1.0, full=0.25, allowed=(1e-3, 4.0)),
    },
    seeds={"quick": 3, "full": 10},
    applies=applies,
)


# --- environments ---
# Environments: a bandit, token sequences, and an MDP whose states know the time, so that π* is a table over states.
# Returns have a standard deviation of about 1, so that β = 1 is where reward and penalty weigh the same. The
# environments of the part fixed-points are milder: ascent converges there only when the rarest context has. Of those
# whose last token alone is paid, "sparse" pays one rollout of 1,024, so that most of the way to it is KL.
REWARD = {"short": 0.7, "long": 0.15, "late": 1.0}
LAST = ("late", "sparse")
REFERENCE = {"short": 0.5, "long": 0.1}
STATES, ACTIONS, HORIZON = 3, 3, 3


@cache
def environment(label: str) -> Environment:
    """Return the environment that is called so."""
    return {
        "bandit": lambda: bandit(6),
        "sequence": lambda: sequence(3, 3),
        "mdp": layered,
        "short": lambda: sequence(3, 2),
        "long": lambda: sequence(5, 4),
        "ragged": lambda: ragged(3, 4),
        "late": lambda: sequence(3, 3),
        "sparse": lambda: sequence(4, 5),
    }[label]()


def layered() -> Environment:
    """Three steps through three states; every action leads to two states of the next step, at random."""
    generator = np.random.default_rng(6)
    shape = (HORIZON, STATES, ACTIONS, 2)
    probabilities = generator.dirichlet(np.ones(2), size=shape[:3])
    successors = np.argsort(generator.random((*shape[:3], STATES)), axis=-1)[..., :2]
    successors += STATES * np.arange(1, HORIZON + 1)[:, None, None, None]
    successors[-1] = END
    probabilities[-1] = (1.0, 0.0)
    contexts = HORIZON * STATES
    start = np.zeros(contexts)
    start[0] = 1.0
    return tabular(
        successors.reshape(contexts, ACTIONS, 2),
        probabilities.reshape(contexts, ACTIONS, 2),
        np.zeros((contexts, ACTIONS)),
        HORIZON,
        start=start,
    )


@cache
def problem(label: str, seed: int) -> Problem:
    """A random reference, at which training starts, and random rewards; the dynamics are the environment's own."""
    base = environment(label)
    generator = np.random.default_rng([seed, base.n_contexts, base.vocabulary])
    shape = (base.n_contexts, base.vocabulary)
    reference = table(REFERENCE.get(label, 0.5) * generator.standard_normal(shape))
    reward = REWARD.get(label, 1 / np.sqrt(base.horizon)) * generator.standard_normal(shape)
    if label in LAST:
        *_, last = base.reachable()
        reward[~last] = 0.0
        if label == "sparse":
            reward = (reward == reward.max()).astype(float)
    return Problem(replace(base, reward=reward), reference, reference)


# --- ends ---
# Fixed points that training should converge to, and the frontier of optima over coefficients.
# Coefficients at which the frontier is solved for, to be interpolated between.
FRONTIER = np.logspace(-3, 6, 181)

EXACT = ("k1-reward", "k1-reward-to-go", "k1-both", "k3-both", "rao-blackwell", "k2-loss-sequence", "leave-one-out")
LOCAL = ("k2-loss", "full-loss", "k3-ratio", "k1-reward-immediate")


def predicted(label: str, estimator: str, beta: float, seed: int) -> np.ndarray | None:
    """(C, V) log-probs of the policy at which the expected gradient vanishes, by theory; None if unknown."""
    which = problem(label, seed)
    asked = which.environment, which.reference, beta
    steps = which.environment.horizon
    if estimator in EXACT or (steps == 1 and estimator in (*LOCAL, "last-token")):
        return best(label, beta, seed)
    if estimator == "length-normalised":
        return best(label, beta / steps, seed)
    if estimator in LOCAL:
        policy = token_level_fixed_point(*asked)
    elif estimator == "k3-loss":
        policy = token_k3_fixed_point(*asked)
    elif estimator == "k3-loss-sequence" and which.environment.tree:
        policy = sequence_k3_fixed_point(*asked)
    else:
        return None
    return by_context(label, policy)


@cache
def best(label: str, beta: float, seed: int) -> np.ndarray:
    """(C, V) log-probs of π*."""
    which = problem(label, seed)
    return by_context(label, optimum(which.environment, which.reference, beta).policy)


def by_context(label: str, policy: np.ndarray) -> np.ndarray:
    """Return (C, V) of a table that may have a time step in front; each context here belongs to one time step."""
    if policy.ndim == 2:
        return policy
    here = environment(label)
    merged = policy[0].copy()
    reached = here.start_distribution() > 0
    for stage in policy:
        merged[reached] = stage[reached]
        reached = here.products[1] @ np.repeat(reached.astype(float), here.vocabulary) > 0
    return merged


def measured(label: str, seed: int, policy: np.ndarray) -> tuple[float, float]:
    """KL(π‖ref) and E_π[R], exactly."""
    which = problem(label, seed)
    instance = Instance.of(which.environment, policy, which.reference)
    return value("reverse_kl", instance), value("expected_reward", instance)


def distance(label: str, seed: int, policy: np.ndarray, other: np.ndarray) -> float:
    """KL(π‖other) over whole rollouts."""
    return value("reverse_kl", Instance.of(problem(label, seed).environment, policy, other))


@cache
def entropy(label: str, beta: float, seed: int) -> float:
    """H(π*) over whole rollouts."""
    which = problem(label, seed)
    return value("entropy", Instance.of(which.environment, best(label, beta, seed), which.reference))


@dataclass(frozen=True)
class Frontier:
    """KL(π*‖ref) and E_π*[R] of the optima π*(β'), over β'; both fall as β' grows."""

    environment: str
    seed: int
    kl: np.ndarray
    reward: np.ndarray
    floor: float

    def at(self, coefficient: float) -> tuple[float, float]:
        """KL and reward at a β', not interpolated."""
        return measured(self.environment, self.seed, best(self.environment, coefficient, self.seed))

    def same_kl(self, kl: float) -> float | None:
        """The β' whose optimum is as far from the reference; None beyond the frontier's ends."""
        return _inverse(np.log(self.kl), np.log(max(kl, 1e-300)))


@cache
def frontier(label: str, seed: int) -> Frontier:
    """Return KL and reward of the optima π*(β) over all β of FRONTIER."""
    kl, reward = np.array([measured(label, seed, best(label, float(beta), seed)) for beta in FRONTIER]).T
    return Frontier(label, seed, kl, reward, measured(label, seed, problem(label, seed).reference)[1])


def optima(label: str, seed: int) -> list[dict[str, float]]:
    """The frontier to be drawn: what optima gain over the reference, and at which KL."""
    curve = frontier(label, seed)
    points = zip(FRONTIER[::2], curve.kl[::2], curve.reward[::2], strict=True)
    return [{"beta": float(b), "kl": float(kl), "gain": float(reward - curve.floor)} for b, kl, reward in points]


def _inverse(values: np.ndarray, wanted: float) -> float | None:
    """The coefficient at which a falling curve has a value, by monotone cubic interpolation of its logarithm."""
    finite = np.isfinite(values)
    ascending, logs = values[finite][::-1], np.log(FRONTIER)[finite][::-1]
    # A curve that is flat to rounding says nothing.
    keep = np.concatenate([[True], np.diff(ascending) > 1e-9])
    ascending, logs = ascending[keep], logs[keep]
    if not ascending[0] < wanted < ascending[-1]:
        return None
    return float(np.exp(PchipInterpolator(ascending, logs)(wanted)))


# --- bounds ---
def bound(environment: str, beta: float, seed: int) -> Row:
    """What the fixed point of a token-level term lacks, bounds of it, and the share of ∇KL(π‖ref) missed there.

    `gain` is what the optimum has beyond the reference, J* − J(ref); `earned` the reward beyond the reference's.
    """
    which = problem(environment, seed)
    found = token_level_gap(which.environment, which.reference, beta)
    policy = by_context(environment, token_level_fixed_point(which.environment, which.reference, beta))
    instance = Instance.of(which.environment, policy, which.reference)
    missed, whole = (gradient(name, instance) for name in ("future_reverse_kl", "reverse_kl"))
    floor = measured(environment, seed, which.reference)[1]
    row = {name: number for name, number in asdict(found).items() if name not in ("share", "reward", "variance")}
    return {
        **row,
        "gain": optimum(which.environment, which.reference, beta).value - floor,
        "earned": found.reward - floor,
        "missed": norm(missed) / norm(whole),
        "missed_fisher": found.share,
    }


# --- limits ---
# The effective coefficient of k3 in the loss as β → 0, where single answers compete (arms, or whole rollouts).
#
# It ends at π = β·ref/(λ − R). With * the best answer and Δ_v = R_* − R_v, what the KL lacks of the largest one is
#
#     −log ref_* − KL(π‖ref) = −ε·log ref_* − (1 − ε)·log(1 − ε) − Σ π_v·log(π_v/ref_v),    ε = Σ π_v = 1 − π_*,
#
# sums over the others, in which nothing cancels. At the end π_v tends to β·ref_v/Δ_v, so that this falls like
# β·log(1/β); at the optimum of β' like e^(−Δ/β')·Δ/β', Δ the smallest Δ_v. The two are equal where Δ/β' ~ log(1/β): as
# β → 0
#
#     β'/β ~ Δ/(β·log(1/β)),
#
# without bound.
# Where answers compete, and the estimator that ends there: of arms token k3 is sequence k3.
ANSWERS = {"bandit": "k3-loss", "sequence": "k3-loss-sequence"}
BETAS = (1e-1, 1e-4, 1e-16, 1e-64, 1e-256)


def limit(environment: str, seed: int) -> list[dict[str, Any]]:
    """β' by the optimum with the same KL, and by the law, for ever smaller β."""
    return [
        {"beta": beta, "coefficient_by_kl": coefficient(environment, seed, beta), "law": law(environment, seed, beta)}
        for beta in BETAS
    ]


def coefficient(environment: str, seed: int, beta: float) -> float:
    """Return the β' at which an optimum misses as much of the best answer as the predicted end does."""
    log_reference, gaps, order = _answers(environment, seed)
    policy = predicted(environment, ANSWERS[environment], beta, seed)
    ended = problem(environment, seed).environment.enumerate().log_probability(policy)[order]
    wanted = _log_missing(ended, log_reference)

    def excess(log_coefficient: float) -> float:
        scores = log_reference - gaps / np.exp(log_coefficient)
        return _log_missing(scores - logsumexp(scores), log_reference) - wanted

    # e^(−680) is still a float.
    return float(np.exp(brentq(excess, np.log(gaps[1] / 680), np.log(1e6), xtol=1e-14)))


def law(environment: str, seed: int, beta: float) -> float:
    """Return Δ/log(1/β), with Δ the gap between the best and the next answer."""
    return float(_answers(environment, seed)[1][1] / np.log(1 / beta))


def _answers(environment: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log ref of each answer, what it earns less than the best, and the order of both: the best one first."""
    which = problem(environment, seed)
    paths = which.environment.enumerate()
    returns = which.environment.returns(paths)
    order = np.argsort(-returns)
    return paths.log_probability(which.reference)[order], returns[order[0]] - returns[order], order


def _log_missing(log_policy: np.ndarray, log_reference: np.ndarray) -> float:
    """Log of −log ref_* − KL(π‖ref)."""
    others, ratios = np.exp(log_policy[1:]), (log_policy - log_reference)[1:]
    rest = others.sum()
    return float(np.log(-rest * log_reference[0] - (1 - rest) * np.log1p(-rest) - others @ ratios))


BATCHING = Batching(("seed", "beta", "learning_rate", "estimator"), size=162)

Configuration = Mapping[str, Any]

# The rate of exact ascent is rate/max(β, floor), floor after floor: while the policy has far to go, steps as long as
# 1/β would settle on whichever action is tried first.
FLOORS = (1.0, 0.3, 0.1)


def compute_batch(configurations: Sequence[Configuration]) -> list[list[Row]]:
    """Return the rows of each configuration of one part."""
    part = configurations[0]["part"]
    if part == "bound":
        return [[{**one, **bound(one["environment"], one["beta"], one["seed"])}] for one in configurations]
    if part in ("frontier", "limit"):
        rows = {"frontier": optima, "limit": limit}[part]
        return [[{**one, **row} for row in rows(one["environment"], one.get("seed", 0))] for one in configurations]
    together = {"exact": _exact, "sampled": _sampled, "budget": _budget, "fixed-points": _short, "optimum": _short}
    return [[{**one, **row}] for one, row in zip(configurations, together[part](configurations), strict=True)]


def _estimator(one: Configuration) -> str | None:
    return None if one["estimator"] == "none" else one["estimator"]


def _exact(configurations: Sequence[Configuration]) -> list[Row]:
    """Ascent on expected gradients, at a rate that rises as the policy comes nearer."""
    problems = [problem(one["environment"], one["seed"]) for one in configurations]
    history = ascend(configurations, problems)
    rows = []
    for index, one in enumerate(configurations):
        found = _measured(history, index, one)
        rows.append({**found, **_against(one, history.logits[index], found)})
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
        row = {name: sum(end[name] for end in ends) for name in ("collapsed", "diverged")}
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
                "kl_to_optimum": float(by_run.mean()),
                "standard_error": float(by_run.std(ddof=1) / np.sqrt(len(by_run))),
                "at_end": float(history.kl_to_optimum[-1, mine].mean()),
                "predicted_bias": distance(one["environment"], one["seed"], settled, optimal),
                "noise": noise(one["environment"], one["estimator"], BUDGET_BETA, one["batch_size"], one["seed"]),
            }
        )
    return rows


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


def _short(configurations: Sequence[Configuration]) -> list[Row]:
    """Exact ascent from the reference: how far the end is from π*, and from where theory says it is."""
    label, chosen = {"fixed-points": ("short", FIXED_POINTS), "optimum": ("long", OPTIMUM)}[configurations[0]["part"]]
    problems = [problem(label, one["seed"]) for one in configurations]
    names = [one["estimator"] for one in configurations] + [None] * len(configurations)
    rates = {name: chosen[name] for name in ("beta", "learning_rate")}
    runs = [Run(which, name, **rates) for which, name in zip(problems * 2, names, strict=True)]
    ended = train(runs, steps=chosen["steps"])
    rows = []
    for index, one in enumerate(configurations):
        # k1 in the loss ends where training without a penalty does.
        expected = ended.logits[len(configurations) + index]
        if one["estimator"] != "k1-loss":
            expected = predicted(label, one["estimator"], chosen["beta"], one["seed"])
        off = distance(label, one["seed"], ended.logits[index], expected)
        rows.append({"kl_to_predicted": off, "kl_to_optimum": float(ended.kl_to_optimum[-1, index])})
    return rows


def _seed(*parts: object) -> int:
    return int(digest(*parts), 16) % 2**32
