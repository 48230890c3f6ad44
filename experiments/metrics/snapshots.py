"""Metrics logged of one policy: multiplied by a ratio or an advantage, masked with its group, averaged over padding."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kltest.environments import Instance, bandit, ragged
from kltest.estimators import find
from kltest.estimators.groups import group_sum
from kltest.loss.calling import bind
from kltest.moments import exact_batches
from kltest.rollout import Rollout
from kltest.truth import value

from .settings import ENVIRONMENT, GARBAGE, REFERENCE

Row = dict[str, Any]


def reweighted(one: Mapping[str, Any]) -> list[Row]:
    """Expectations under an older sampler of Σu times what trainers multiply it by, and what they are."""
    environment = ragged(ENVIRONMENT["vocabulary"], ENVIRONMENT["length"])
    generator = np.random.default_rng([one["seed"], 5])
    environment = replace(environment, reward=generator.standard_normal(environment.reward.shape))
    instance = Instance.draw(environment, one["seed"], staleness=one["staleness"])
    batch, chances = Rollout.of(instance, sampler="stale"), instance.rollout_weights("stale")
    live = batch.mask != 0
    u, log_ratio = ((batch.logp - other).where(live, 0.0).detach() for other in (batch.ref_logp, batch.old_logp))
    k3 = find("k3-loss").function(batch.logp, batch.ref_logp).where(live, 0.0).detach()
    token = log_ratio.exp().where(live, 0.0)
    prefix = log_ratio.cumsum(dim=1).exp()
    sequence = log_ratio.sum(dim=1, keepdim=True).exp()
    geometric = (log_ratio.sum(dim=1, keepdim=True) / live.sum(dim=1, keepdim=True)).exp()

    def expected(terms: Any) -> float:
        return float(chances @ terms.sum(dim=1).numpy())

    sums, reward = u.sum(dim=1).numpy(), batch.reward.numpy()
    advantage = reward - chances @ reward
    return [
        {
            "kl": value("kl", instance),
            "local@sampler": value("local_reverse_kl@sampler", instance),
            "no ratio": expected(u),
            "token ratio": expected(token * u),
            "token ratio, k3": expected(token * k3),
            "prefix ratio": expected(prefix * u),
            "sequence ratio": expected(sequence * u),
            "geometric ratio": expected(geometric * u),
            "geometric ratio, k3": expected(geometric * k3),
            "advantage": float(chances @ (advantage * sums)),
            "covariance": float(chances @ (reward * sums) - (chances @ reward) * (chances @ sums)),
            "advantage of −R": float(chances @ (-advantage * sums)),
        }
    ]


def masked_kl(logp, ref_logp, mask, reward, group):  # type: ignore[no-untyped-def]
    """Σu, zero where all rewards of the group are the same; logged as it stands. (B, T) → (B,)."""
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(dim=1)
    mean = group_sum(reward, group) / group_sum(reward.new_ones(len(reward)), group)
    differs = group_sum(((reward - mean).abs() > 1e-9).to(log_ratio.dtype), group) > 0
    masked = log_ratio.where(differs, 0.0)
    return masked.square() / 2, {"kl": masked.detach()}


def masked(one: Mapping[str, Any]) -> list[Row]:
    """Groups of n: what a metric reads that is masked where the group's rewards tie, over all groups.

    In closed form Σ_v π_v·u_v·(1 − P(the other n − 1 earn what v earns)).
    """
    right, size = one["success"], one["group_size"]
    drawn = np.random.default_rng([one["seed"], 7]).dirichlet(np.ones(len(REFERENCE)))
    reference = drawn if one["seed"] else np.array(REFERENCE)
    wrong = reference[1:]
    policy = np.log([[right, *((1 - right) * wrong / wrong.sum())]])
    environment = bandit(4, reward=np.array([[1.0, 0.0, 0.0, 0.0]]))
    instance = Instance.of(environment, policy, np.log([reference]))
    found = exact_batches(bind(masked_kl), instance, size=size, grouped=True).metric
    assert found is not None
    chances, u = np.exp(instance.policy[0]), (instance.policy - instance.reference)[0]
    others = np.array([right, *[1 - right] * 3]) ** (size - 1)
    closed = float(chances @ (u * (1 - others)))
    return [
        {
            "kl": value("kl", instance),
            "read": found.mean,
            "reference_success": float(reference[0]),
            "closed_form_error": abs(found.mean - closed),
        }
    ]


def padding(one: Mapping[str, Any]) -> list[Row]:
    """One policy, its rollouts padded to a length: the mean over all positions, zeros or not, and over live ones."""
    instance = Instance.draw(ragged(ENVIRONMENT["vocabulary"], ENVIRONMENT["length"]), one["seed"])
    batch, chances = Rollout.of(instance), instance.rollout_weights("current")
    length = max(one["padded_length"], ENVIRONMENT["length"])
    u = torch.zeros((len(chances), length), dtype=torch.float64)
    u[:, : ENVIRONMENT["length"]] = (batch.logp - batch.ref_logp).detach()
    live = torch.zeros_like(u, dtype=torch.bool)
    live[:, : ENVIRONMENT["length"]] = batch.mask != 0
    filled = {"zeros": u.where(live, 0.0), "garbage": u.where(live, GARBAGE)}
    return [
        {
            "kl": value("kl", instance),
            "kl_per_token": value("kl_per_token", instance),
            "length": value("expected_length", instance),
            **{f"mean over {name}": float(chances @ terms.mean(dim=1).numpy()) for name, terms in filled.items()},
        }
    ]
