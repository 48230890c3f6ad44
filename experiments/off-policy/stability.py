"""Stability of training with several updates to one sampler: the linear map of one cycle at its fixed point.

Where training rests on-policy it rests for any number of updates a cycle, as a sampler that equals the policy is on
policy. A small step δ away becomes M·δ after a cycle, and dies away where all eigenvalues of M are smaller than one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kltest.environments import Instance
from kltest.training import Problem, Run, train
from kltest.truth import optimum, value
from kltest.truth.recursions import total_visits

from ..fixed_points import token_k2_fixed_point, token_k3_fixed_point
from .settings import GROUP, RECIPES, TRAINED
from .trained import groups, problem

Row = dict[str, Any]
# Central differences: errors of a few hundred times this squared, and of 1e-16 over this.
STEP = 1e-6


def of_stability(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    return [[{**one, **_cycle(one)}] for one in configurations]


def _cycle(one: Mapping[str, Any]) -> Row:
    """The largest eigenvalue of M, where the rest point went, and what theory needs to know of the environment."""
    estimator, ratio, name = RECIPES[one["recipe"]]
    each, beta = problem(one["seed"]), TRAINED["beta"]
    rest = rest_of(each, beta, name)
    contexts, vocabulary = rest.shape
    # A constant on all logits of a context changes nothing: those of the first token stay as they are.
    free = [(context, token) for context in range(contexts) for token in range(1, vocabulary)]
    starts = [rest]
    for context, token in free:
        for step in (STEP, -STEP):
            moved = rest.copy()
            moved[context, token] += step
            starts.append(moved)
    runs = [
        Run(Problem(each.environment, start, each.reference), estimator, beta=beta, learning_rate=one["learning_rate"])
        for start in starts
    ]
    count = one["updates"]
    history = train(
        runs, steps=count, inner_steps=count, ratio=ratio, group_size=groups(estimator), record=count, optima=False
    )
    ends = (history.logits - history.logits[:, :, :1])[:, :, 1:].reshape(len(runs), -1)
    matrix = ((ends[1::2] - ends[2::2]) / (2 * STEP)).T
    eigenvalues = np.linalg.eigvals(matrix)
    stayed = (rest - rest[:, :1])[:, 1:].ravel()
    best = rest_of(each, beta, "optimum")
    return {
        "multiplier": float(np.abs(eigenvalues).max()),
        "moved": float(np.abs(ends[0] - stayed).max()),
        "curvatures": curvatures(each.environment, best),
        "kl": _kl(each, best),
        "rate": beta * one["learning_rate"],
        "off_regression": _off_regression(one) if one["recipe"] == "none-centred" else None,
    }


def _off_regression(one: Mapping[str, Any]) -> float | None:
    """Difference of the last update of a cycle from −∇ Var_μ(R − β·Σu)/(2β), if the sampler is the start."""
    count, each, beta, rate = one["updates"], problem(one["seed"]), TRAINED["beta"], one["learning_rate"]
    run = Run(each, "leave-one-out", beta=beta, learning_rate=rate)
    before, after = (
        train([run], steps=steps, inner_steps=count, group_size=GROUP, optima=False).logits[0]
        for steps in (count - 1, count)
    )
    sampler = Instance.of(each.environment, each.start, each.reference)
    paths = sampler.paths
    chances = torch.from_numpy(sampler.rollout_weights("current"))
    logits = torch.from_numpy(before).requires_grad_()
    u = (logits.log_softmax(dim=1) - torch.from_numpy(sampler.reference))[paths.contexts, paths.tokens].sum(dim=1)
    objective = torch.from_numpy(each.environment.returns(paths)) - beta * u
    variance = (chances * (objective - (chances * objective).sum()).square()).sum()
    (wanted,) = torch.autograd.grad(-variance / (2 * beta), logits)
    update = (after - before) / rate
    return float(np.linalg.norm(update - wanted.numpy()) / np.linalg.norm(wanted.numpy()))


def rest_of(each: Any, beta: float, name: str | None) -> np.ndarray:
    """(C, V) log-probs of the policy where training rests on-policy."""
    if name == "optimum":
        return optimum(each.environment, each.reference, beta).policy
    solve = {"token_k2": token_k2_fixed_point, "token_k3": token_k3_fixed_point}[str(name)]
    return solve(each.environment, each.reference, beta)


def curvatures(environment: Any, log_policy: np.ndarray) -> list[float]:
    """The eigenvalues of the Fisher information of whole rollouts in the logits, but for the zeros of constants.

    It falls into a block for each context, visits·(diag π − ππᵀ).
    """
    chances = np.exp(log_policy)
    blocks = np.einsum("cv,vw->cvw", chances, np.eye(chances.shape[1])) - np.einsum("cv,cw->cvw", chances, chances)
    found = total_visits(environment, log_policy)[:, None] * np.linalg.eigvalsh(blocks)[:, 1:]
    return sorted(map(float, found.ravel()))


def _kl(each: Any, log_policy: np.ndarray) -> float:
    return value("reverse_kl", Instance.of(each.environment, log_policy, each.reference))
