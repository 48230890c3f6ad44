"""Exact variances of values and gradients: the published pair, random environments, what can be gained, the bandit."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance, bandit, sequence
from kltest.environments.policies import remainder, score_norms, softmax_gradient, sum_of_others, table
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import Moments, exact
from kltest.sweeps.settings import Settings
from kltest.sweeps.store import digest
from kltest.training import LogProbs, PerRun, Problem, Run, train
from kltest.truth import optimum

from ..arrays import generator
from ..paths import ascents
from ..rollouts import gradients, projected

# A *random environment* here has a table of its own for every prefix: logits of the policy are normal with the
# standard deviation `spread` (1 where nothing is said), those of the reference are the policy's plus normal noise of
# the standard deviation `distance`.

# The published pair: two binary tokens. The policy's first token is a coin's; after a 0 both models toss a coin,
# after a 1 the policy says 1 nearly always and the reference nearly never.
SURE = 0.01
# The reference's chance of a 0 at first, in the published pair.
PUBLISHED = 0.25

# The bandit of the baseline study: standard deviations of the reference's and of the start's log-probs.
ARMS = {"seed": 0, "count": 1000, "reference": 1.5, "start": 2.5}
RULES = ("0", "1", "value", "gradient")
RECORDED = 21
# The published learning rate at which medians are given, to this much.
PUBLISHED_RATE, MEDIAN_TOLERANCE = 5.0, 0.05

# Rates of failure are taken of environments of at most so many rollouts.
MOST = 512
# The ladder and the mixtures are of this vocabulary.
VOCABULARY = 3
# Mixtures are found by enumeration, up to this length.
MIXED_LENGTH = 4
# One environment of each cell of up to so many rollouts is enumerated as well, with the registered estimators.
ENUMERATED = 30

# Budgets: of these positions exact next-token KLs are computed, chosen by one of these rules. Variance is the optimal
# rule that knows nothing of what lies ahead. Environments are of this length.
SHARES = (0.05, 0.1, 0.25, 0.5)
RULES_OF_CHOICE = ("optimal", "variance", "entropy")
BUDGET_LENGTH = 6

# Exact KLs beside a reward: ascent with exact expectations on E[R] − β·KL, from the reference or from as far away.
PATHS = {"vocabulary": 3, "length": 3, "beta": 0.2, "learning_rate": 0.1, "updates": 64, "draws": 16}
STARTS = {"reference": 0.0, "away": 2.0}

# The record of a language model (language.csv): so many rollouts are measured after these updates, and after the last;
# of some of the last ones gradients at the weights are taken; shares of the positions; when it was made, with what, on
# CPUs.
LANGUAGE: Mapping[str, Any] = {
    "updates": (4, 12, 24, 48),
    "fewer": 2048,
    "rollouts": 8192,
    "differentiated": 384,
    "date": "2026-11-23",
    "python": "3.11",
    "torch": "2.13",
}
RECORDED_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)

PARTS: dict[str, tuple[str, ...]] = {
    "pair": ("reference", "samples"),
    "rates": ("vocabulary", "length", "distance", "spread", "environments", "seed"),
    "ladder": ("length", "distance", "compared", "seed"),
    "mixtures": ("length", "distance", "mixed", "seed"),
    "freedom": (),
    "noise": ("lam",),
    "bandit": ("rule", "rate", "steps", "batch_size", "runs"),
    "budget": ("distance", "spread", "budgeted", "seed"),
    "language": (),
    "reward": ("start", "made", "seed"),
}


def applies(one: Mapping[str, Any]) -> bool:
    """Random environments are small enough, and what is enumerated smaller still."""
    if one["part"] == "rates":
        return bool(one["vocabulary"] ** one["length"] <= MOST)
    return bool(one["part"] != "mixtures" or one["length"] <= MIXED_LENGTH)


SETTINGS = Settings(
    title="Variance of unbiased KL gradients: Rao–Blackwell, baselines, credit, and the least possible",
    tags=("exact", "sampled", "gradient", "variance", "training"),
    parts=PARTS,
    applies=applies,
    values={
        "part": tuple(PARTS),
        "reference": (*(round(0.05 * step, 2) for step in range(1, 20)),),
        "samples": 200_000,
        "vocabulary": (2, 3, 4, 8),
        "length": (2, 3, 4, 6, 8),
        "distance": (0.1, 0.3, 1.0, 3.0, 10.0),
        "spread": (1.0, 4.0),
        "environments": 1000,
        "compared": 50,
        # Environments in which mixtures are found.
        "mixed": 8,
        # Environments in which budgets are spent.
        "budgeted": 100,
        # Paths of training: where they start, and updates that the policy has made.
        "start": ("reference", "away"),
        "made": (1, 4, 16, 64),
        "lam": (*(0.25 * step for step in range(-2, 19)),),
        # The control variate's coefficient: fixed, or the best for value or gradient at every update.
        "rule": RULES,
        "rate": (5.0, 10.0, 20.0),
        "steps": 400,
        "batch_size": 16,
        "runs": 32,
    },
    full={
        "samples": 2_000_000,
        "distance": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
        "spread": (1.0, 2.0, 4.0, 8.0),
        "environments": 10_000,
        "compared": 500,
        "mixed": 50,
        "budgeted": 500,
        "rate": (1.0, 2.0, 5.0, 7.0, 10.0, 12.0, 15.0, 20.0),
        "runs": 256,
    },
    seeds={"quick": 1, "full": 2},
    allowed={
        "reference": (0.001, 0.999),
        "samples": (1000, 100_000_000),
        "vocabulary": (2, 32),
        "length": (2, 10),
        "distance": (0.01, 30.0),
        "spread": (0.01, 8.0),
        "environments": (10, 1_000_000),
        "compared": (10, 100_000),
        "mixed": (1, 100_000),
        "budgeted": (10, 100_000),
        "made": (0, 64),
        "lam": (-5.0, 5.0),
        "rate": (1e-3, 100.0),
        "steps": (1, 100_000),
        "batch_size": (1, 4096),
        "runs": (1, 10_000),
    },
)

# Recursions against enumeration in float64: sums of up to a thousand terms.
EXACT = 1e-10


# --- recorded ---
# What was measured on a language model: the rows of `language.csv`, which `language.py` makes.
RECORD = Path(__file__).parent / "language.csv"


def recorded() -> list[dict[str, Any]]:
    """The rows of the record; none if there is none."""
    if not RECORD.exists():
        return []
    with RECORD.open(encoding="utf-8", newline="") as file:
        return [{name: _value(text) for name, text in line.items() if text} for line in csv.DictReader(file)]


def _value(text: str) -> Any:
    if text.isdigit():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


# --- prefixes ---
# Exact noise of gradients in many environments at once, by recursion over prefixes, each with logits of its own.
#
# Of a prefix s and its next token v, with g_v = ∇log π(v|s), an estimator gives the logits of s, wherever s is visited,
#
#     e·∇KL(s) + g_v·(a + F),   a known at (s, v), F the random cost of what comes later, e = 0 or 1.
#
# Prefixes have separate logits, so that E‖ĝ‖² adds up over them, and with d(s) the chance to visit s, M(s) the expected
# gradient there once visited,
#
#     variance = visits Σ d·(1 − d)·‖M‖²  +  token Σ d·Var_v E[· | s, v]  +  future Σ d·E_v ‖g_v‖²·Var F.
#
# The first is the same for every unbiased estimator that gives a gradient to visited prefixes alone, and is the least
# variance that such a one can have, whatever it knows (Jensen).
Levels = list[np.ndarray]


@dataclass(frozen=True)
class Ahead:
    """Mean and variance (W, n, V), level by level, of what a rollout costs after its next token."""

    mean: Levels
    variance: Levels


@dataclass(frozen=True)
class Form:
    """An estimator: `exact` is e, `own` (W, n, V) is a without what is random."""

    exact: bool
    own: Levels
    ahead: Ahead


@dataclass(frozen=True)
class Noise:
    """Parts of the variance, (W,) each."""

    visits: np.ndarray
    token: np.ndarray
    future: np.ndarray

    @property
    def variance(self) -> np.ndarray:
        return self.visits + self.token + self.future


@dataclass(frozen=True, eq=False)
class Environments:
    """W pairs of policies: log-probs (W, Vᵗ, V) for prefixes of t tokens, in lexicographic order."""

    policy: Levels
    reference: Levels

    @classmethod
    def draw(
        cls,
        count: int,
        vocabulary: int,
        length: int,
        distance: float,
        generator: np.random.Generator,
        spread: float = 1.0,
    ) -> "Environments":
        """Random environments as in the settings."""
        policy, reference = [], []
        prefixes = sum(vocabulary**step for step in range(length))
        drawn = generator.standard_normal((count, prefixes, 2, vocabulary))
        first = 0
        for step in range(length):
            here = drawn[:, first : first + vocabulary**step]
            first += vocabulary**step
            logits = spread * here[:, :, 0]
            policy.append(in_rows(table, logits))
            reference.append(in_rows(table, logits + distance * here[:, :, 1]))
        return cls(policy, reference)

    @property
    def length(self) -> int:
        return len(self.policy)

    def tables(self, environment: int) -> tuple[np.ndarray, np.ndarray]:
        """(C, V) tables of one environment's policy and reference, prefixes numbered as by `sequence`."""
        return tuple(np.concatenate([level[environment] for level in pair]) for pair in (self.policy, self.reference))  # type: ignore[return-value]

    @cached_property
    def chance(self) -> Levels:
        return [np.exp(level) for level in self.policy]

    @cached_property
    def u(self) -> Levels:
        return [policy - reference for policy, reference in zip(self.policy, self.reference, strict=True)]

    @cached_property
    def kl(self) -> Levels:
        """(W, n) of the next token."""
        return [over_tokens(p * u) for p, u in zip(self.chance, self.u, strict=True)]

    @cached_property
    def visits(self) -> Levels:
        """(W, n) d(s)."""
        found = [np.ones_like(self.kl[0])]
        for chance in self.chance[:-1]:
            found.append((found[-1][:, :, None] * chance).reshape(len(chance), -1))
        return found

    @cached_property
    def score_norms(self) -> Levels:
        """(W, n, V) ‖g_v‖²."""
        return [in_rows(score_norms, log_probs) for log_probs in self.policy]

    @cached_property
    def slopes(self) -> Levels:
        """(W, n, V) ∇KL(s) with respect to the logits of s: π·(u − KL)."""
        return [
            in_rows(softmax_gradient, p * u, log_probs)
            for p, u, log_probs in zip(self.chance, self.u, self.policy, strict=True)
        ]

    def ahead(self, sampled: Levels | None = None) -> Ahead:
        """Of costs of tokens (W, n, V), or of the exact KL of each prefix that is met."""
        mean, variance = [np.zeros_like(self.u[-1])], [np.zeros_like(self.u[-1])]
        for step in reversed(range(1, self.length)):
            p, shape = self.chance[step], self.u[step - 1].shape
            cost = self.kl[step][:, :, None] if sampled is None else sampled[step]
            expected, spread = _total(p, cost + mean[0], variance[0])
            mean.insert(0, expected.reshape(shape))
            variance.insert(0, spread.reshape(shape))
        return Ahead(mean, variance)

    @cached_property
    def known(self) -> Ahead:
        """Return a perfect critic's value of what is ahead: its mean, without spread."""
        return Ahead(self.ahead().mean, _nothing(self.u))

    def past(self, costs: Levels) -> Levels:
        """(W, n, 1) what the tokens of a prefix have cost."""
        found = [np.zeros((*self.kl[0].shape, 1))]
        for cost in costs[:-1]:
            found.append((found[-1] + cost).reshape(len(cost), -1, 1))
        return found

    def value_moments(self, sampled: Levels | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(W,) mean and variance of the sum of all costs of a rollout."""
        later, cost = self.ahead(sampled), self.kl[0][:, :, None] if sampled is None else sampled[0]
        mean, variance = _total(self.chance[0], cost + later.mean[0], later.variance[0])
        return mean[:, 0], variance[:, 0]

    def own_noise(self) -> np.ndarray:
        """(W,) Σ_t E Var(u_t | s_t): what sampling a token adds to knowing its expectation."""
        return sum(
            (d * over_tokens(slope**2 / p)).sum(axis=1)
            for d, p, slope in zip(self.visits, self.chance, self.slopes, strict=True)
        )  # type: ignore[return-value]

    def steering(self) -> np.ndarray:
        """(W,) Σ_t E Cov(u_t, what is ahead | prefix): below 0 where a token that is paid for leads to cheaper ones."""
        known = self.ahead().mean
        return sum(
            (d * over_tokens(slope * later)).sum(axis=1)
            for d, slope, later in zip(self.visits, self.slopes, known, strict=True)
        )  # type: ignore[return-value]

    def squared_gradient(self, form: Form) -> np.ndarray:
        """(W,) ‖E[ĝ]‖²."""
        return sum(
            ((d[:, :, None] * mean) ** 2).sum(axis=(1, 2))
            for d, mean in zip(self.visits, self._means(form), strict=True)
        )  # type: ignore[return-value]

    def noise(self, form: Form) -> Noise:
        """The variance of an estimator in its three parts."""
        total = np.zeros((3, len(self.kl[0])))
        for step, mean in enumerate(self._means(form)):
            d, p, norms = self.visits[step], self.chance[step], self.score_norms[step]
            weight = form.own[step] + form.ahead.mean[step]
            size = over_tokens(mean**2)
            token = over_tokens(p * norms * weight**2) - size
            if form.exact:
                token += over_tokens(self.slopes[step] ** 2 + 2 * p * self.inner(step) * weight)
            future = over_tokens(p * norms * form.ahead.variance[step])
            total += [(d * (1 - d) * size).sum(axis=1), (d * token).sum(axis=1), (d * future).sum(axis=1)]
        return Noise(*total)

    def with_baseline(self, form: Form, *, by_prefix: bool) -> Form:
        """The form less its least noisy baseline: one number for each prefix, or one number for each environment."""
        above, below = [], []
        for step, p in enumerate(self.chance):
            norms = self.score_norms[step]
            inner = norms * (form.own[step] + form.ahead.mean[step])
            inner = inner + self.inner(step) if form.exact else inner
            above.append(over_tokens(p * inner))
            below.append(over_tokens(p * norms))
        if by_prefix:
            baseline = [(a / b)[:, :, None] for a, b in zip(above, below, strict=True)]
        else:
            over = sum((d * a).sum(axis=1) for d, a in zip(self.visits, above, strict=True))
            under = sum((d * b).sum(axis=1) for d, b in zip(self.visits, below, strict=True))
            baseline = [(over / under)[:, None, None]] * self.length
        return replace(form, own=[own - b for own, b in zip(form.own, baseline, strict=True)])

    def inner(self, step: int) -> np.ndarray:
        """(W, n, V) ⟨∇KL(s), g_v⟩."""
        slope, log_probs = self.slopes[step], self.policy[step]
        others = in_rows(sum_of_others, self.chance[step] * slope)
        return in_rows(remainder, log_probs) * slope - others

    def _means(self, form: Form) -> Levels:
        """(W, n, V) M(s)."""
        means = []
        for step, p in enumerate(self.chance):
            weight = form.own[step] + form.ahead.mean[step]
            mean = in_rows(softmax_gradient, p * weight, self.policy[step])
            means.append(mean + self.slopes[step] if form.exact else mean)
        return means


def sampled(environments: Environments, lam: float | np.ndarray = 0.0, *, credit: str, both: bool = False) -> Form:
    """u + λ·(w − 1) as a cost, to go or of the whole rollout; in `both` places its derivative is added."""
    lam = np.asarray(lam, dtype=float).reshape(-1, 1, 1)
    costs = [u + lam * np.expm1(-u) for u in environments.u]
    # With its derivative 1 − λw the token's own cost u + λ(w − 1) is u + 1 − λ.
    own = [u + (1 - lam) for u in environments.u] if both else costs
    if credit == "return":
        own = [here + past for here, past in zip(own, environments.past(costs), strict=True)]
    return Form(False, own, environments.ahead(costs))


def rao_blackwell(environments: Environments, *, critic: bool = False) -> Form:
    """∇KL of each prefix, and the KLs of those ahead, or what a perfect critic expects of them, as a cost."""
    return Form(True, _nothing(environments.u), environments.known if critic else environments.ahead())


def bootstrapped(environments: Environments) -> Form:
    """A token's own u, and what a perfect critic expects of the rest."""
    return Form(False, environments.u, environments.known)


def best_coefficient(values: Sequence[np.ndarray]) -> np.ndarray:
    """(W,) where the parabola through the values at −1, 0 and 1 is least."""
    left, middle, right = values
    return (left - right) / (2 * (left + right - 2 * middle))


def _total(p: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(W, n) mean and variance of what has these for each token."""
    expected = over_tokens(p * mean)
    return expected, over_tokens(p * ((mean - expected[:, :, None]) ** 2 + variance))


def in_rows(function: Callable[..., np.ndarray], *values: np.ndarray) -> np.ndarray:
    """A function of (C, V) tables applied to (W, n, V)."""
    shape = values[0].shape
    return function(*(value.reshape(-1, shape[2]) for value in values)).reshape(shape)


def over_tokens(values: np.ndarray) -> np.ndarray:
    """(W, n) sums of (W, n, V): numpy's own are slow where V is small."""
    return values @ np.ones(values.shape[2])


def _nothing(like: Levels) -> Levels:
    return [np.zeros_like(level) for level in like]


# --- bandit ---
# The 1,000-arm bandit of the baseline study: k1 + λ(w − 1) in both places, where λ is nothing but a baseline.
Row = dict[str, Any]


def tables() -> tuple[np.ndarray, np.ndarray]:
    """(1, K) logits of the reference and of the start: the reference's are drawn first."""
    generator = np.random.default_rng(int(ARMS["seed"]))
    count = int(ARMS["count"])
    reference = generator.normal(0, ARMS["reference"], count)
    reference -= np.logaddexp.reduce(reference)
    return reference[None], (reference + generator.normal(0, ARMS["start"], count))[None]


def instance() -> Instance:
    reference, start = tables()
    return Instance.of(bandit(int(ARMS["count"])), start, reference)


def least_noisy_value(state: LogProbs) -> Tensor:
    """(R,) the λ of the least noisy value, −Cov(u, w)/Var w, exactly."""
    p, u = state.log_policy[:, 0].exp(), (state.log_policy - state.log_reference)[:, 0]
    w = (-u).exp()
    kl = (p * u).sum(dim=1)
    # E w = 1, since policy and reference are positive everywhere.
    return -((p * u * w).sum(dim=1) - kl) / ((p * w**2).sum(dim=1) - 1)


def least_noisy_gradient(state: LogProbs) -> Tensor:
    """(R,) the λ of the least noisy gradient, 1 + E[u‖g‖²]/E‖g‖², exactly."""
    p, u = state.log_policy[:, 0].exp(), (state.log_policy - state.log_reference)[:, 0]
    norms = 1 - 2 * p + (p**2).sum(dim=1, keepdim=True)
    return 1 + (p * u * norms).sum(dim=1) / (p * norms).sum(dim=1)


def coefficients() -> dict[str, float]:
    """Both at the start."""
    one = instance()
    policy, reference = (torch.from_numpy(table)[None] for table in (one.policy, one.reference))
    state = LogProbs(policy, reference, policy)
    return {"value": float(least_noisy_value(state)), "gradient": float(least_noisy_gradient(state))}


def noise(one: Mapping[str, Any]) -> list[Row]:
    """Variance of value and gradient of one rollout at the start, over all arms."""
    found = exact(resolve("lambda-baseline", Call(arguments={"lam": one["lam"]})), instance())
    assert found.value is not None
    size = float((found.gradient**2).sum())
    best = {f"least_noisy_{name}": value for name, value in coefficients().items()}
    return [{"value_variance": found.value.std**2, "gradient_variance": found.variance / size, **best}]


def training(one: Mapping[str, Any]) -> list[Row]:
    """A row for each run's end, and one for each recorded update with the median and the middle 80 %."""
    reference, start = tables()
    problem = Problem(bandit(int(ARMS["count"])), start, reference)
    rules = {"value": least_noisy_value, "gradient": least_noisy_gradient}
    lam = PerRun(rules[one["rule"]] if one["rule"] in rules else float(one["rule"]))
    runs = [
        Run(problem, "lambda-baseline", beta=1.0, learning_rate=one["rate"], seed=seed, options={"lam": lam})
        for seed in range(one["runs"])
    ]
    record = sorted({round(step) for step in np.linspace(0, one["steps"], RECORDED)})
    history = train(runs, steps=one["steps"], batch_size=one["batch_size"], record=record, optima=False)
    ends = [{"what": "end", "run": run, "kl": float(kl)} for run, kl in enumerate(history.kl[-1])]
    low, median, high = np.quantile(history.kl, (0.1, 0.5, 0.9), axis=1)
    path = [
        {"what": "path", "step": int(step), "kl": float(median[at]), "low": float(low[at]), "high": float(high[at])}
        for at, step in enumerate(history.steps)
    ]
    return [*ends, *path]


# --- freedom ---
# The space of unbiased estimators: the dimension of all functions of what a trainer sees whose mean is always 0.
#
# Two unbiased estimators differ by such a function. What varies from environment to environment is what the
# trainer does not know until it is there; a function is one unknown for each thing that can be seen, an environment is
# one equation.
Seen = tuple[Any, ...]
Equation = dict[Seen, float]

# Chances of the policy's tokens; any would do, as long as none is zero.
CHANCES = {2: (0.3, 0.7), 3: (0.5, 0.3, 0.2)}
# The reference's chances are multiples of 1/FRACTIONS, all positive; next-token pairs come from a list of so many.
FRACTIONS, CHOICES = 6, 4


def counts() -> list[Row]:
    """Unknowns, independent equations and what is left, with what theory says should be left."""
    grid = FRACTIONS - 2  # so many values has one of three positive chances
    cases: list[tuple[str, int, int, Callable[[], Iterator[Equation]], int]] = [
        # α_v and λ with Σα + λ = 0.
        ("sampled log-probs", 3, 1, lambda: _sampled(1), 3),
        # The same again for each first token and the ratio that was seen there.
        ("sampled log-probs", 3, 2, lambda: _sampled(2), 3 + 3 * grid * 3),
        # z_v with Σ π_v z_v = 0 for the first token; for the second, for each first one and the pair it led to.
        ("full distributions", 2, 2, lambda: _full(2), 1 + 2 * CHOICES * 1),
        ("full distributions", 3, 2, lambda: _full(3), 2 + 3 * CHOICES * 2),
    ]
    rows = []
    for sees, vocabulary, length, environments, predicted in cases:
        unknowns, rank = _rank(environments())
        rows.append(
            {
                "sees": sees,
                "vocabulary": vocabulary,
                "length": length,
                "unknowns": unknowns,
                "rank": rank,
                "dimension": unknowns - rank,
                "predicted": predicted,
            }
        )
    return rows


def _rank(environments: Iterator[Equation]) -> tuple[int, int]:
    equations = list(environments)
    names = {seen: at for at, seen in enumerate(sorted({seen for equation in equations for seen in equation}))}
    matrix = np.zeros((len(equations), len(names)))
    for row, equation in enumerate(equations):
        for seen, chance in equation.items():
            matrix[row, names[seen]] += chance
    return len(names), int(np.linalg.matrix_rank(matrix.T @ matrix))


def _references() -> list[tuple[int, ...]]:
    """Distributions over three tokens, in parts of 1/FRACTIONS."""
    return [parts for parts in product(range(1, FRACTIONS), repeat=3) if sum(parts) == FRACTIONS]


def _sampled(length: int) -> Iterator[Equation]:
    """The reference is seen at the sampled tokens alone. Its first table and those after each token vary freely."""
    chances, tables = CHANCES[3], _references()
    if length == 1:
        for table in tables:
            yield {(token, table[token]): chances[token] for token in range(3)}
        return
    for first in tables:
        for after in product(tables, repeat=3):
            yield {
                (one, first[one], two, after[one][two]): chances[one] * chances[two]
                for one, two in product(range(3), repeat=2)
            }


def _full(vocabulary: int) -> Iterator[Equation]:
    """Both models' whole tables are seen at the prefixes met: after each token, one of CHOICES pairs of them."""
    chances = CHANCES[vocabulary]
    generator = np.random.default_rng(0)
    policies = generator.dirichlet(np.ones(vocabulary), CHOICES)
    for after in product(range(CHOICES), repeat=vocabulary):
        yield {
            (one, after[one], two): chances[one] * policies[after[one]][two]
            for one, two in product(range(vocabulary), repeat=2)
        }


# --- budget --- Estimates with exact next-token KLs at some prefixes alone: which prefixes are worth them, and how
# much they remove.
#
# With exact KLs at the prefixes where c(s) = 1 and sampled log-ratios elsewhere, a variance is that of Rao–Blackwell
# plus Σ d(s)·(1 − c(s))·gain(s). Of the value Σ KL, of the token-level gradient Σ ∇KL, and of the gradient of the
# whole KL,
#
#     gain of the value     Var(u | s) + 2 Cov(u, S | s), S the expected KL that follows a token
#     gain, token level     tr Cov(u·g | s)
#     gain, whole           tr Cov(u·g | s) + 2 Σ_v π_v S_v·⟨u_v g_v − ∇KL, g_v⟩ + ‖B‖²·(gain of the value),
#
# where ‖B‖² is the sum of ‖g‖² over the tokens of the prefix; c may be any function of prefixes.
OF = ("value", "token-level gradient", "gradient")
# Of one environment of so many tokens the variances are enumerated as well.
SHORT = 3
# Coefficient of the KL where the objective's noise is looked at.
BETA = 0.5


def gains(environments: Environments) -> dict[str, Levels]:
    """(W, n) of each prefix, level by level: what an exact KL there removes each time it is visited."""
    ahead, past = environments.ahead().mean, _past_norms(environments)
    found: dict[str, Levels] = {name: [] for name in OF}
    for step, (p, u, slope) in enumerate(zip(environments.chance, environments.u, environments.slopes, strict=True)):
        norms = environments.score_norms[step]
        value = over_tokens(slope**2 / p + 2 * slope * ahead[step])
        own = over_tokens(p * norms * u**2) - over_tokens(slope**2)
        later = over_tokens(p * ahead[step] * (u * norms - environments.inner(step)))
        found["value"].append(value)
        found["token-level gradient"].append(own)
        found["gradient"].append(own + 2 * later + past[step] * value)
    return found


def scores(environments: Environments, gain: Levels, rule: str) -> Levels:
    """(W, n) by which prefixes are chosen, the largest first; all but the optimal ones look at one prefix alone."""
    if rule == "optimal":
        return gain
    if rule == "variance":
        return [over_tokens(slope**2 / p) for slope, p in zip(environments.slopes, environments.chance, strict=True)]
    return [-over_tokens(p * log) for p, log in zip(environments.chance, environments.policy, strict=True)]


def threshold(gain: Levels) -> Levels:
    """(W, n) 1 where an exact KL removes noise: no choice of prefixes leaves less."""
    return [(level > 0).astype(float) for level in gain]


def of_budget(one: Mapping[str, Any]) -> list[Row]:
    """Shares of the largest reduction that each rule reaches with so many positions; quantiles over environments."""
    drawn = generator("budget", one["distance"], one["spread"], one["seed"])
    shape = (VOCABULARY, BUDGET_LENGTH, one["distance"], drawn, one["spread"])
    environments = Environments.draw(one["budgeted"], *shape)
    off = _off(Environments.draw(1, VOCABULARY, SHORT, *shape[2:]))
    visits, rows = _joined(environments.visits), []
    known = {"off_again": off, "off_optimum": _off_optimum(drawn, one["distance"], one["spread"])}
    known |= {"bias_by_token": float(np.median(biased(environments, SHARES[1])))}
    for of, gain in gains(environments).items():
        worth = visits * _joined(gain)
        best = np.maximum(worth, 0).sum(axis=1)
        state = {"of": of, "everywhere": float(np.median(worth.sum(axis=1) / best)), **known}
        state["noisier"] = int((worth.sum(axis=1) < 0).sum())
        for rule in RULES_OF_CHOICE:
            order = np.argsort(-_joined(scores(environments, gain, rule)), axis=1)
            cost, gained = (np.take_along_axis(of_each, order, axis=1).cumsum(axis=1) for of_each in (visits, worth))
            for share in SHARES:
                reached = [
                    np.interp(share * BUDGET_LENGTH, np.append(0, c), np.append(0, g))
                    for c, g in zip(cost, gained, strict=True)
                ]
                low, middle, high = np.quantile(reached / best, (0.1, 0.5, 0.9))
                rows.append({**state, "rule": rule, "share": share, "removed": middle, "low": low, "high": high})
    return rows


def biased(environments: Environments, share: float) -> np.ndarray:
    """(W,) relative bias of the value with exact KLs where the sampled |u| is largest, at a share of the positions."""
    mass, size, error = (
        _joined([level.reshape(len(level), -1) for level in levels])
        for levels in (
            [d[:, :, None] * p for d, p in zip(environments.visits, environments.chance, strict=True)],
            [np.abs(u) for u in environments.u],
            [kl[:, :, None] - u for kl, u in zip(environments.kl, environments.u, strict=True)],
        )
    )
    order = np.argsort(-size, axis=1)
    cost, added = (np.take_along_axis(of_each, order, axis=1).cumsum(axis=1) for of_each in (mass, mass * error))
    wanted = share * environments.length
    found = [np.interp(wanted, np.append(0, c), np.append(0, a)) for c, a in zip(cost, added, strict=True)]
    return np.array(found) / environments.value_moments()[0]


def variances(environments: Environments, environment: int, exact: Levels) -> np.ndarray:
    """(3,) of value, token-level gradient and gradient by enumeration of all rollouts, with exact (W, n) as c."""
    policy, reference = environments.tables(environment)
    instance = Instance.of(sequence(policy.shape[1], environments.length), policy, reference)
    paths, weights = instance.paths, instance.rollout_weights("current")
    u = instance.policy - instance.reference
    kl = (np.exp(instance.policy) * u).sum(axis=1)
    c = _joined(exact)[environment][paths.contexts]
    cost = c * kl[paths.contexts] + (1 - c) * u[paths.contexts, paths.tokens]
    own = (1 - c) * u[paths.contexts, paths.tokens]
    full = c[:, :, None] * (np.exp(instance.policy) * u)[paths.contexts]
    to_go = cost[:, ::-1].cumsum(axis=1)[:, ::-1] - cost
    found = (cost.sum(axis=1)[:, None], *(projected(instance, paths, on, full) for on in (own, own + to_go)))
    return np.array([weights @ ((one - weights @ one) ** 2).sum(axis=1) for one in found])


def predicted(environments: Environments, environment: int, exact: Levels) -> np.ndarray:
    """(3,) the same by recursion: Rao–Blackwell's own variances and the gains of the prefixes that are not exact."""
    nothing = [np.zeros_like(level) for level in environments.u]
    local = Form(True, nothing, Ahead(nothing, nothing))
    everywhere = (
        environments.value_moments()[1],
        *(environments.noise(form).variance for form in (local, rao_blackwell(environments))),
    )
    left = _joined(environments.visits)[environment] * (1 - _joined(exact)[environment])
    added = [left @ _joined(gain)[environment] for gain in gains(environments).values()]
    return np.array([one[environment] for one in everywhere]) + np.array(added)


def _off(environments: Environments) -> float:
    """The largest relative difference of the formula from enumeration, exact KLs nowhere, where best, at random."""
    assert VOCABULARY**SHORT <= ENUMERATED
    best, random = gains(environments), generator("budget, exact")
    choices = [
        [np.zeros_like(level) for level in best["value"]],
        *map(threshold, best.values()),
        [random.integers(0, 2, level.shape).astype(float) for level in best["value"]],
    ]
    return max(
        float(np.abs(predicted(environments, 0, exact) / variances(environments, 0, exact) - 1).max())
        for exact in choices
    )


def _off_optimum(drawn: np.random.Generator, distance: float, spread: float) -> float:
    """At the optimum of E[R] − β·KL, the relative difference of the objective's variance from β²·Σ d·c·Var(u | s)."""
    reference = Environments.draw(1, VOCABULARY, SHORT, distance, drawn, spread).tables(0)[1]
    plain = sequence(VOCABULARY, SHORT)
    environment = replace(plain, reward=drawn.standard_normal(reference.shape))
    instance = Instance.of(environment, optimum(environment, reference, BETA).policy, reference)
    paths, weights = instance.paths, instance.rollout_weights("current")
    p, u = np.exp(instance.policy), instance.policy - instance.reference
    kl = (p * u).sum(axis=1)
    c = drawn.integers(0, 2, len(kl))
    cost = (c * kl)[paths.contexts] + ((1 - c)[:, None] * u)[paths.contexts, paths.tokens]
    objective = environment.returns(paths) - BETA * cost.sum(axis=1)
    added = (c * (p * (u - kl[:, None]) ** 2).sum(axis=1))[paths.contexts].sum(axis=1)
    wanted = BETA**2 * (weights @ added)
    return float(abs(weights @ (objective - weights @ objective) ** 2 - wanted) / wanted)


def _past_norms(environments: Environments) -> Levels:
    """(W, n) the sum of ‖g‖² over the tokens of a prefix."""
    found = [np.zeros_like(environments.kl[0])]
    for norms in environments.score_norms[:-1]:
        found.append((found[-1][:, :, None] + norms).reshape(len(norms), -1))
    return found


def _joined(levels: Levels) -> np.ndarray:
    """(W, all prefixes)."""
    return np.concatenate(levels, axis=1)


# --- rewarded ---
# Exact KLs beside a sampled reward: noise of the objective R − β·KL and of its gradient along paths of training.
def of_path(one: Mapping[str, Any]) -> list[Row]:
    """A row for each drawn environment: variances with exact KLs over those with sampled ones."""
    logits, problems = _paths(one["start"], one["seed"])
    return [{"draw": draw, **_ratios(each, logits[one["made"], draw])} for draw, each in enumerate(problems)]


def _ratios(problem: Problem, logits: np.ndarray) -> Row:
    instance, beta = Instance.of(problem.environment, logits, problem.reference), PATHS["beta"]
    paths, weights = instance.paths, instance.rollout_weights("current")
    p, u = np.exp(instance.policy), instance.policy - instance.reference
    sampled, exact = u[paths.contexts, paths.tokens], (p * u).sum(axis=1)[paths.contexts]
    reward = problem.environment.returns(paths)[:, None]
    values = [variance(weights, reward - beta * cost.sum(axis=1, keepdims=True)) for cost in (sampled, exact)]
    score = projected(instance, paths, np.ones_like(sampled))
    gradients = (
        projected(instance, paths, reward - beta * to_go(sampled)),
        projected(instance, paths, reward - beta * (to_go(exact) - exact), -beta * (p * u)[paths.contexts]),
    )
    noise = [variance(weights, with_baseline(weights, one, score)) for one in gradients]
    added = values[1] - values[0]
    return {
        "value": values[1] / values[0],
        "gradient": noise[1] / noise[0],
        "off_gain": float(abs(added - _added(instance, problem.environment.reward)) / values[0]),
    }


def to_go(costs: np.ndarray) -> np.ndarray:
    """(N, T) sums of a token's cost and all later ones."""
    return costs[:, ::-1].cumsum(axis=1)[:, ::-1]


def variance(weights: np.ndarray, each: np.ndarray) -> float:
    """Total variance of (N, D) with chances (N,)."""
    return float(weights @ ((each - weights @ each) ** 2).sum(axis=1))


def with_baseline(weights: np.ndarray, each: np.ndarray, score: np.ndarray) -> np.ndarray:
    """(N, D) gradients less their least noisy single baseline times the score."""
    best = (weights @ (each * score).sum(axis=1)) / (weights @ (score**2).sum(axis=1))
    return np.asarray(each - best * score)


def _added(instance: Instance, reward: np.ndarray) -> float:
    """What exact KLs add to the objective's variance, by recursion: −β²·Σ d·gain, with the reward ahead in the gain."""
    levels = [_levels(table) for table in (instance.policy, instance.reference, reward)]
    environments, beta = Environments(levels[0], levels[1]), PATHS["beta"]
    kl_ahead, reward_ahead = environments.ahead().mean, environments.ahead(levels[2]).mean
    total = 0.0
    for step, (p, slope) in enumerate(zip(environments.chance, environments.slopes, strict=True)):
        ahead = kl_ahead[step] - (levels[2][step] + reward_ahead[step]) / beta
        gain = over_tokens(slope**2 / p + 2 * slope * ahead)
        total -= beta**2 * float((environments.visits[step] * gain).sum())
    return total


def _levels(table: np.ndarray) -> Levels:
    """(1, Vᵗ, V) level by level, of a table of all prefixes."""
    sizes = [PATHS["vocabulary"] ** step for step in range(int(PATHS["length"]))]
    return [level[None] for level in np.split(table, np.cumsum(sizes)[:-1])]


@cache
def _paths(start: str, seed: int) -> tuple[np.ndarray, list[Problem]]:
    environment = sequence(int(PATHS["vocabulary"]), int(PATHS["length"]))
    problems = [
        Problem.draw(
            environment, int(digest(["reward", start, seed, draw])[:8], 16), distance=STARTS[start], reward="normal"
        )
        for draw in range(int(PATHS["draws"]))
    ]
    rates = {name: PATHS[name] for name in ("beta", "learning_rate")}
    return ascents(problems, int(PATHS["updates"]), **rates), problems


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
        "freedom": lambda one: counts(),
        "noise": noise,
        "bandit": training,
        "budget": of_budget,
        "language": lambda one: recorded(),
        "reward": of_path,
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
    return float(variances(environments, 0, threshold(gains(environments)["value"]))[0])


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
            off = _off_experiment(environments, noise, plain, blackwell)
    all_of = {name: np.concatenate(parts) for name, parts in found.items()}
    row: Row = {"kl": float(np.median(all_of["kl"])), "off_again": off, "off_identity": float(all_of["identity"].max())}
    for name in ("value", "gradient", "baselines"):
        ratio = all_of[name]
        row |= {
            f"{name}_fails": int((ratio > 1).sum()),
            f"{name}_worst": float(ratio.max()),
        }
    return [row]


def _off_experiment(
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
