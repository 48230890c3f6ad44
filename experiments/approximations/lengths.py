"""Division by lengths where they vary: one mean over a batch's tokens, 1/L for each rollout, and where that ends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch.autograd.functional import jacobian

from kltest.environments import Instance, ragged
from kltest.environments.policies import softmax_gradient
from kltest.loss.calling import bind
from kltest.loss.resolve import resolve
from kltest.moments import exact, exact_batches
from kltest.training import Problem, Run, train
from kltest.truth import gradient, optimum, value

from ..arrays import norm
from ..jacobians import asymmetry
from .settings import ENUMERATED_BATCHES, OPTIMUM, RAGGED

Row = dict[str, Any]
PENALTIES = ("length-normalised", "k2-loss-sequence")


def whole_return(logp, ref_logp, mask):  # type: ignore[no-untyped-def]
    """k1 in the reward over whole rollouts, averaged over all live tokens of the batch. (B, T) → ()."""
    live = mask != 0
    cost = (logp - ref_logp).where(live, 0.0).sum(dim=1).detach()
    return (cost * logp.where(live, 0.0).sum(dim=1)).sum() / live.sum()


def _loss(name: str) -> Any:
    return bind(whole_return, name=name) if name == "whole-return" else resolve(name)


def _instance(seed: int) -> Any:
    return Instance.draw(ragged(RAGGED["vocabulary"], RAGGED["length"]), np.random.SeedSequence([seed, 29]))


def _scores(instance: Any, weights: np.ndarray) -> np.ndarray:
    """(C, V) Σ over rollouts and live tokens of weights (N, T)·g_t."""
    into = np.zeros_like(instance.policy)
    instance.paths.collect(np.where(instance.paths.mask, weights, 0.0), into)
    return softmax_gradient(into, instance.policy)


def _log_ratios(instance: Any) -> np.ndarray:
    paths = instance.paths
    return np.where(paths.mask, paths.chosen(instance.policy - instance.reference), 0.0)


def of_a_batch(one: Mapping[str, Any]) -> list[Row]:
    """E[ĝ] of a batch of B rollouts, in closed form, beside its limit: ∇KL, local or whole, over E[L].

    Rollouts are exchangeable: E[ĝ] = B·E[x(y)/(L(y) + S)] with S the summed length of the B − 1 others, whose
    distribution is that of one length convolved with itself.
    """
    instance, size = _instance(one["seed"]), one["batch_size"]
    paths, chances, u = instance.paths, instance.rollout_weights("current"), _log_ratios(instance)
    others = _sum_of_lengths(np.bincount(paths.lengths, chances), size - 1)
    totals = np.arange(len(others))
    share = np.array([(others / (length + totals)).sum() for length in paths.lengths])
    cost = u if one["normalised"] == "token-mean" else np.repeat(u.sum(axis=1, keepdims=True), u.shape[1], axis=1)
    found = _scores(instance, size * (chances * share)[:, None] * cost)
    target = "local_reverse_kl" if one["normalised"] == "token-mean" else "reverse_kl"
    limit = gradient(target, instance) / value("expected_length", instance)
    enumerated = None
    if size <= ENUMERATED_BATCHES:
        enumerated = norm(exact_batches(_loss(one["normalised"]), instance, size=size).gradient - found)
    return [{"relative_distance": norm(found - limit) / norm(limit), "enumeration_error": enumerated}]


def _sum_of_lengths(one: np.ndarray, times: int) -> np.ndarray:
    """The distribution of the sum of `times` independent lengths, by squaring."""
    result, power = np.ones(1), one
    while times:
        if times % 2:
            result = np.convolve(result, power)
        times //= 2
        power = np.convolve(power, power) if times else power
    return result


# What multiplies g_t where every rollout is divided by its own length L.
FIELDS = ("whole return", "reward-to-go", "token k2", "token k3")


def of_one_rollout(one: Mapping[str, Any]) -> list[Row]:
    """Each rollout over its own length: is it the gradient of anything? And is k1 in the loss still zero?

    The expected gradient is written out over all rollouts in torch, and its Jacobian taken by autograd; that it is the
    estimator's own is checked where there is one.
    """
    instance = _instance(one["seed"])
    paths = instance.paths
    contexts, tokens, live = (torch.from_numpy(part) for part in (paths.contexts, paths.tokens, paths.mask))
    lengths = live.sum(dim=1, keepdim=True)
    reference = torch.from_numpy(instance.reference)
    start = torch.from_numpy(instance.policy).clone()

    def parts(logits: Any) -> tuple[Any, Any, Any]:
        log_probs = logits.log_softmax(-1)
        logp = log_probs[contexts, tokens].where(live, 0.0)
        u = logp - reference[contexts, tokens].where(live, 0.0)
        return log_probs, logp.sum(dim=1).exp(), u

    def field(name: str, logits: Any) -> Any:
        log_probs, chances, u = parts(logits)
        weight = {
            "whole return": lambda: u.sum(dim=1, keepdim=True).expand_as(u),
            "reward-to-go": lambda: u.flip(1).cumsum(dim=1).flip(1),
            "token k2": lambda: u,
            "token k3": lambda: 1 - (-u).exp(),
        }[name]()
        weight = (chances[:, None] * weight / lengths).where(live, 0.0)
        table = torch.zeros_like(log_probs).index_put((contexts, tokens), weight, accumulate=True)
        return table - log_probs.exp() * table.sum(dim=1, keepdim=True)

    def objective(logits: Any) -> Any:
        _, chances, u = parts(logits)
        return (chances * (u.sum(dim=1) - 1) / lengths[:, 0]).sum()

    leaf = start.clone().requires_grad_()
    objective(leaf).backward()
    assert leaf.grad is not None
    by_objective = leaf.grad.numpy()
    estimator = exact(_loss("length-normalised"), instance).gradient
    chances = instance.rollout_weights("current")
    k1 = _scores(instance, np.repeat((chances / paths.lengths)[:, None], paths.shape[1], axis=1))
    rows: list[Row] = []
    for name in FIELDS:
        matrix = jacobian(lambda flat, name=name: field(name, flat.view_as(start)).reshape(-1), start.reshape(-1))
        rows.append({"field": name, "asymmetry": asymmetry(matrix.numpy())})
    rows[0] |= {"objective_error": norm(estimator - by_objective), "k1_loss": norm(k1) / norm(estimator)}
    return rows


def ends(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Ends of exact training on E[R] − β·(the length-normalised penalty), beside its fixed point; and so for π*.

    Stationary: R − β·Σu/L is the same for all rollouts, so π(y) = ref(y)·e^{L(R − c)/β}, with c so that it sums to 1.
    Right is to end at once, and every answer that begins with the first token.
    """
    environment = _task()
    runs = []
    for one in configurations:
        # Even, the first time.
        spread = 0.5 * np.random.default_rng([one["seed"], 31]).standard_normal(environment.reward.shape)
        reference = spread if one["seed"] else np.zeros_like(spread)
        for penalty in PENALTIES:
            rate = OPTIMUM["learning_rate"] / max(one["beta"], 1.0)
            runs.append(Run(Problem(environment, reference, reference), penalty, beta=one["beta"], learning_rate=rate))
    history = train(runs, steps=OPTIMUM["steps"], record=OPTIMUM["steps"])
    rows = []
    for index, run in enumerate(runs):
        measured = {name: float(getattr(history, name)[-1, index]) for name in ("kl", "gap")}
        ended = {"gradient_norm": float(history.gradient_norm[-1, index]), **_ended(run, history.logits[index])}
        rows.append({"penalty": run.estimator, **measured, **ended})
    return [rows[first : first + len(PENALTIES)] for first in range(0, len(rows), len(PENALTIES))]


def _task() -> Any:
    environment = ragged(OPTIMUM["vocabulary"], OPTIMUM["length"])
    reward = np.zeros((environment.n_contexts, environment.vocabulary))
    reward[0, 0] = reward[0, -1] = 1.0
    return replace(environment, reward=reward)


def _ended(run: Any, logits: np.ndarray) -> Row:
    """Lengths of answers at the end and under the reference, and the distance of the end from its fixed point."""
    environment, reference = run.problem.environment, run.problem.reference
    instance = Instance.of(environment, logits, reference)
    paths = instance.paths
    earned, lengths = environment.returns(paths), paths.lengths
    log_ref = paths.log_probability(instance.reference)
    chances = {"": np.exp(paths.log_probability(instance.policy)), "reference_": np.exp(log_ref)}

    def at(c: float) -> np.ndarray:
        return np.exp(log_ref + lengths * (earned - c) / run.beta)

    if run.estimator == "length-normalised":
        wanted = at(brentq(lambda c: at(c).sum() - 1, 0.0, 1.0, xtol=1e-15))
    else:
        wanted = np.exp(paths.log_probability(optimum(environment, reference, run.beta).policy))
    found: Row = {"end_error": float(np.abs(chances[""] - wanted).sum())}
    for which, chance in chances.items():
        for words, kind in (("right", earned == 1), ("wrong", earned == 0)):
            found[f"{which}length_of_{words}"] = float(chance[kind] @ lengths[kind] / chance[kind].sum())
    return found
