"""Exact variances of values and gradients: the published pair, random environments, what can be gained, budgets."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kltest.environments import Instance, sequence
from kltest.environments.policies import remainder, score_norms, softmax_gradient, sum_of_others, table
from kltest.reproduce.frames import Row
from kltest.sweeps.settings import Setting, Settings
from kltest.truth.off_policy import along

from ..arrays import generator
from ..records import lines

# A *random environment* here has a table of its own for every prefix: logits of the policy are normal with the
# standard deviation `spread` (1 where nothing is said), those of the reference are the policy's plus normal noise of
# the standard deviation `distance`.

# The published pair: two binary tokens. The policy's first token is a coin's; after a 0 both models toss a coin,
# after a 1 the policy says 1 nearly always and the reference nearly never.
SURE = 0.01
# The reference's chance of a 0 at first, in the published pair.
PUBLISHED = 0.25


# Rates of failure are taken of environments of at most so many rollouts.
MOST = 512
# The ladder and the budgets are of this vocabulary.
VOCABULARY = 3

# Budgets: of these positions exact next-token KLs are computed, chosen by one of these rules. Variance is the optimal
# rule that knows nothing of what lies ahead. Environments are of this length.
SHARES = (0.05, 0.1, 0.25, 0.5)
RULES_OF_CHOICE = ("optimal", "variance", "entropy")
BUDGET_LENGTH = 6

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
    "pair": ("reference",),
    "rates": ("vocabulary", "length", "distance", "spread", "environments", "seed"),
    "ladder": ("length", "distance", "compared", "seed"),
    "budget": ("distance", "spread", "budgeted", "seed"),
    "language": (),
}


SETTINGS = Settings(
    title="Variance of unbiased KL gradients: Rao–Blackwell, baselines, credit, and the least possible",
    tags=("exact", "gradient", "variance", "training"),
    parts=PARTS,
    applies=lambda one: one["part"] != "rates" or one["vocabulary"] ** one["length"] <= MOST,
    values={
        "part": tuple(PARTS),
        "reference": Setting((*(round(0.05 * step, 2) for step in range(1, 20)),), allowed=(0.001, 0.999)),
        "vocabulary": Setting((2, 3, 4, 8), allowed=(2, 32)),
        "length": Setting((2, 3, 4, 6, 8), allowed=(2, 10)),
        "distance": Setting(
            (0.1, 0.3, 1.0, 3.0, 10.0), full=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0), allowed=(0.01, 30.0)
        ),
        "spread": Setting((1.0, 4.0), full=(1.0, 2.0, 4.0, 8.0), allowed=(0.01, 8.0)),
        "environments": Setting(1000, full=10_000, allowed=(10, 1_000_000)),
        "compared": Setting(50, full=500, allowed=(10, 100_000)),
        # Environments in which budgets are spent.
        "budgeted": Setting(100, full=500, allowed=(10, 100_000)),
    },
    seeds={"quick": 1, "full": 2},
)

EXACT = 1e-10  # sums of up to a thousand terms in float64

# Measurements on a language model, made by `language.py`.
RECORD = Path(__file__).parent / "language.csv"


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
        """The whole variance: of visits, of the token and of the future."""
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
        """The number of tokens T."""
        return len(self.policy)

    def tables(self, environment: int) -> tuple[np.ndarray, np.ndarray]:
        """(C, V) tables of one environment's policy and reference, prefixes numbered as by `sequence`."""
        return tuple(np.concatenate([level[environment] for level in pair]) for pair in (self.policy, self.reference))  # type: ignore[return-value]

    @cached_property
    def chance(self) -> Levels:
        """(W, Vᵗ, V) probabilities of next tokens, for each t."""
        return [np.exp(level) for level in self.policy]

    @cached_property
    def u(self) -> Levels:
        """(W, Vᵗ, V) log-ratios log π/ref, for each t."""
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
    environments = Environments.draw(one["budgeted"], VOCABULARY, BUDGET_LENGTH, one["distance"], drawn, one["spread"])
    visits, rows = _joined(environments.visits), []
    for of, gain in gains(environments).items():
        worth = visits * _joined(gain)
        best = np.maximum(worth, 0).sum(axis=1)
        for rule in RULES_OF_CHOICE:
            order = np.argsort(-_joined(scores(environments, gain, rule)), axis=1)
            cost, gained = (np.take_along_axis(of_each, order, axis=1).cumsum(axis=1) for of_each in (visits, worth))
            for share in SHARES:
                reached = [
                    np.interp(share * BUDGET_LENGTH, np.append(0, c), np.append(0, g))
                    for c, g in zip(cost, gained, strict=True)
                ]
                low, middle, high = np.quantile(reached / best, (0.1, 0.5, 0.9))
                rows.append({"of": of, "rule": rule, "share": share, "removed": middle, "low": low, "high": high})
    return rows


def predicted(environments: Environments, environment: int, exact: Levels) -> np.ndarray:
    """(3,) variances of value, token-level gradient and gradient, with exact (W, n) as c.

    They are Rao–Blackwell's own variances and the gains of the prefixes that are not exact.
    """
    nothing = [np.zeros_like(level) for level in environments.u]
    local = Form(True, nothing, Ahead(nothing, nothing))
    everywhere = (
        environments.value_moments()[1],
        *(environments.noise(form).variance for form in (local, rao_blackwell(environments))),
    )
    left = _joined(environments.visits)[environment] * (1 - _joined(exact)[environment])
    added = [left @ _joined(gain)[environment] for gain in gains(environments).values()]
    return np.array([one[environment] for one in everywhere]) + np.array(added)


def _past_norms(environments: Environments) -> Levels:
    """(W, n) the sum of ‖g‖² over the tokens of a prefix."""
    found = [np.zeros_like(environments.kl[0])]
    for norms in environments.score_norms[:-1]:
        found.append((found[-1][:, :, None] + norms).reshape(len(norms), -1))
    return found


def _joined(levels: Levels) -> np.ndarray:
    """(W, all prefixes)."""
    return np.concatenate(levels, axis=1)


# So many prefixes are worked on at a time.
CHUNK = 2**16


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """Rows of the part that the configuration names."""
    compute_part = {
        "pair": _pair,
        "rates": _rates,
        "ladder": _ladder,
        "budget": of_budget,
        "language": lambda one: lines(RECORD),
    }[configuration["part"]]
    return [{**configuration, **row} for row in compute_part(configuration)]


def published_pair(first: float) -> Instance:
    """The pair of two binary tokens; `first` is the reference's chance of a 0 at first."""
    policy = np.array([[0.5, 0.5], [0.5, 0.5], [SURE, 1 - SURE]])
    reference = np.array([[first, 1 - first], [0.5, 0.5], [1 - SURE, SURE]])
    return Instance.of(sequence(2, 2), np.log(policy), np.log(reference))


def _pair(one: Mapping[str, Any]) -> list[Row]:
    """Variances of the value with sampled log-ratios, with exact KLs, and with exact KLs where they remove noise."""
    instance = published_pair(one["reference"])
    u = instance.policy - instance.reference
    kl = (np.exp(instance.policy) * u).sum(axis=1)
    values = along(instance, u).sum(axis=1), kl[instance.paths.contexts].sum(axis=1)
    weights = instance.rollout_weights("current")
    both = np.cov(*values, aweights=weights, bias=True)
    # The best share of the Monte Carlo value in a mixture of the two.
    share = (both[1, 1] - both[0, 1]) / (both[0, 0] + both[1, 1] - 2 * both[0, 1])
    environments = Environments(*([own[None, :1], own[None, 1:]] for own in (instance.policy, instance.reference)))
    return [
        {
            "kl": float(weights @ values[0]),
            "monte_carlo": float(both[0, 0]),
            "rao_blackwell": float(both[1, 1]),
            "mixture": float(both[1, 1] - share * (both[1, 1] - both[0, 1])),
            "threshold": float(predicted(environments, 0, threshold(gains(environments)["value"]))[0]),
        }
    ]


def _chunks(one: Mapping[str, Any], vocabulary: int, count: int, spread: float = 1.0) -> Iterator[Environments]:
    """Random environments, some at a time."""
    length, distance = one["length"], one["distance"]
    size = max(1, CHUNK // vocabulary**length)
    for first in range(0, count, size):
        drawn = generator(vocabulary, length, distance, spread, one["seed"], first)
        yield Environments.draw(min(size, count - first), vocabulary, length, distance, drawn, spread)


def _rates(one: Mapping[str, Any]) -> list[Row]:
    """In how many environments Rao–Blackwell is the noisier one, of value and of gradient, and by how much."""
    found: dict[str, list[np.ndarray]] = {"value": [], "gradient": [], "baselines": [], "kl": []}
    for environments in _chunks(one, one["vocabulary"], one["environments"], one["spread"]):
        kl, plain = environments.value_moments(environments.u)
        forms = sampled(environments, credit="to-go"), rao_blackwell(environments)
        best = [environments.with_baseline(form, by_prefix=False) for form in forms]
        for name, pair in (("gradient", forms), ("baselines", best)):
            to_go, exact = (environments.noise(form).variance for form in pair)
            found[name].append(exact / to_go)
        found["value"].append(environments.value_moments()[1] / plain)
        found["kl"].append(kl)
    all_of = {name: np.concatenate(parts) for name, parts in found.items()}
    row: Row = {"kl": float(np.median(all_of.pop("kl")))}
    for name, ratio in all_of.items():
        row |= {f"{name}_fails": int((ratio > 1).sum()), f"{name}_worst": float(ratio.max())}
    return [row]


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
    for environments in _chunks(one, VOCABULARY, one["compared"]):
        kl.append(environments.value_moments()[0])
        size = environments.squared_gradient(rao_blackwell(environments))
        for name, form in ladder(environments):
            noise = environments.noise(form)
            if name == "return":
                whole = noise.variance
            parts = (part / size for part in (noise.visits, noise.token, noise.future))
            noisier = noise.variance > whole * (1 + EXACT)
            found.setdefault(name, []).append(np.stack([noise.variance / noise.visits, *parts, noisier]))
    rows = []
    for name, chunks in found.items():
        *columns, noisier = np.concatenate(chunks, axis=1)
        row = {"estimator": name, "kl": float(np.median(np.concatenate(kl)))}
        for column, values in zip(("over_floor", "visits", "token", "future"), columns, strict=True):
            row[column] = float(np.median(values))
        rows.append({**row, "noisier_than_return": int(noisier.sum())})
    return rows
