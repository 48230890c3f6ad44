"""Bias and noise of the step that is taken: the gradient of E[R] − β·KL, baseline included, at any length.

A batch of n rollouts y_i ~ μ estimates the gradient by (1/n) Σ_i (P_i − S_i·b_i), where b_i is the mean B of the other
rollouts: P is what a rollout gives without a baseline, S the score that the baseline multiplies, B the return. A *way*
is a choice of P, S and B. With A = R − β·Σu, g_t a token's score, ρ_t = π/μ of a token and w_t = ρ_1·…·ρ_t:

    none       P = A·Σg_t                                           S = Σg_t
    token      P = A·Σρ_t·g_t                                       S = Σρ_t·g_t
    prefix     P = Σ_t g_t·(w_T·R − β·Σ_(s ≥ t) w_s·u_s)            S = Σw_t·g_t
    sequence   P = w_T·A·Σg_t                                       S = w_T·Σg_t
    to-go      that of prefix with w = 1: sampled log-ratios to go
    exact      P = Σ_t [g_t·(R − β·Σ_(s > t) KL_s) − β·∇KL_t]       S = Σg_t, B = R − β·Σ KL_t; else B = A

The reward is paid at the end, so that its prefix ratio is the whole rollout's. The batch's gradient is a U-statistic
with the kernel ½(P + P' − S·B' − S'·B) of two rollouts, hence at every n

    mean = E P − E S·E B,   variance = 4(n − 2)/(n(n − 1))·ζ₁ + 2/(n(n − 1))·ζ₂,
    ζ₁ = ¼ tr Cov(P − S·E B − B·E S),   ζ₂ = tr Cov of the kernel.

P, S and B of a rollout are entries of a vector z that each token multiplies by a matrix of its own, z' = M(c, y)·z. So
E[z·zᵀ] at each context is a recursion over time: no rollout is drawn or enumerated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from typing import Any

import numpy as np

from kltest.environments import Environment, Instance, sequence, tabular
from kltest.environments.policies import table
from kltest.reproduce.frames import Row
from kltest.truth import gradient, recursions
from kltest.truth.off_policy import along

from ..paths import seed_of
from ..rollouts import projected, to_go

STALE = ("none", "token", "prefix", "sequence")
FRESH = ("none", "to-go", "exact")
# Biases below this are what rounding leaves of none; variances of log-ratios below the other, of a start at the
# reference.
ROUNDING, TINY = 1e-8, 1e-12


@dataclass(frozen=True)
class Step:
    """Expectations of P, S and B, of each of W instances; D directions."""

    p: np.ndarray  # (W, D) E[P]
    s: np.ndarray  # (W, D) E[S]
    b: np.ndarray  # (W,) E[B]
    pp: np.ndarray  # (W,) E‖P‖²
    ps: np.ndarray  # (W,) E⟨P, S⟩
    ss: np.ndarray  # (W,) E‖S‖²
    bb: np.ndarray  # (W,) E[B²]
    pb: np.ndarray  # (W, D) E[P·B]
    sb: np.ndarray  # (W, D) E[S·B]

    @property
    def mean(self) -> np.ndarray:
        """(W, D) the expected gradient, the same at every n."""
        return self.p - self.s * self.b[:, None]

    @property
    def noise(self) -> np.ndarray:
        """(W,) 4·ζ₁: n times the variance in large batches."""
        b, s = self.b, self.s
        second = self.pp + b**2 * self.ss + dot(s, s) * self.bb
        second += 2 * (b * dot(self.sb, s) - b * self.ps - dot(self.pb, s))
        mean = self.p - 2 * s * b[:, None]
        return np.asarray(second - dot(mean, mean))

    @property
    def pairs(self) -> np.ndarray:
        """(W,) ζ₂: the variance of two rollouts."""
        own = self.pp - 2 * self.b * self.ps + self.ss * self.bb
        crossed = dot(self.p, self.p) - 2 * dot(self.pb, self.s) + dot(self.sb, self.sb)
        return np.asarray((own + crossed) / 2 - dot(self.mean, self.mean))

    @property
    def spread(self) -> np.ndarray:
        """(W,) the variance of B."""
        return np.asarray(self.bb - self.b**2)


def variance(noise: Any, pairs: Any, n: float) -> Any:
    """Of the gradient of n ≥ 2 rollouts."""
    return ((n - 2) * noise + 2 * pairs) / (n * (n - 1))


def dot(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Inner products of rows."""
    return np.asarray((one * other).sum(axis=-1))


# ------------------------------------------------------------------------------------------------- by enumeration
def enumerated(instance: Instance, way: str, beta: float) -> Step:
    """Sum over all rollouts of a small environment, of W = 1 instance."""
    paths, policy = instance.paths, instance.policy
    u, log_ratio = (along(instance, policy - other) for other in (instance.reference, instance.sampler))
    reward = instance.environment.returns(paths)[:, None]
    prefix, ones = np.exp(log_ratio.cumsum(axis=1)), np.ones_like(u)
    whole, returns = prefix[:, -1:], reward - beta * u.sum(axis=1, keepdims=True)
    scores = {"token": np.exp(log_ratio), "prefix": prefix, "sequence": whole * ones}
    s = projected(instance, scores.get(way, ones))
    b = returns
    if way == "prefix":
        p = projected(instance, whole * reward - beta * to_go(prefix * u))
    elif way == "to-go":
        p = projected(instance, reward - beta * to_go(u))
    elif way == "exact":
        costs = np.exp(policy) * (policy - instance.reference)
        exact = costs.sum(axis=1)[paths.contexts]
        p = projected(instance, reward - beta * (to_go(exact) - exact), -beta * costs[paths.contexts])
        b = reward - beta * exact.sum(axis=1, keepdims=True)
    else:
        p = s * returns
    chances = np.exp(paths.log_probability(instance.sampler))
    each = (p, s, b[:, 0], dot(p, p), dot(p, s), dot(s, s), b[:, 0] ** 2, p * b, s * b)
    return Step(*(np.asarray(chances @ one)[None] for one in each))


# --------------------------------------------------------------------------------------------------- by recursion
class Entries:
    """Matrices (W, C, V, K, K) of the entries of z, one for each context and token.

    An entry is named after what it is a product of: `w` is multiplied by ρ at each token, any other letter grows by
    what `grows` has for it, (W, C, V) or (W, C, V, D). The empty product is 1. `sums` are entries that add up, at each
    token, other entries of before it, times what stands there.
    """

    def __init__(
        self,
        ratio: np.ndarray,
        grows: Mapping[str, np.ndarray],
        products: Sequence[str],
        sums: Mapping[str, Sequence[tuple[str, np.ndarray]]],
    ) -> None:
        self.ratio, self.grows = ratio, grows
        directions = next(one.shape[-1] for one in grows.values() if one.ndim == 4)
        vectors = {name for name in products if any(grows[letter].ndim == 4 for letter in name if letter != "w")}
        sizes = {name: directions if name in vectors or name in sums else 1 for name in (*products, *sums)}
        edges = np.cumsum([0, *sizes.values()])
        self.at = {name: slice(low, high) for name, low, high in zip(sizes, edges[:-1], edges[1:], strict=True)}
        self.matrices = np.zeros((*ratio.shape, edges[-1], edges[-1]))
        self.start = np.zeros(edges[-1])
        self.start[[self.at[name].start for name in products if name in ("", "w")]] = 1
        for name in products:
            for of, times in self.after(name):
                self.add(name, of, times)
        for name, terms in sums.items():
            self.add(name, name, np.ones_like(ratio))
            for of, times in terms:
                self.add(name, of, times)

    def after(self, name: str) -> Iterator[tuple[str, np.ndarray]]:
        """Yield entries of before a token, and what each is multiplied by in this product after it."""
        weight, letters = ("w", name[1:]) if name.startswith("w") else ("", name)
        for count in range(len(letters) + 1):
            for grown in combinations(letters, count):
                times = self.ratio if weight else np.ones_like(self.ratio)
                for letter in grown:
                    times = scaled(times, self.grows[letter])
                yield weight + "".join(letter for letter in letters if letter not in grown), times

    def add(self, into: str, of: str, times: np.ndarray) -> None:
        """Add `times` an entry of before the token, a vector only if that entry is a number."""
        block = self.matrices[..., self.at[into], self.at[of]]
        block += times[..., None] if times.ndim == 4 else times[..., None, None] * np.eye(*block.shape[-2:])


def scaled(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(W, C, V) or (W, C, V, D) products of numbers, or of numbers and a vector."""
    if one.ndim == other.ndim:
        return one * other
    return one[..., None] * other if one.ndim < other.ndim else one * other[..., None]


def entries(
    way: str, beta: float, reward: np.ndarray, u: np.ndarray, ratio: np.ndarray, g: np.ndarray, costs: np.ndarray
) -> tuple[Entries, tuple[str, ...], str, str]:
    """Return the entries of a way, and the names of those that P (their sum), S and B are; `costs` are π·u."""
    grows = {"A": reward - beta * u, "R": reward, "G": g, "H": scaled(ratio, g)}
    if way == "none":
        return Entries(ratio, grows, ("", "A", "G", "GA"), {}), ("GA",), "G", "A"
    if way == "token":
        return Entries(ratio, grows, ("", "A", "H", "HA"), {}), ("HA",), "H", "A"
    if way == "sequence":
        return Entries(ratio, grows, ("", "A", "w", "wA", "wG", "wGA"), {}), ("wGA",), "wG", "A"
    if way == "exact":
        kl = np.broadcast_to(costs.sum(axis=2, keepdims=True), u.shape)
        slope = np.broadcast_to(scaled(costs, g).sum(axis=2, keepdims=True), g.shape)
        sums = {"Q": (("G", -beta * kl), ("", -beta * slope))}
        made = Entries(ratio, grows | {"B": reward - beta * kl}, ("", "B", "R", "G", "GR"), sums)
        return made, ("GR", "Q"), "G", "B"
    # To go is prefix on rollouts of the policy itself. A cost is paid for all scores up to its own token's.
    paid = -beta * ratio * u
    sums = {"Q": (("wG", paid), ("w", scaled(paid, g))), "S": (("w", scaled(ratio, g)),)}
    return Entries(ratio, grows, ("", "A", "w", "wR", "wG", "wGR"), sums), ("wGR", "Q"), "S", "A"


def recursed(instances: Sequence[Instance], way: str, beta: float) -> Step:
    """Do the recursion over time, for instances whose environments differ in the reward alone.

    All rollouts start at one context and end at the horizon; each token leads to one context.
    """
    environment = instances[0].environment
    policy, reference, sampler = (
        np.stack([getattr(one, name) for one in instances]) for name in ("policy", "reference", "sampler")
    )
    reward, u = np.stack([one.environment.reward for one in instances]), policy - reference
    made, p, s, b = entries(way, beta, reward, u, np.exp(policy - sampler), scores(policy), np.exp(policy) * u)
    forwards, successors = made.matrices, environment.successors[:, :, 0]
    drawn, back = forwards * np.exp(sampler)[..., None, None], forwards.swapaxes(-1, -2)
    contexts, size = environment.n_contexts, len(made.start)
    arrives = np.eye(contexts)[successors].reshape(-1, contexts).T
    state = np.zeros((len(instances), contexts, size, size))
    state[:, environment.start[0]] = np.outer(made.start, made.start)
    for _ in range(environment.horizon - 1):
        grown = drawn @ (state[:, :, None] @ back)
        state = (arrives @ grown.reshape(len(instances), -1, size * size)).reshape(state.shape)
    last = (drawn @ (state[:, :, None] @ back)).sum(axis=(1, 2))

    def of(*names: str) -> np.ndarray:
        """(W, size, K) rows of E[z zᵀ], of a sum of entries."""
        return np.asarray(sum(last[:, made.at[name]] for name in names))

    def with_(rows: np.ndarray, *names: str) -> np.ndarray:
        """(W, size, size') second moments with another sum of entries."""
        return np.asarray(sum(rows[..., made.at[name]] for name in names))

    traced = [np.trace(with_(of(*one), *other), axis1=1, axis2=2) for one, other in ((p, p), (p, (s,)), ((s,), (s,)))]
    means = [with_(of(""), *names)[:, 0] for names in (p, (s,), (b,))]
    beside = [with_(of(b), b)[:, 0, 0], with_(of(b), *p)[:, 0], with_(of(b), s)[:, 0]]
    return Step(*means[:2], means[2][:, 0], *traced, *beside)


def scores(policy: np.ndarray) -> np.ndarray:
    """(W, C, V, D) gradients of log π at the logits; in V − 1 orthonormal directions a context, as they sum to zero."""
    count, contexts, vocabulary = policy.shape
    directions, _ = np.linalg.qr(np.eye(vocabulary) - 1 / vocabulary)
    own = (np.eye(vocabulary) - np.exp(policy)[:, :, None, :]) @ directions[:, : vocabulary - 1]
    g = np.zeros((count, contexts, vocabulary, contexts, vocabulary - 1))
    g[:, np.arange(contexts), :, np.arange(contexts)] = own.swapaxes(0, 1)
    return g.reshape(count, contexts, vocabulary, -1)


# ------------------------------------------------------------------------------------- environments and policies
VOCABULARY = 3  # of trees
MISTAKES = 1.4  # expected mistakes of a rollout of the reference, about
RATE = 0.5  # each update goes so much of the way to the optimum
UPDATES = (0, 1, 4)
AWAY = 1.0  # KL(π‖ref) of a start away from the reference, in nats
NATS = (0.001, 0.01, 0.1, 1.0, 3.0)  # KL(π‖μ) of a rollout


def tree(tokens: int, generator: np.random.Generator) -> tuple[Environment, np.ndarray]:
    """Build sequences in which every prefix has logits and a reward for each token of its own."""
    plain = sequence(VOCABULARY, tokens)
    shape = plain.n_contexts, VOCABULARY
    environment = replace(plain, reward=generator.standard_normal(shape) / np.sqrt(tokens))
    return environment, generator.standard_normal(shape)


def bigram(tokens: int, generator: np.random.Generator) -> tuple[Environment, np.ndarray]:
    """Build rollouts of two tokens, whose every pair has a reward: the whole one is a sum of many small ones."""
    reward = generator.standard_normal((2, 2)) / np.sqrt(tokens)
    start, successors = np.array([1.0, 0.0]), np.array([[[0], [1]], [[0], [1]]])
    environment = tabular(successors, np.ones((2, 2, 1)), reward, tokens, start=start, name="bigram")
    return environment, generator.standard_normal((2, 2))


def mistakes(tokens: int, generator: np.random.Generator) -> tuple[Environment, np.ndarray]:
    """Build rollouts that fail by one mistake, at the token 0, anywhere: a reward of −1 or 0.

    Contexts are even and odd positions before a mistake, and all positions after one.
    """
    start, successors = np.array([1.0, 0.0, 0.0]), np.array([[2, 1], [2, 0], [2, 2]])[:, :, None]
    reward = np.array([[-1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    environment = tabular(successors, np.ones((3, 2, 1)), reward, tokens, start=start, name="mistakes")
    logits = generator.standard_normal((3, 2))
    logits[:2] = np.log(MISTAKES / tokens) + 0.5 * logits[:2]
    logits[:, 1] = 0.0
    return environment, logits


FAMILIES = {"tree": tree, "bigram": bigram, "mistakes": mistakes}


def ascent(environment: Environment, start: np.ndarray, reference: np.ndarray, beta: float) -> list[np.ndarray]:
    """(C, V) log-probs of the start and after each update along the natural gradient: the gradient over visits and π.

    An update of 1/β goes all the way if the policy sees whole prefixes and the rewards to come are known.
    """
    path = [start]
    for _ in range(max(UPDATES)):
        policy = path[-1]
        instance = Instance(environment, policy, reference, policy)
        plain = gradient("expected_reward", instance) - beta * gradient("reverse_kl", instance)
        visits = recursions.total_visits(environment, policy)[:, None]
        path.append(table(policy + RATE / beta * plain / (visits * np.exp(policy))))
    return path


def moved(environment: Environment, policy: np.ndarray, direction: np.ndarray) -> Callable[[float], np.ndarray]:
    """Return the log-probs μ (C, V), in this direction of logits, at which KL(π‖μ) of a rollout is so many nats."""
    weights = recursions.total_visits(environment, policy)[:, None] * np.exp(policy)

    def at(nats: float) -> np.ndarray:
        short = lambda size: (weights * (policy - table(policy + size * direction))).sum() < nats  # noqa: E731
        low, high = 0.0, 1e-3
        while short(high):
            low, high = high, 2 * high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if short(middle) else (low, middle)
        return table(policy + high * direction)

    return at


# ------------------------------------------------------------------------------------------------------------- rows
def of_step(family: str, tokens: int, start: str, beta: float, seed: int) -> list[Row]:
    """A row for each policy on its own rollouts (`drift` none), and for each sampler of it, by age or by an engine."""
    generator = np.random.default_rng(seed_of("step", family, tokens, seed))
    environment, logits = FAMILIES[family](tokens, generator)
    away, engine = (generator.standard_normal(logits.shape) for _ in range(2))
    reference = table(logits)
    path = ascent(
        environment, reference if start == "reference" else moved(environment, reference, away)(AWAY), reference, beta
    )
    own = [Instance(environment, path[made], reference, path[made]) for made in UPDATES]
    fresh = {way: of_way(own, way, beta) for way in FRESH}
    rows = [
        {"made": made, "drift": "none", **_own(own[place], fresh, place, beta)} for place, made in enumerate(UPDATES)
    ]
    labels, stale = [], []
    for place, made in enumerate(UPDATES):
        # A sampler of some age is where the last update came from, or as far behind on that line as asked.
        directions = {"engine": engine} | ({"age": path[made - 1] - path[made]} if made else {})
        for drift, direction in directions.items():
            sampler = moved(environment, path[made], direction)
            for nats in NATS:
                labels.append((place, {"made": made, "drift": drift, "nats": nats}))
                stale.append(Instance(environment, path[made], reference, sampler(nats)))
    # Of a policy that is all but certain, ratios and their squares can leave the range of a float.
    with np.errstate(over="ignore", invalid="ignore"):
        found = {way: of_way(stale, way, beta) for way in STALE}
        for index, (place, label) in enumerate(labels):
            rows.append({**label, **_stale(found, fresh["none"], index, place)})
    return rows


def of_way(instances: Sequence[Instance], way: str, beta: float) -> Step:
    """Enumerate where each prefix has logits of its own; elsewhere do the recursion."""
    if not instances[0].environment.tree:
        return recursed(instances, way, beta)
    each = [enumerated(one, way, beta) for one in instances]
    return Step(*(np.concatenate([getattr(one, name.name) for one in each]) for name in fields(Step)))


def _own(instance: Instance, found: Mapping[str, Step], place: int, beta: float) -> Row:
    """KL to the reference, noise over ‖∇J‖², noise of other ways over it, and the slope of the return.

    The slope is that of R − β·ΣKL on Σ(u − KL), over β: with V its variance, exact KLs leave V and sampled ones
    V + β²·(1 − 2·slope)·Var Σ(u − KL).
    """
    u, chances = instance.policy - instance.reference, np.exp(instance.policy)
    visits, kl = recursions.total_visits(instance.environment, instance.policy), (chances * u).sum(axis=1)
    surprise = float(visits @ (chances * (u - kl[:, None]) ** 2).sum(axis=1))
    noise = {way: step.noise[place] for way, step in found.items()}
    more = float(found["exact"].spread[place] - found["none"].spread[place])
    return {
        "kl": float(visits @ kl),
        "noise": float(noise["none"] / (found["none"].mean[place] ** 2).sum()),
        "exact": float(noise["exact"] / noise["none"]),
        "to_go": float(noise["to-go"] / noise["none"]),
        "slope": (1 + more / (beta**2 * surprise)) / 2 if surprise > TINY else None,
    }


def _stale(found: Mapping[str, Step], fresh: Step, index: int, place: int) -> Row:
    """Bias over ‖∇J‖, noise and ζ₂ over ‖∇J‖², None beyond the range of a float; and from where on ratios are best."""
    row: Row = {}
    truth = fresh.mean[place]
    size = dot(truth, truth)
    for way, step in found.items():
        bias = np.sqrt(((step.mean[index] - truth) ** 2).sum() / size)
        for name, value in (("bias", bias), ("noise", step.noise[index] / size), ("pairs", step.pairs[index] / size)):
            row[f"{name}_{way}"] = float(value) if np.isfinite(value) else None
    return row | {"even": even(row)}


def even(row: Mapping[str, Any]) -> float | None:
    """From so many rollouts on the whole sequence's ratio has a smaller error than none and the token's, at least 2.

    The errors' difference times n(n − 1) is a parabola in n, whose larger root it is. None beyond the range of a float.
    """
    most = 2.0
    for way in ("none", "token"):
        off = [row[f"{name}_{one}"] for one in (way, "sequence") for name in ("bias", "noise", "pairs")]
        if None in off:
            return None
        bias, noise, pairs = off[0] ** 2, off[1] - off[4], off[2] - off[5]
        if off[0] > ROUNDING:  # else it is the same estimator, on a single decision
            roots = np.roots([bias, noise - bias, 2 * (pairs - noise)])
            most = max([most, *(float(root.real) for root in roots if abs(root.imag) < ROUNDING)])
    return most


def error(row: Any, way: str, n: float) -> Any:
    """Mean squared error of the gradient of n rollouts, over ‖∇J‖²: of a row, or of the columns of a frame."""
    return row[f"bias_{way}"] ** 2 + variance(row[f"noise_{way}"], row[f"pairs_{way}"], n)
