"""Experiments on the tail of a loss's weights: how one rollout's gradient grows with a log-ratio, and what that costs.

The last token of one rollout is made unlikely under the policy, the reference or the sampler; everything else is left
alone. Where the gradient grows like a power of the log-ratio, the rollout counts for less and less in E‖ĝ‖², since it
is drawn less and less. With e^(r·|log-ratio|) and r > 1/2 it counts for more the rarer it is: then most of the second
moment is where nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Any

import numpy as np
from torch import Tensor

from kltest.counterexample.demonstration import Demonstration, SmallWorld
from kltest.environments import Instance
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.loss.outcome import Loss
from kltest.moments.differentiate import differentiate, live_positions
from kltest.moments.projection import each_gradient
from kltest.rollout import SAMPLER_FIELDS, Rollout

DISTANCES = (5.0, 10.0, 20.0)
# Between the two largest distances a power p of the log-ratio grows by 2^p, an exponential e^(r·u) by e^(10r): what
# grows faster than e^(u/4), 12-fold, is no power below the fourth.
EXPONENTIAL = 0.25
# As many rollouts as a usual group, so that losses that want groups take them.
BATCH = 4
RARE = 0.01


@dataclass(frozen=True)
class Direction:
    """A log-ratio driven to infinity: whose log-probs are lowered for it, and whether it is the one to the sampler."""

    words: str
    lowered: tuple[str, ...]
    off_policy: bool


# On-policy the sampler is lowered with the policy.
DIRECTIONS = (
    Direction("log π/ref → −∞", ("", "old_"), False),
    Direction("log π/ref → ∞", ("ref_",), False),
    Direction("log π/μ → ∞", ("old_",), True),
    Direction("log π/μ → −∞", ("", "ref_"), True),
)


@dataclass(frozen=True)
class Tail:
    """A direction in which the gradient of one rollout grows exponentially, over its size where it is mild.

    `parts` is by how much what it contributes to E‖ĝ‖², its probability times its square, grows at the same time.
    """

    direction: Direction
    growth: tuple[float, ...]
    parts: tuple[float, ...]
    rate: float


def tails(findings: Findings) -> list[Tail]:
    """Every direction in which a rollout's gradient grows exponentially, and faster than the rollout becomes rare."""
    uses = findings.observed.uses & SAMPLER_FIELDS and "stale" in findings.samplers
    rollout = Rollout.of(_instance(findings), padding=findings.seed).take(range(BATCH))
    mild = _size(findings.loss, rollout)
    found = []
    for direction in DIRECTIONS:
        if direction.off_policy and not uses:
            continue
        moved = [_lowered(rollout, direction, distance) for distance in DISTANCES]
        sizes = [_size(findings.loss, one) for one in moved]
        if mild <= 0 or min(sizes) <= 0 or not np.isfinite(sizes).all():
            continue
        rates = [log(b / a) / (y - x) for a, b, x, y in zip(sizes, sizes[1:], DISTANCES, DISTANCES[1:], strict=False)]
        growth = [size / mild for size in sizes]
        drawn = [exp(float((one.peek("old_logp") - rollout.peek("old_logp"))[0].sum())) for one in moved]
        parts = tuple(chance * factor**2 for chance, factor in zip(drawn, growth, strict=True))
        if min(rates) > EXPONENTIAL and parts[0] < parts[1] < parts[2]:
            found.append(Tail(direction, tuple(growth), parts, rates[-1]))
    return found


def _instance(findings: Findings) -> Instance:
    """The graded world with the most tokens that has no padding, else the first one."""
    drawn = [instances(environment, findings.seed)[0] for environment in findings.environments]
    whole = [instance for instance in drawn if not instance.paths.padded and len(instance.paths) >= BATCH]
    return max(whole or drawn[:1], key=lambda instance: instance.environment.horizon)


def _lowered(rollout: Rollout, direction: Direction, distance: float) -> Rollout:
    """The batch whose first rollout has a last token less likely by a factor e^distance under some of the policies."""
    token = int(rollout.peek("tokens")[0, -1])
    changed: dict[str, Tensor] = {}
    for prefix in direction.lowered:
        logits, logp = (rollout.peek(f"{prefix}{name}").detach().clone() for name in ("logits", "logp"))
        logits[0, -1, token] -= distance
        logits[0, -1] = logits[0, -1].log_softmax(-1)
        logp[0, -1] = logits[0, -1, token]
        changed |= {f"{prefix}logits": logits, f"{prefix}logp": logp}
    return rollout.replace(**changed)


def _size(loss: Loss, rollout: Rollout) -> float:
    """‖gradient‖ of the first rollout's part with respect to the logits of each of its tokens."""
    fresh = rollout.replace()
    called = differentiate(loss, fresh, live_positions(rollout))
    chances = rollout.peek("logits").detach().exp().numpy()[0]
    full = np.zeros(chances.shape) if called.logits is None else called.logits[0].copy()
    if called.logp is not None:
        full[np.arange(len(full)), rollout.peek("tokens").numpy()[0]] += called.logp[0]
    return float(np.linalg.norm(full - chances * full.sum(axis=-1, keepdims=True)))


def _each(loss: Loss, instance: Instance, sampler: str) -> np.ndarray:
    """(N, C, V) the gradient of every rollout, up to one factor, of a loss that treats rollouts apart."""
    rollout = Rollout.of(instance, sampler=sampler)
    called = differentiate(loss, rollout, live_positions(rollout))
    return each_gradient(instance.paths, instance.policy, called.logp, called.logits)


def _rare_share(squares: np.ndarray, weights: np.ndarray) -> float:
    """The share of E‖ĝ‖² in the hundredth of probability where ‖ĝ‖² is largest, the last rollout counted in part."""
    order = np.argsort(-squares, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    counted = np.clip(RARE - before, 0.0, weights[order])
    total = float(weights @ squares)
    return float(counted @ squares[order]) / total if total else 0.0


def demonstrate(
    world: SmallWorld, losses: Mapping[str, Callable[..., Any]], *, sampler: str = "current", **call: Any
) -> Demonstration:
    """E‖ĝ‖² of losses and the share of it that the rarest hundredth of draws carries."""
    from kltest.loss.calling import bind
    from kltest.loss.outcome import Call
    from kltest.moments import exact

    instance = world.instance()
    rows: list[tuple[str | float, ...]] = []
    for name, function in losses.items():
        loss = bind(function, Call(**call), name=name)
        squares = (_each(loss, instance, sampler) ** 2).sum(axis=(1, 2))
        share = _rare_share(squares, instance.rollout_weights(sampler))
        rows.append((name, exact(loss, instance, sampler).second_moment, share))
    return Demonstration(world.words(), ("gradient of one rollout", "E‖ĝ‖²", "share of the rarest 1%"), tuple(rows))
