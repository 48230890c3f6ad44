"""Exact gradients over all groups of one prompt, and training with them, exactly and with samples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from kltest.environments import Instance, bandit
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import exact_batches
from kltest.sweeps.run import Batching
from kltest.training import Problem, Run, train
from kltest.truth import gradient

from .settings import TRAINED_SIZE, WRONG

BATCHING = Batching(("estimator", "beta", "seed", "success"), size=128)

Row = dict[str, Any]


def compute_batch(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    if configurations[0]["part"] == "training":
        return _training(configurations)
    compute = {"masking": _masking, "baselines": _baselines, "std": _push}
    return [[{**one, **row} for row in compute[one["part"]](one)] for one in configurations]


def instance_of(success: float, seed: int) -> Any:
    """A policy that is right with probability `success`, the reference at a random mild distance from it."""
    policy = np.log([[success, *((1 - success) * np.array(WRONG))]])
    generator = np.random.default_rng([seed, round(1e6 * success)])
    reward = np.array([[1.0, 0.0, 0.0, 0.0]])
    return Instance.of(bandit(4, reward=reward), policy, policy + 0.5 * generator.standard_normal(policy.shape))


def _moments(name: str, instance: Any, size: int, **call: Any) -> Any:
    """Over all groups of `size` rollouts; an estimator that looks at no group is the mean over them."""
    return exact_batches(resolve(name, Call(**call)), instance, size=size, grouped=True)


def _masking(one: Mapping[str, Any]) -> list[Row]:
    """Return what masking leaves of the gradient and, in closed form, what it removes: E[1{tied}·u·g]."""
    instance, size = instance_of(one["success"], one["seed"]), one["group_size"]
    truth = gradient("reverse_kl", instance)
    masked = _moments("tied-groups-masked", instance, size).gradient
    policy, u = np.exp(instance.policy[0]), (instance.policy - instance.reference)[0]
    right = np.array([True, False, False, False])
    # A rollout's group is tied where the other n − 1 earn what it earns.
    tied = np.where(right, policy[0], 1 - policy[0]) ** (size - 1)
    weight = policy * tied * u
    lost = (weight - policy * weight.sum())[None]
    norm = np.linalg.norm(truth)
    return [
        {
            "ties": float(policy[0] ** size + (1 - policy[0]) ** size),
            "lost": float(np.linalg.norm(truth - masked) / norm),
            "closed_form_error": float(np.linalg.norm(truth - masked - lost) / norm),
        }
    ]


def _baselines(one: Mapping[str, Any]) -> list[Row]:
    """Each baseline's multiple of the true gradient, what is left beside it, and its noise."""
    instance, rows = instance_of(0.5, one["seed"]), []
    truth = gradient("reverse_kl", instance)
    square = float((truth**2).sum())
    for name in ("k2-loss-sequence", "group-mean", "leave-one-out"):
        found = _moments(name, instance, one["group_size"])
        factor = float((found.gradient * truth).sum()) / square
        rest = float(np.linalg.norm(found.gradient - factor * truth)) / square**0.5
        rows.append(
            {"estimator": name, "factor": factor, "rest": rest, "relative_variance": float(found.variance) / square}
        )
    return rows


def _push(one: Mapping[str, Any]) -> list[Row]:
    """The length of the expected step in groups that all earn the same, with and without normalisation.

    The reward is 0 everywhere, so every group is tied and only the KL inside the reward pushes.
    """
    instance, beta, size = instance_of(0.5, one["seed"]), one["push"], TRAINED_SIZE
    instance = replace(instance, environment=replace(instance.environment, reward=np.zeros((1, 4))))
    # The moments of a loss that takes β are those of its KL part, the change with β over β.
    normalised = beta * _moments("group-std", instance, size, beta=beta).gradient
    plain = beta * _moments("group-mean", instance, size).gradient
    again = _normalised_by_hand(instance, beta, size)
    norm = float(np.linalg.norm(normalised))
    return [
        {
            "normalised": norm,
            "plain": float(np.linalg.norm(plain)),
            "by_hand_error": float(np.linalg.norm(normalised - again)) / norm,
        }
    ]


def _normalised_by_hand(instance: Any, beta: float, size: int) -> np.ndarray:
    """E over all ordered groups of the mean over rows of −(r_i − r̄)/(std + 1e-4)·g_i, in plain numpy."""
    policy, u = np.exp(instance.policy[0]), (instance.policy - instance.reference)[0]
    groups = np.array(list(product(range(4), repeat=size)))
    chance = policy[groups].prod(axis=1)
    reward = -beta * u[groups]
    centred = reward - reward.mean(axis=1, keepdims=True)
    advantage = centred / (np.sqrt((centred**2).sum(axis=1, keepdims=True) / (size - 1)) + 1e-4)
    weights = np.zeros(4)
    np.add.at(weights, groups, -chance[:, None] * advantage / size)
    return (weights - policy * weights.sum())[None]


def _training(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Start at the reference, train, and see where it ended."""
    first = configurations[0]
    environment = bandit(4, reward=np.array([[1.0, 0.0, 0.0, 0.0]]))
    runs = []
    for one in configurations:
        reference = np.log([[one["success"], *((1 - one["success"]) * np.array(WRONG))]])
        runs.append(
            Run(
                Problem(environment, reference, reference),
                one["estimator"],
                beta=one["beta"],
                # A penalty of weight β bounds the step that is stable.
                learning_rate=one["learning_rate"] / max(one["beta"], 1.0),
                seed=one["seed"],
                whole=one["estimator"] == "group-std",
            )
        )
    history = train(
        runs,
        steps=first["steps"],
        batch_size=first["batch_size"] or None,
        group_size=first["group_size"],
        record=first["steps"],
    )
    rows = []
    for index, one in enumerate(configurations):
        right = float(np.exp(history.logits[index][0, 0] - np.logaddexp.reduce(history.logits[index][0])))
        found = {
            name: float(getattr(history, name)[-1, index]) for name in ("kl", "gap", "kl_to_optimum", "gradient_norm")
        }
        rows.append([{**one, "right": right, **found}])
    return rows
