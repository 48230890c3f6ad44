"""Gradients that a token-level loss misses: one part of the question at a time, every number exact."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from kltest.environments import Instance, sequence
from kltest.environments.policies import softmax_gradient, table
from kltest.loss.resolve import resolve
from kltest.moments import dynamic, exact
from kltest.training import Problem, Run, train
from kltest.truth import gradient, gradient_again, value
from kltest.truth.gradients import credit_pairs

from ..arrays import cosine, norm
from ..fixed_points import token_k2_fixed_point
from ..jacobians import asymmetry, jacobian
from . import environments, settings
from .settings import SETTINGS as SETTINGS

Configuration = Mapping[str, Any]
Row = dict[str, Any]


def compute(configuration: Configuration) -> list[Row]:
    """The rows of one part with its settings."""
    options = {name: value for name, value in configuration.items() if name != "part"}
    rows = COMPUTE[configuration["part"]](**options)
    return [{**configuration, **row} for row in rows]


def divided(whole: np.ndarray, local: np.ndarray, last: np.ndarray) -> Row:
    """Divide ∇KL(π‖ref) into what a token-level loss misses of it and what the last token alone has."""
    return {
        "missed": norm(whole - local) / norm(whole),
        "kept": norm(local) / norm(whole),
        "cosine": cosine(local, whole),
        "last": norm(last) / norm(whole),
    }


def parts(instance: Instance, truth: Callable[[str, Instance], np.ndarray]) -> list[np.ndarray]:
    """∇KL(π‖ref), its local part, and the last token's, by one of the truth's two routes."""
    return [truth(f"{name}reverse_kl", instance) for name in ("", "local_", "last_token_")]


def _length(length: int, steering: float, seed: int) -> list[Row]:
    return [_persistent(settings.VOCABULARY, length, steering, seed)]


def _vocabulary(vocabulary: int, steering: float, seed: int) -> list[Row]:
    return [_persistent(vocabulary, settings.LENGTH, steering, seed)]


def _persistent(vocabulary: int, length: int, steering: float, seed: int) -> Row:
    instance = environments.persistent(vocabulary, length, steering, seed)
    whole, local, last = parts(instance, gradient)
    formula = environments.future_in_closed_form(instance, steering)
    return {
        **divided(whole, local, last),
        # What the recursion and the formula say of what is missed, relative to the whole gradient.
        "off_formula": norm(whole - local - formula) / norm(whole),
    }


def _estimators(length: int, estimator: str, seed: int) -> list[Row]:
    """The expected gradient of an implementation, by dynamic programming over what it does to each token."""
    instance = environments.persistent(settings.VOCABULARY, length, settings.STEERING, seed)
    whole, local = (gradient(name, instance) for name in ("reverse_kl", "local_reverse_kl"))
    found = dynamic(resolve(estimator), instance).gradient
    return [
        {
            "bias": norm(found - whole) / norm(whole),
            "off_local": norm(found - local) / norm(whole),
        }
    ]


def _credit(steering: float, seed: int) -> list[Row]:
    """Discounts and critics, from the parts of the gradient by how far ahead the log-ratio lies.

    By lag n: G_n = E[Σ_t g_t u_(t+n)]. A discount γ gives Σ_n γⁿG_n. A generalised advantage with λ and the critic
    α·V, V the KL still to come, gives G_0 + Σ_(n≥1) (α + (1 − α)·λⁿ)·G_n: discounted is what the critic does not know.
    """

    instance = environments.persistent(settings.VOCABULARY, settings.CREDIT_LENGTH, steering, seed)
    lags = np.zeros((settings.CREDIT_LENGTH, *instance.policy.shape))
    for (t, s), pair in credit_pairs(instance).items():
        lags[s - t] += pair
    whole = lags.sum(axis=0)
    ahead = np.arange(len(lags))
    rows: list[Row] = []
    for critic in settings.CRITICS:
        for discount in settings.DISCOUNTS:
            weight = critic + (1 - critic) * discount**ahead
            weight[0] = 1.0
            found = np.tensordot(weight, lags, axes=1)
            bias = norm(found - whole) / norm(whole)
            rows.append({"what": "discount", "critic": critic, "discount": discount, "bias": bias})
    return rows + [_advantages(steering, seed, critic, discount) for critic in (0.0, 0.5) for discount in (0.0, 0.8)]


def _advantages(steering: float, seed: int, critic: float, discount: float) -> Row:
    """The same as a sum over all rollouts of Σ_t g_t·A_t, the advantages formed along each as a trainer does."""

    instance = environments.persistent(settings.ENUMERATED["vocabulary"], settings.ENUMERATED["length"], steering, seed)
    paths, horizon = instance.paths, instance.environment.horizon
    chances, u = np.exp(instance.policy), instance.policy - instance.reference
    onward = np.zeros(len(u))
    known = np.zeros((len(paths), horizon + 1))  # what the critic says at each position; nothing follows the last
    for step in reversed(range(horizon)):
        onward = (chances * (u + (instance.environment.transition @ onward).reshape(u.shape))).sum(axis=1)
        known[:, step] = critic * onward[paths.contexts[:, step]]
    advantage = np.zeros((len(paths), horizon + 1))
    for step in reversed(range(horizon)):
        surprise = u[paths.contexts[:, step], paths.tokens[:, step]] + known[:, step + 1] - known[:, step]
        advantage[:, step] = surprise + discount * advantage[:, step + 1]
    weighted = np.zeros(u.shape)
    paths.collect(np.exp(paths.log_probability(instance.policy))[:, None] * advantage[:, :-1], weighted)
    found = softmax_gradient(weighted, instance.policy)
    expected = np.zeros(u.shape)
    for (t, s), pair in credit_pairs(instance).items():
        expected += pair * (1.0 if s == t else critic + (1 - critic) * discount ** (s - t))
    off = norm(found - expected) / norm(found)
    return {"what": "rollout by rollout", "critic": critic, "discount": discount, "off_formula": off}


def _conditions(seed: int) -> list[Row]:
    """Find the knowledge of the context with which the token-level gradient is the true one."""
    rows = []
    for condition in settings.CONDITIONS:
        instance = environments.prefixes(condition, **settings.PREFIXES, seed=seed)
        found, again = (divided(*parts(instance, route)) for route in (gradient, gradient_again))
        off = max(abs(found[name] - again[name]) for name in found)
        asymmetric = asymmetry(jacobian("local_reverse_kl", instance))
        rows.append({"condition": condition, **found, "off_again": off, "asymmetry": asymmetric})
    return rows


def _root(estimator: str) -> list[Row]:
    """The expected gradient at the root's second logit, from all rollouts: the truth there is p(1 − p)·d."""
    rows = []
    for chance in settings.CHANCES:
        for departure in settings.DEPARTURES:
            instance = environments.blind_root(chance, departure)
            kl = value("kl", instance) / chance
            found = float(exact(resolve(estimator), instance).gradient[0, 1])
            whole, local = (float(gradient(f"{name}reverse_kl", instance)[0, 1]) for name in ("", "local_"))
            rows.append(
                {"chance": chance, "departure": departure, "kl": kl, "found": found, "whole": whole, "local": local}
            )
    return rows


def _field(length: int, steering: float, seed: int) -> list[Row]:

    instance = environments.persistent(settings.VOCABULARY, length, steering, seed)
    return [{"asymmetry": asymmetry(jacobian("local_reverse_kl", instance))}]


def _circulation(seed: int) -> list[Row]:
    """∮ of a field around a rectangle of two logits, by Gauss and Legendre's rule, exact here to rounding.

    Two binary tokens, a fair reference: x is the logit of the root's second token, y that of the second token after it.
    """
    environment, fair = sequence(2, 2), np.zeros((3, 2))
    nodes, weights = np.polynomial.legendre.leggauss(30)
    drawn = environments.generator("corners", seed)
    low, sides = drawn.uniform(-2, 0, 2), drawn.uniform(1, 3, 2)
    (x0, x1), (y0, y1) = zip(low, low + sides, strict=True) if seed else settings.CORNERS
    corners = [(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)]

    def along(field: Callable[[Instance], np.ndarray]) -> list[float]:
        sums = []
        for (xa, ya), (xb, yb) in pairwise(corners):
            total = 0.0
            for node, weight in zip(nodes, weights, strict=True):
                share = (1 + node) / 2
                logits = np.zeros((3, 2))
                logits[0, 1], logits[2, 1] = xa + share * (xb - xa), ya + share * (yb - ya)
                found = field(Instance.of(environment, logits, fair))
                total += float(weight / 2 * (found[0, 1] * (xb - xa) + found[2, 1] * (yb - ya)))
            sums.append(total)
        return sums

    fields: dict[str, Callable[[Instance], np.ndarray]] = {
        "local_reverse_kl": lambda instance: gradient("local_reverse_kl", instance),
        "reverse_kl": lambda instance: gradient("reverse_kl", instance),
        "k2-loss": lambda instance: exact(resolve("k2-loss"), instance).gradient,
    }
    chance = [1 / (1 + np.exp(-x)) for x in (x0, x1)]
    formula = float((chance[1] - chance[0]) * (environments.coin_kl(y1) - environments.coin_kl(y0)))
    rows = []
    for name, field in fields.items():
        edges = along(field)
        rows.append({"field": name, "edges": edges, "circulation": sum(edges), "formula": formula})
    return rows


def _ends(seed: int) -> list[Row]:
    """Ends of exact training on E[R] − β·(k2 loss) from several starts, and the gradients there.

    A token tree: the rest point is solved backwards, and the Jacobian of what training follows is worked out there.
    """
    chosen = settings.ENDS
    drawn = environments.generator("ends", chosen, seed)
    shape = (sequence(chosen["vocabulary"], chosen["length"]).n_contexts, chosen["vocabulary"])
    environment = sequence(chosen["vocabulary"], chosen["length"], reward=0.7 * drawn.standard_normal(shape))
    reference, beta = 0.7 * drawn.standard_normal(shape), chosen["beta"]
    starts = [1.5 * drawn.standard_normal(shape) for _ in range(chosen["starts"])]
    runs = [Run(Problem(environment, start, reference), "k2-loss", beta, chosen["learning_rate"]) for start in starts]
    ended = train(runs, steps=chosen["steps"], optima=False).logits
    rest = token_k2_fixed_point(environment, reference, beta)
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
    "length": _length,
    "vocabulary": _vocabulary,
    "estimators": _estimators,
    "credit": _credit,
    "conditions": _conditions,
    "root": _root,
    "field": _field,
    "circulation": _circulation,
    "ends": _ends,
}
