"""Gradients that a token-level loss misses: one part of the question at a time, every number exact."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import brentq

from kltest.environments import Instance, ngram, sequence
from kltest.environments.policies import table
from kltest.loss.resolve import resolve
from kltest.moments import dynamic, exact
from kltest.reproduce.frames import Row
from kltest.sweeps.settings import Setting, Settings
from kltest.training import Problem, Run, train
from kltest.truth import gradient, token_level_fixed_point, value
from kltest.truth.gradients import credit_pairs

from ..arrays import cosine, generator, norm
from ..jacobians import asymmetry, jacobian

# Settings that each part varies; it takes no notice of the others.
PARTS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "length": ("length", "steering", "seed"),
    "vocabulary": ("vocabulary", "steering", "seed"),
    "estimators": {"length": "length", "estimator": "estimator", "seed": "draw"},
    "credit": ("steering", "seed"),
    "conditions": ("seed",),
    "root": ("estimator",),
    "field": ("length", "steering", "seed"),
    "circulation": {"seed": "draw"},
    "ends": ("seed",),
}

# Jacobians are worked out up to this length.
LONGEST_FIELD = 1000

SETTINGS = Settings(
    title="What a token-level loss misses on sequences",
    tags=("exact", "gradient", "sequence"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        "length": Setting(
            (1, 2, 5, 10, 30, 100, 300, 1000, 10_000),
            full=(1, 2, 3, 5, 10, 20, 30, 50, 100, 300, 1000, 3000, 10_000),
            allowed=(1, 10_000),
        ),
        "vocabulary": Setting((2, 4, 8, 16, 32, 64), full=(2, 3, 4, 8, 16, 32, 64, 128), allowed=(2, 200)),
        "steering": Setting(
            (0.0, 0.5, 0.75, 0.9, 0.99), full=(0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999), allowed=(0.0, 0.999)
        ),
        "estimator": Setting(
            ("k2-loss", "full-loss", "k3-loss", "k1-reward-immediate", "k1-reward-to-go"),
            allowed=(
                *("k1-loss", "k2-loss", "k3-loss", "abs-loss", "full-loss", "k3-straight-through", "k3-inverted"),
                *("k1-reward", "k1-reward-to-go", "k1-reward-immediate", "k2-reward", "k3-reward"),
            ),
        ),
        # Policies and references for which estimators are judged, and rectangles.
        "draw": Setting(0, full=tuple(range(10)), allowed=(0, 1000)),
    },
    seeds={"quick": 2, "full": 10},
    applies=lambda one: one["part"] != "field" or one["length"] <= LONGEST_FIELD,
)

# Settings of parts that do not vary them.
VOCABULARY = 8
LENGTH = 100
STEERING = 0.9

# Credit: a discount γ from 0 to 1.
CREDIT_LENGTH = 24
DISCOUNTS = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)

# Conditions: policies of whole prefixes, in an environment small enough to be enumerated.
CONDITIONS = ("both context-free", "policy context-free", "reference context-free", "relabelled", "neither")
PREFIXES = {"vocabulary": 3, "length": 4}

# The blind root: the chance p of the second token, and the KL d that awaits after it.
CHANCES = (0.1, 0.3, 0.5, 0.7, 0.9)
DEPARTURES = (0.1, 0.3, 0.6)  # below log 2, the most that a coin can differ from a fair one

# Circulation: corners of the first rectangle of two logits, the root's and the one after its second token; of others a
# side is 1 to 3 long.
CORNERS = ((-1.5, 1.0), (0.5, 2.5))

# Ends: training from several starts in an environment of whole prefixes.
ENDS = {"vocabulary": 2, "length": 3, "starts": 6, "beta": 1.0, "steps": 4000, "learning_rate": 3.0}

# Relative differences below this are rounding; what is called a difference is above 1e-3.
EXACT = 1e-10


# --- environments ---
# A *persistent* bigram: with chance κ, the steering, a token is followed by itself; else by a draw from b that no
# context has a say in,
#
#     π(v|c) = (1 − κ)·b(v) + κ·1{v = c},    ref(v|c) = (1 − κ)·r(v) + κ·R(v|c),
#
# so that both are context-free at κ = 0, and at κ = 1 the context decides everything. What was said n tokens ago
# is still there with chance κⁿ; with k(c) the next-token KL in context c and k̄ its mean under b, a token v that n more
# tokens follow brings W(n)·(k(v) − k̄) beyond what any token brings, W(n) = (1 − κⁿ)/(1 − κ).
def persistent(vocabulary: int, length: int, steering: float, seed: int) -> Instance:
    """The persistent bigram; b, r and the rows of R are softmaxes of standard normal logits."""
    drawn = generator("persistent", vocabulary, seed)
    b, r, rows = (np.exp(table(drawn.standard_normal((size, vocabulary)))) for size in (1, 1, vocabulary))
    policy = np.concatenate([b, (1 - steering) * b + steering * np.eye(vocabulary)])
    reference = np.concatenate([r, (1 - steering) * r + steering * rows])
    return Instance.of(ngram(vocabulary, length, 2), np.log(policy), np.log(reference))


def prefixes(condition: str, vocabulary: int, length: int, seed: int) -> Instance:
    """Policies of whole prefixes: which of the two sees its context, or both through one relabelling of the tokens."""
    environment = sequence(vocabulary, length)
    drawn = generator("prefixes", vocabulary, length, seed)
    free = [np.repeat(drawn.standard_normal((1, vocabulary)), environment.n_contexts, axis=0) for _ in range(2)]
    bound = [drawn.standard_normal((environment.n_contexts, vocabulary)) for _ in range(2)]
    relabelling = np.stack([drawn.permutation(vocabulary) for _ in range(environment.n_contexts)])
    policy, reference = {
        "both context-free": (free[0], free[1]),
        "policy context-free": (free[0], bound[1]),
        "reference context-free": (bound[0], free[1]),
        "relabelled": tuple(np.take_along_axis(logits, relabelling, axis=1) for logits in free),
        "neither": (bound[0], bound[1]),
    }[condition]
    return Instance.of(environment, policy, reference)


def blind_root(chance: float, departure: float) -> Instance:
    """Two binary tokens: the root gives its second token the same chance as the reference; after it awaits a KL.

    After the first token the policy is the reference; after the second it is as far from a fair coin as `departure`.
    """
    root, fair = np.log([1 - chance, chance]), np.zeros(2)
    logit = brentq(lambda logit: coin_kl(logit) - departure, 0.0, 60.0, xtol=1e-15, rtol=1e-15)
    return Instance.of(sequence(2, 2), np.stack([root, fair, [0.0, logit]]), np.stack([root, fair, fair]))


def coin_kl(logit: float) -> float:
    """KL of a coin with this logit to a fair one."""
    log_probs = table(np.array([[0.0, logit]]))[0]
    return float((np.exp(log_probs) * (log_probs + np.log(2))).sum())


Configuration = Mapping[str, Any]


def compute(configuration: Configuration) -> list[Row]:
    """The rows of one part with its settings."""
    options = {name: value for name, value in configuration.items() if name != "part"}
    rows = COMPUTE[configuration["part"]](**options)
    return [{**configuration, **row} for row in rows]


def divided(instance: Instance) -> Row:
    """Divide ∇KL(π‖ref) into what a token-level loss misses of it and what the last token alone has."""
    whole, local, last = (gradient(f"{name}reverse_kl", instance) for name in ("", "local_", "last_token_"))
    return {
        "missed": norm(whole - local) / norm(whole),
        "kept": norm(local) / norm(whole),
        "cosine": cosine(local, whole),
        "last": norm(last) / norm(whole),
    }


def _persistent(steering: float, seed: int, vocabulary: int = VOCABULARY, length: int = LENGTH) -> list[Row]:
    return [divided(persistent(vocabulary, length, steering, seed))]


def _estimators(length: int, estimator: str, seed: int) -> list[Row]:
    """The expected gradient of an implementation, by dynamic programming over what it does to each token."""
    instance = persistent(VOCABULARY, length, STEERING, seed)
    whole, local = (gradient(name, instance) for name in ("reverse_kl", "local_reverse_kl"))
    found = dynamic(resolve(estimator), instance).gradient
    return [{"bias": norm(found - whole) / norm(whole), "off_local": norm(found - local) / norm(whole)}]


def _credit(steering: float, seed: int) -> list[Row]:
    """Discounts, from the parts of the gradient by how far ahead the log-ratio lies.

    By lag n: G_n = E[Σ_t g_t u_(t+n)]. A discount γ gives Σ_n γⁿG_n. A generalised advantage with λ and the critic
    α·V, V the KL still to come, gives G_0 + Σ_(n≥1) (α + (1 − α)·λⁿ)·G_n: discounted is what the critic does not know,
    so that its bias is 1 − α times that of a discount λ.
    """
    instance = persistent(VOCABULARY, CREDIT_LENGTH, steering, seed)
    lags = np.zeros((CREDIT_LENGTH, *instance.policy.shape))
    for (t, s), pair in credit_pairs(instance).items():
        lags[s - t] += pair
    whole, ahead = lags.sum(axis=0), np.arange(len(lags))
    found = {discount: np.tensordot(discount**ahead, lags, axes=1) for discount in DISCOUNTS}
    return [{"discount": at, "bias": norm(partial - whole) / norm(whole)} for at, partial in found.items()]


def _conditions(seed: int) -> list[Row]:
    """Find the knowledge of the context with which the token-level gradient is the true one."""
    rows = []
    for condition in CONDITIONS:
        instance = prefixes(condition, **PREFIXES, seed=seed)
        asymmetric = asymmetry(jacobian("local_reverse_kl", instance))
        rows.append({"condition": condition, **divided(instance), "asymmetry": asymmetric})
    return rows


def _root(estimator: str) -> list[Row]:
    """The expected gradient at the root's second logit, from all rollouts: the truth there is p(1 − p)·d."""
    rows = []
    for chance in CHANCES:
        for departure in DEPARTURES:
            instance = blind_root(chance, departure)
            kl = value("kl", instance) / chance
            found = float(exact(resolve(estimator), instance).gradient[0, 1])
            rows.append({"chance": chance, "departure": departure, "kl": kl, "found": found})
    return rows


def _field(length: int, steering: float, seed: int) -> list[Row]:

    instance = persistent(VOCABULARY, length, steering, seed)
    return [{"asymmetry": asymmetry(jacobian("local_reverse_kl", instance))}]


def _circulation(seed: int) -> list[Row]:
    """∮ of a field around a rectangle of two logits, by Gauss and Legendre's rule, exact here to rounding.

    Two binary tokens, a fair reference: x is the logit of the root's second token, y that of the second token after it.
    """
    environment, fair = sequence(2, 2), np.zeros((3, 2))
    nodes, weights = np.polynomial.legendre.leggauss(30)
    drawn = generator("corners", seed)
    low, sides = drawn.uniform(-2, 0, 2), drawn.uniform(1, 3, 2)
    (x0, x1), (y0, y1) = zip(low, low + sides, strict=True) if seed else CORNERS
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]

    def along(field: str) -> list[float]:
        sums = []
        for (xa, ya), (xb, yb) in pairwise(corners):
            total = 0.0
            for node, weight in zip(nodes, weights, strict=True):
                share = (1 + node) / 2
                logits = np.zeros((3, 2))
                logits[0, 1], logits[2, 1] = xa + share * (xb - xa), ya + share * (yb - ya)
                found = gradient(field, Instance.of(environment, logits, fair))
                total += float(weight / 2 * (found[0, 1] * (xb - xa) + found[2, 1] * (yb - ya)))
            sums.append(total)
        return sums

    edges = {field: along(field) for field in ("local_reverse_kl", "reverse_kl")}
    return [{"field": field, "edges": found, "circulation": sum(found)} for field, found in edges.items()]


def _ends(seed: int) -> list[Row]:
    """Ends of exact training on E[R] − β·(k2 loss) from several starts, and the gradients there.

    A token tree: the rest point is solved backwards, and the Jacobian of what training follows is worked out there.
    """
    chosen = ENDS
    drawn = generator("ends", chosen, seed)
    shape = (sequence(chosen["vocabulary"], chosen["length"]).n_contexts, chosen["vocabulary"])
    environment = sequence(chosen["vocabulary"], chosen["length"], reward=0.7 * drawn.standard_normal(shape))
    reference, beta = 0.7 * drawn.standard_normal(shape), chosen["beta"]
    starts = [1.5 * drawn.standard_normal(shape) for _ in range(chosen["starts"])]
    runs = [Run(Problem(environment, start, reference), "k2-loss", beta, chosen["learning_rate"]) for start in starts]
    ended = train(runs, steps=chosen["steps"], optima=False).logits
    rest = token_level_fixed_point(environment, reference, beta)
    found, first = (np.stack([np.exp(table(logits)) for logits in some]) for some in (ended, starts))
    instance = Instance.of(environment, rest, reference)
    matrix = jacobian("expected_reward", instance) - beta * jacobian("local_reverse_kl", instance)
    return [
        {
            "starts_apart": float(np.ptp(first, axis=0).max()),
            "off_rest": float(np.abs(found - np.exp(rest)).max()),
            **_standing(matrix.reshape(*shape, *shape)),
        }
    ]


def _standing(matrix: np.ndarray) -> Row:
    """Of a (C, V, C, V) Jacobian, relative to its largest entry: whether it is block triangular, with symmetric blocks.

    Contexts are numbered so that those that come later have larger numbers. A shift of a context's logits changes
    nothing: its eigenvalue, zero, is left out of `least_stable`, the largest of the others.
    """
    contexts, vocabulary = matrix.shape[:2]
    size = float(np.abs(matrix).max())
    # An orthonormal basis of the changes of a row of logits that change a policy.
    basis = np.linalg.svd(np.ones((1, vocabulary)))[2][1:].T
    own = np.stack([basis.T @ matrix[c, :, c, :] @ basis for c in range(contexts)]) / size
    earlier = [float(np.abs(matrix[late, :, early, :]).max()) for late in range(contexts) for early in range(late)]
    return {
        "by_earlier_logits": max(earlier) / size,
        "blocks_asymmetry": float(np.abs(own - own.transpose(0, 2, 1)).max()),
        "least_stable": float(np.linalg.eigvalsh(own).max()),
    }


COMPUTE: dict[str, Callable[..., list[Row]]] = {
    "length": _persistent,
    "vocabulary": _persistent,
    "estimators": _estimators,
    "credit": _credit,
    "conditions": _conditions,
    "root": _root,
    "field": _field,
    "circulation": _circulation,
    "ends": _ends,
}
