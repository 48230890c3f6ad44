"""Numbers that a loss states in its signature or its object: how many rows a batch has."""

import numpy as np

from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.derived import Derived
from kltest.loss.global_state import preserved
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.rollout import Rollout

# By how much the reference of one row is moved: too little for an order by log-ratios to change.
MOVED = 1e-3


def with_rows_of_the_batch(loss: Loss, seed: int = 0) -> Loss:
    """Return the loss with the rows of each batch in place of the numbers N that say how many there are.

    One that cuts batches into parts of N rows keeps N, so that parts are tried: it takes a batch of one row, and of 2·N
    rows it makes what it makes of one part of so many, or fewer of them depend on each other.
    """
    for name, size in loss.arguments.batch_sizes.items():
        if not _cuts(loss, name, size, seed):
            note = f"{name} is the number of rows of each batch, in place of {size}"
            filled = loss.arguments.with_value(name, Derived(name.split(".")[-1]))
            loss = loss.changed(note, arguments=filled)
    return loss


def _cuts(loss: Loss, name: str, size: int, seed: int) -> bool:
    base = Rollout.of(instances("ragged", seed)[0], sampler="stale", padding=seed, centre="batch")
    batch = base.take(np.resize(np.arange(len(base)), 2 * size))
    reference = batch.peek("ref_logp").clone()
    reference[0] += MOVED
    doubled = loss.with_value(name, 2 * size)
    try:
        if not any(part.any() for part in _gradient(loss, batch.take([0])).parts):
            return False
        found = [
            [_gradient(one, some) for some in (batch, batch.replace(ref_logp=reference))] for one in (loss, doubled)
        ]
    except KltestError:
        return False
    (parts, _), (whole, _) = found
    if whole.close(whole.parts, parts.parts):
        return True
    in_parts, in_whole = (
        sum(not one.close(one.row(row), other.row(row)) for row in range(2 * size)) for one, other in found
    )
    return in_parts < in_whole


def _gradient(loss: Loss, batch: Rollout) -> RowGradients:
    with preserved(0):
        return differentiate(loss.for_experiments(), batch, live_positions(batch))
