"""Metrics logged step by step: changed in place, read by a controller of β, estimated by k1, k2 and k3."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch

from kltest.environments import Instance, bandit, ragged
from kltest.estimators import find
from kltest.reproduce.frames import Row
from kltest.rollout import Rollout
from kltest.sweeps.settings import Setting, Settings
from kltest.training import Problem
from kltest.truth import optimum, value

from ..paths import ascents

PARTS: dict[str, Mapping[str, str]] = {
    "mutation": {"beta": "beta", "seed": "seed"},
    "controller": {"read": "read", "offset": "offset", "seed": "draw"},
    "logged": {"beta": "beta", "seed": "seed"},
}
SETTINGS = Settings(
    title="Metrics: what is logged as the KL",
    tags=("exact", "metric", "training", "ragged"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        "beta": Setting((0.1, 0.5), full=(0.03, 0.1, 0.3, 0.5, 1.0), allowed=(0.01, 10.0)),
        # The reading that an adaptive controller of β goes by, and the number added to every reward.
        "read": ("kl", "mutated", "k2"),
        "offset": Setting((-1.0, 1.0), full=(-2.0, -1.0, 1.0, 2.0), allowed=(-10.0, 10.0)),
        # Rewards and references of the controller's bandit.
        "draw": Setting(0, full=tuple(range(10)), allowed=(0, 1000)),
    },
    seeds={"quick": 2, "full": 20},
)

STEPS = 60  # updates with exact gradients, from the reference, at a learning rate of 1
# Updates of a longer run after which every estimator's mean and standard deviation are taken.
LOOKS = (1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 90, 135, 200)
# Ziegler et al. 2019, §2.2: β ← β·(1 + gain·clip(KL/target − 1, ±clip)). Here the policy is π* of β in each round.
CONTROLLER = {"target": 0.2, "clip": 0.2, "gain": 0.1, "start": 0.5, "rounds": 400, "every": 10}


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """Return the rows of one part with its settings."""
    part = {"mutation": _mutation, "controller": _controller, "logged": _logged}[configuration["part"]]
    return [{**configuration, **row} for row in part(configuration)]


def problem_of(seed: int) -> Any:
    """A reference from which training starts, rollouts of up to four tokens, a reward of 1 or 0 for every token."""
    return Problem.draw(ragged(3, 4), seed, distance=0.0, reward="binary")


def token_rewards(logged: torch.Tensor, lengths: torch.Tensor, reward: torch.Tensor, beta: float) -> torch.Tensor:
    """(B, T) −β·k1 at every token and the reward at the last, in place of what is logged (slime before #2114)."""
    logged *= -beta
    logged[torch.arange(len(reward)), lengths - 1] += reward
    return logged


def _run(one: Mapping[str, Any], steps: int) -> list[Instance]:
    """The policies of plain ascent on E[R] − β·KL with exact gradients, the start first."""
    problem = problem_of(one["seed"])
    logits = ascents([problem], steps, beta=one["beta"], learning_rate=1.0)[:, 0]
    return [Instance.of(problem.environment, each, problem.reference) for each in logits]


def _mutation(one: Mapping[str, Any]) -> Iterator[Row]:
    """At each step what was recorded as the KL, and what is read from it after the loss."""
    for step, instance in enumerate(_run(one, STEPS)):
        chances, batch = instance.rollout_weights("current"), Rollout.of(instance)
        logged = (batch.logp - batch.ref_logp).where(batch.mask != 0, 0.0).detach()
        recorded = float(chances @ logged.numpy().sum(axis=1))
        token_rewards(logged, torch.from_numpy(instance.paths.lengths), batch.reward, one["beta"])
        kl, reward = value("kl", instance), value("expected_reward", instance)
        found = {"recorded": recorded, "read": float(chances @ logged.numpy().sum(axis=1))}
        yield {"step": step, "kl": kl, "objective": reward - one["beta"] * kl, **found}


def _controller(one: Mapping[str, Any]) -> Iterator[Row]:
    """A β that is adapted until a metric meets its target, where every round trains to π* of the β at hand."""
    generator = np.random.default_rng(11 + one["seed"])
    reward = (generator.random((1, 8)) < 0.5).astype(float)
    reference = generator.standard_normal((1, 8))
    environment = replace(bandit(8), reward=reward + one["offset"])
    largest = float(np.logaddexp.reduce(reference[0]) - np.logaddexp.reduce(reference[0][reward[0] == reward.max()]))
    beta = CONTROLLER["start"]
    for round_ in range(int(CONTROLLER["rounds"]) + 1):
        instance = Instance.of(environment, optimum(environment, reference, beta).policy, reference)
        kl = value("kl", instance)
        read = {
            "kl": kl,
            "mutated": value("expected_reward", instance) - beta * kl,
            "k2": value("squared_log_ratio_sum", instance),
        }[one["read"]]
        if round_ % CONTROLLER["every"] == 0:
            yield {"round": round_, "controller_beta": beta, "kl": kl, "metric": read, "largest_kl": largest}
        off = float(np.clip(read / CONTROLLER["target"] - 1, -CONTROLLER["clip"], CONTROLLER["clip"]))
        beta *= 1 + CONTROLLER["gain"] * off


def _logged(one: Mapping[str, Any]) -> Iterator[Row]:
    """Exact mean and standard deviation of what k1, k2 and k3 log for one rollout, along a run."""
    run = _run(one, max(LOOKS))
    for step, name in product(LOOKS, ("k1-loss", "k2-loss", "k3-loss")):
        instance = run[step]
        batch, chances, lengths = Rollout.of(instance), instance.rollout_weights("current"), instance.paths.lengths
        tokens = find(name).function(batch.logp, batch.ref_logp).where(batch.mask != 0, 0.0)
        sums = tokens.detach().numpy().sum(axis=1)
        mean = float(chances @ sums)
        found = {which: value(which, instance) for which in ("kl", "kl_per_token")}
        found |= {"mean": mean, "std": float(np.sqrt(chances @ (sums - mean) ** 2))}
        yield {"step": step, "estimator": name, **found, "over_own_length": float(chances @ (sums / lengths))}
