"""A KL penalty in groups of rollouts of one prompt: exact gradients over all groups, and training with them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kltest.environments import Instance, bandit
from kltest.environments.policies import table
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import exact_batches
from kltest.reproduce.frames import Row
from kltest.sweeps.run import Batching
from kltest.sweeps.settings import Setting, Settings
from kltest.training import Problem, Run, train
from kltest.truth import gradient

from ..arrays import norm

# The environment: one prompt and four answers, of which the first is right. The reference's shares of the wrong ones.
WRONG = (0.5, 0.3, 0.2)
ENVIRONMENT = bandit(4, reward=np.array([[1.0, 0.0, 0.0, 0.0]]))
SIZE = 4  # rollouts in a group, where training and pushes are measured

PARTS: dict[str, Mapping[str, str]] = {
    "masking": {"group_size": "group_size", "success": "success", "seed": "seed"},
    "std": {"push": "push", "seed": "seed"},
    "training": {"estimator": "estimator", "beta": "beta", "batch_size": "batch_size", "steps": "steps", "seed": "seed"}
    | {"success": "trained_success"},
}

SETTINGS = Settings(
    title="Groups: masked ties, baselines, std-normalisation",
    tags=("exact", "gradient", "training", "groups"),
    parts=PARTS,
    # Exact training takes one seed, since nothing is random.
    applies=lambda one: one["part"] != "training" or bool(one["batch_size"] or one["seed"] == 0),
    values={
        "part": tuple(PARTS),
        "group_size": Setting((1, 2, 4, 8), full=(1, 2, 3, 4, 8, 16), allowed=(1, 16)),
        # Probability of the right answer, under the policy (masking) and under the reference (training).
        "success": Setting((0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98), allowed=(0.001, 0.999)),
        "trained_success": Setting((0.1, 0.5), full=(0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)),
        # Coefficients at which the push of a tied group is measured.
        "push": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0),
        "estimator": ("k2-loss-sequence", "tied-groups-masked", "group-mean", "leave-one-out", "group-std"),
        "beta": Setting(
            (0.3, 0.5, 0.7, 1.0, 1.5), full=(0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 5.0), allowed=(0.05, 100.0)
        ),
        # 0: exact expectations.
        "batch_size": Setting((0, 64), allowed=(0, 4096)),
        "steps": Setting(1000, full=10_000),
    },
    seeds={"quick": 3, "full": 10},
)
BATCHING = Batching(("estimator", "beta", "seed", "success"), size=128)


def compute_batch(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Return the row of each configuration of one part."""
    part = configurations[0]["part"]
    each = {"masking": _masking, "std": _push}
    found = map(each[part], configurations) if part in each else _training(configurations)
    return [[{**one, **row}] for one, row in zip(configurations, found, strict=True)]


def instance_of(success: float, seed: int) -> Any:
    """A policy that is right with probability `success`, the reference at a random mild distance from it."""
    policy = np.log([[success, *((1 - success) * np.array(WRONG))]])
    generator = np.random.default_rng([seed, round(1e6 * success)])
    return Instance.of(ENVIRONMENT, policy, policy + 0.5 * generator.standard_normal(policy.shape))


def _expected(name: str, instance: Any, size: int, **call: Any) -> np.ndarray:
    """The mean gradient over all groups of `size` rollouts."""
    return exact_batches(resolve(name, Call(**call)), instance, size=size, grouped=True).gradient


def _masking(one: Mapping[str, Any]) -> Row:
    """Share of the gradient that masking removes, and the share of groups that tie."""
    instance, size = instance_of(one["success"], one["seed"]), one["group_size"]
    truth, right = gradient("reverse_kl", instance), float(np.exp(instance.policy[0, 0]))
    lost = norm(truth - _expected("tied-groups-masked", instance, size)) / norm(truth)
    return {"ties": right**size + (1 - right) ** size, "lost": lost}


def _push(one: Mapping[str, Any]) -> Row:
    """The length of the expected step with and without normalisation if all rewards are 0, so that every group ties."""
    instance, beta = instance_of(0.5, one["seed"]), one["push"]
    instance = replace(instance, environment=replace(ENVIRONMENT, reward=np.zeros((1, 4))))
    # The moments of a loss that takes β are those of its KL part, the change with β over β.
    normalised, plain = _expected("group-std", instance, SIZE, beta=beta), _expected("group-mean", instance, SIZE)
    return {"normalised": beta * norm(normalised), "plain": beta * norm(plain)}


def _training(configurations: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Start at the reference, train, and see where it ended."""
    runs = []
    for one in configurations:
        reference = np.log([[one["success"], *((1 - one["success"]) * np.array(WRONG))]])
        # A penalty of weight β bounds the step that is stable.
        rate, whole = 2.0 / max(one["beta"], 1.0), one["estimator"] == "group-std"
        problem = Problem(ENVIRONMENT, reference, reference)
        runs.append(Run(problem, one["estimator"], beta=one["beta"], learning_rate=rate, seed=one["seed"], whole=whole))
    steps, size = configurations[0]["steps"], configurations[0]["batch_size"] or None
    history = train(runs, steps=steps, batch_size=size, group_size=SIZE, record=steps)
    measured = ("kl", "gap", "gradient_norm")
    right = np.exp(table(history.logits[:, 0]))[:, 0]
    return [
        {name: float(getattr(history, name)[-1, at]) for name in measured} | {"right": float(right[at])}
        for at in range(len(runs))
    ]
