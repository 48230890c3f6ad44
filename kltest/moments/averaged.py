"""A loss without its noise: each call is the mean over many draws of the random numbers that it makes.

Copies of a batch stand side by side in one call, each with groups of its own, so that every row meets other random
numbers in each copy and a mean, a sum, or a divisor that counts the tokens of the batch stays as it is. What else
couples rows, as a baseline of the others does, would couple copies as well: it is refused.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kltest.errors import TargetError
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.outcome import Outcome
from kltest.loss.state import NUMPY, PYTHON, TORCH, State
from kltest.moments.differentiate import leaf_gradients
from kltest.moments.stratified import Stratified
from kltest.rollout import Rollout

DTYPE = "averaged"
"""Stands for the precision of such a loss in `TOLERANCES`."""

# Noise that is left of a gradient, relative to it: what is aimed at, and the most with which anything is compared.
AIM, MOST = 0.015, 0.03
# So many times more copies, asked where something seems to be wrong, leave a quarter of the noise; if half of it is
# left, they share random numbers. There are several seeds, since a decision that all copies share may be the same for
# two.
MORE = 16
SEEDS = tuple(range(1, 9))
# Share of the copies with which a gradient is looked at first: twice the noise.
FEWER = 4
# Copies with which noise is measured first, and the most of them; numbers in one field of all calls, and of each call:
# memory of tens of megabytes is got from the system, page by page, every time.
FIRST, COPIES, NUMBERS, AT_ONCE = 64, 2**14, 2**25, 2**18
# Share of a copy's gradient by which other copies may move it, also in half the usual precision.
MOVED = 1e-3


def averaged(loss: Loss, batch: Rollout, *, adds_up: bool) -> tuple[Loss, list[Loss], Loss | None]:
    """Return the loss as it is on average over its random numbers; over more other ones, and more still; over fewer.

    The last is None if no fewer would do.

    Args:
        loss: The loss, which draws from the generators of torch, NumPy or Python.
        batch: A batch on which is tried how many copies that takes.
        adds_up: True if it sums over rows.

    Raises:
        TargetError: Copies in one call do not take the noise away, as if all of them share a random number, or they
            change each other.
    """
    if _copies_meet(loss, batch):
        raise TargetError(
            f"{loss.name} draws random numbers and couples the rows of a batch: copies of it in one call, over which "
            "the noise would be averaged, change each other. Switch the noise off"
        )
    first = _noise(loss, FIRST, batch, adds_up, SEEDS)
    more = _noise(loss, MORE * FIRST, batch, adds_up, SEEDS) if first > MOST else 0.0
    if more > MOST and more > first / MORE**0.5 * 2:
        raise TargetError(
            f"{loss.name} draws a random number that all rows of a batch share, or that is seldom very large: more "
            "rows do not average it. Switch the noise off, or draw a number for each row"
        )
    copies = int(np.clip(FIRST * (first / AIM) ** 2, FIRST, COPIES))
    noise = _noise(loss, copies, batch, adds_up, SEEDS[:2])
    if noise > MOST:
        raise TargetError(
            f"{loss.name} draws random numbers, and {100 * noise:.2g} % of noise is left in the mean gradient of "
            f"{copies} copies of a batch; at most {100 * MOST:g} % is compared. Switch the noise off"
        )
    larger = sorted({min(COPIES, MORE * copies), COPIES})
    further = [_average(loss, many, 3 + place, adds_up) for place, many in enumerate(larger)]
    rough = _average(loss, copies // FEWER, 8, adds_up) if copies >= FEWER * FIRST else None
    return _average(loss, copies, 0, adds_up), further, rough


def _copies_meet(loss: Loss, batch: Rollout) -> bool:
    """Return True if the gradient of some copies changes with the log-ratios of the others, at the same draws.

    Of several draws: a loss that compares random parts of a batch may choose the same one with others and without.
    """
    copies = side_by_side(batch, FIRST)
    found: list[list[dict[str, Tensor]]] = []
    kept = torch.arange(len(copies)) < len(copies) // 2
    for others in (copies, copies.near_reference()):
        changed = {
            name: torch.where(
                kept.reshape(-1, *[1] * (copies.peek(name).dim() - 1)), copies.peek(name), others.peek(name)
            )
            for name in ("ref_logp", "ref_logits", "ref_topk_logp")
            if name in copies
        }
        found.append([])
        for seed in SEEDS:
            with _drawing(loss, seed):
                gradients = _gradients(loss.for_experiments(), copies.replace(**changed))
            found[-1].append({name: gradient[kept] for name, gradient in gradients.items()})
    return any(
        float((gradient - other.get(name, 0.0)).norm()) > MOVED * float(gradient.norm())
        for one, other in zip(*found, strict=True)
        for name, gradient in one.items()
    )


@contextmanager
def _drawing(loss: Loss, seed: int) -> Iterator[None]:
    """Let random numbers begin at a seed, those of the loss's own generators too; all go on as before after it."""
    own = [place for place in loss.calls.generators if place not in (TORCH, PYTHON, NUMPY)]
    before = State(own)
    with loss.calls.holding(), preserved(seed):
        for number, place in enumerate(own, start=1):
            place.seed(seed + 1000 * number)  # type: ignore[misc]
        try:
            yield
        finally:
            before.reset()


def _noise(loss: Loss, copies: int, batch: Rollout, adds_up: bool, seeds: Sequence[int]) -> float:
    """Standard error of a mean gradient, relative to it, from several that were drawn apart."""
    drawn = [_gradients(_average(loss, copies, seed, adds_up), batch.replace()) for seed in seeds]
    names = sorted(set().union(*drawn))  # which leaves it reads may be a matter of chance
    parts = ([one.get(name, torch.zeros_like(batch.peek(name))).flatten() for name in names] for one in drawn)
    vectors = torch.stack([torch.cat(part) for part in parts])
    size = float(vectors.mean(dim=0).norm())
    return math.sqrt(float(vectors.var(dim=0).sum())) / size if size else math.inf


def _gradients(loss: Loss, batch: Rollout) -> dict[str, Tensor]:
    return leaf_gradients(loss, loss(batch).objective, batch)


def _average(loss: Loss, copies: int, seed: int, adds_up: bool) -> Loss:
    own = loss.for_experiments()

    def call(rollout: Rollout) -> Outcome:
        numbers = rollout.peek("mask").numel()
        if loss.takes & {"logits", "rollout"} or rollout.built("logits") is not None:
            numbers *= rollout.peek("ref_logits").shape[-1]
        many = max(FIRST, min(copies, NUMBERS // numbers))
        calls = -(-many * numbers // AT_ONCE)
        each = -(-many // calls)
        with _drawing(loss, seed):
            found = [_mean_of_copies(own, rollout, each, adds_up) for _ in range(calls)]
        objective = torch.stack([outcome.objective.detach() for outcome, _ in found]).mean()
        for name in sorted({name for _, gradients in found for name in gradients}):
            leaf = rollout.peek(name)
            # Its value is zero, its gradient the mean one.
            zeros = torch.zeros_like(leaf)
            towards = torch.stack([gradients.get(name, zeros) for _, gradients in found]).mean(dim=0)
            objective = objective + ((leaf - leaf.detach()) * towards).sum()
        reports = {}
        for name in ("value", "metric"):
            numbers_of = [getattr(outcome, name) for outcome, _ in found]
            reports[name] = None if numbers_of[0] is None else torch.stack(numbers_of).mean(dim=0)
        return replace(found[0][0], objective=objective, rows=None, returned="scalar", dtype=DTYPE, **reports)

    return loss.changed(instead=call)


def _mean_of_copies(loss: Loss, rollout: Rollout, copies: int, adds_up: bool) -> tuple[Outcome, dict[str, Tensor]]:
    """Call a loss with copies side by side; return the mean outcome and the mean gradient of each leaf."""
    tiled = side_by_side(rollout, copies)
    # What is computed again on the way back draws again.
    with Stratified(copies):
        outcome = loss(tiled)
        gradients = leaf_gradients(loss, outcome.objective, tiled)
    rollout.accessed |= tiled.accessed

    def mean(each: Tensor | None) -> Tensor | None:
        alike = each is not None and each.dim() and len(each) == copies * len(rollout)
        return each.reshape(copies, len(rollout), *each.shape[1:]).mean(dim=0) if alike and each is not None else each

    share = copies if adds_up and outcome.rows is None else 1
    towards = {
        name: gradient.reshape(copies, *rollout.peek(name).shape).sum(dim=0) / share
        for name, gradient in gradients.items()
    }
    objective = outcome.objective.detach() / share
    return replace(outcome, objective=objective, value=mean(outcome.value), metric=mean(outcome.metric)), towards


def side_by_side(rollout: Rollout, copies: int) -> Rollout:
    """Return one batch with each row as often as there are copies; the groups of each copy are its own."""
    tiled = rollout.take(np.tile(np.arange(len(rollout)), copies))
    if "group" not in rollout:
        return tiled
    group = rollout.peek("group")
    first = torch.arange(copies)[:, None] * (int(group.max()) + 1)
    return tiled.replace(group=(group + first).reshape(-1))
