"""Metrics logged step by step: corrupted in place, read by a controller, estimated by k1, k2 and k3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kltest.environments import Instance, bandit, ragged
from kltest.environments.policies import softmax_gradient
from kltest.estimators import find
from kltest.rollout import Rollout
from kltest.sweeps.store import digest
from kltest.training import Problem
from kltest.truth import gradient, optimum, value

from .settings import CONTROLLER, ENVIRONMENT, LOOKS, TRAINING

Row = dict[str, Any]


def problem_of(seed: int) -> Any:
    """A random reference from which training starts, and a reward of 1 or 0 for every token."""
    return Problem.draw(ragged(ENVIRONMENT["vocabulary"], ENVIRONMENT["length"]), seed, distance=0.0, reward="binary")


def token_rewards(logp, ref_logp, mask, reward, beta, copied):  # type: ignore[no-untyped-def]
    """−β·k1 at every token and the reward at the last, made in place from what is logged, or from a copy of it.

    (B, T) → (B, T) and the metrics, as a trainer with the KL in the reward makes them. In place is slime before #2114.
    """
    kl = (logp - ref_logp).where(mask != 0, 0.0).detach()
    metrics = {"kl": kl}
    shaped = kl.clone() if copied else kl
    shaped *= -beta
    rows = torch.arange(len(reward))
    shaped[rows, (mask != 0).sum(dim=1) - 1] += reward
    return shaped, metrics


def mutation(one: Mapping[str, Any]) -> list[Row]:
    """Exact training, and at each step what was recorded as the KL and what is read from it after the loss."""
    problem = problem_of(one["seed"])
    environment, logits = problem.environment, np.array(problem.start)
    rows = []
    for step in range(TRAINING["steps"] + 1):
        instance = Instance.of(environment, logits, problem.reference)
        paths, chances = instance.paths, instance.rollout_weights("current")
        batch = Rollout.of(instance)
        recorded = (batch.logp - batch.ref_logp).where(batch.mask != 0, 0.0).detach()
        shaped, metrics = token_rewards(
            batch.logp, batch.ref_logp, batch.mask, batch.reward, one["beta"], one["copied"]
        )
        read, kept = metrics["kl"].numpy(), recorded.numpy()
        kl, reward = value("kl", instance), value("expected_reward", instance)
        rows.append(
            {
                "step": step,
                "kl": kl,
                "objective": reward - one["beta"] * kl,
                "reward": reward,
                "recorded": float(chances @ kept.sum(axis=1)),
                "read": float(chances @ read.sum(axis=1)),
                "identical": bool(torch.equal(metrics["kl"], recorded)),
                "policy": digest(logits.tolist()),
            }
        )
        to_go = shaped.flip(1).cumsum(dim=1).flip(1).numpy()
        table = np.zeros_like(logits)
        paths.collect(np.where(paths.mask, chances[:, None] * to_go, 0.0), table)
        logits = logits + TRAINING["learning_rate"] * softmax_gradient(table, instance.policy)
    return rows


def controller(one: Mapping[str, Any]) -> list[Row]:
    """A β that is adapted until a metric meets its target, where every round trains to π* of the β at hand."""
    generator = np.random.default_rng(11 + one["seed"])
    reward = (generator.random((1, 8)) < 0.5).astype(float)
    reference = generator.standard_normal((1, 8))
    environment = bandit(8)
    environment = replace(environment, reward=reward + one["offset"])
    largest = float(np.logaddexp.reduce(reference[0]) - np.logaddexp.reduce(reference[0][reward[0] == reward.max()]))
    beta, rows = CONTROLLER["start"], []
    for round_ in range(CONTROLLER["rounds"] + 1):
        instance = Instance.of(environment, optimum(environment, reference, beta).policy, reference)
        kl = value("kl", instance)
        read = {
            "kl": kl,
            "mutated": value("expected_reward", instance) - beta * kl,
            "k2": value("squared_log_ratio_sum", instance),
            "scaled": beta * kl,
        }[one["read"]]
        if round_ % CONTROLLER["every"] == 0:
            rows.append({"round": round_, "controller_beta": beta, "kl": kl, "metric": read, "largest_kl": largest})
        off = float(np.clip(read / CONTROLLER["target"] - 1, -CONTROLLER["clip"], CONTROLLER["clip"]))
        beta *= 1 + CONTROLLER["gain"] * off
    return rows


def logged(one: Mapping[str, Any]) -> list[Row]:
    """Exact mean and standard deviation of what k1, k2 and k3 log for one rollout, along an exact run."""
    problem = problem_of(one["seed"])
    logits, rows = np.array(problem.start), []
    for step in range(max(LOOKS) + 1):
        instance = Instance.of(problem.environment, logits, problem.reference)
        if step in LOOKS:
            batch, chances, lengths = Rollout.of(instance), instance.rollout_weights("current"), instance.paths.lengths
            truth = {name: value(name, instance) for name in ("kl", "kl_per_token", "mean_of_token_means")}
            u = (batch.logp - batch.ref_logp).where(batch.mask != 0, 0.0).detach()
            correction = ((-u).exp() - 1).where(batch.mask != 0, 0.0).sum(dim=1).numpy() / lengths
            for name in ("k1-loss", "k2-loss", "k3-loss"):
                tokens = find(name).function(batch.logp, batch.ref_logp).where(batch.mask != 0, 0.0).detach()
                sums = tokens.numpy().sum(axis=1)
                mean = float(chances @ sums)
                rows.append(
                    {
                        "step": step,
                        "estimator": name,
                        **truth,
                        "length": float(chances @ lengths),
                        "mean": mean,
                        "std": float(np.sqrt(chances @ (sums - mean) ** 2)),
                        "over_own_length": float(chances @ (sums / lengths)),
                        "correction": float(chances @ correction),
                    }
                )
        step_up = gradient("expected_reward", instance) - one["beta"] * gradient("reverse_kl", instance)
        logits = logits + TRAINING["learning_rate"] * step_up
    return rows
