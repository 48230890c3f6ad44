"""Numbers that a loss states in its signature or its object: how many rows a batch has."""

import numpy as np

from kltest.errors import KltestError
from kltest.identify.instances import instances
from kltest.loss.calling import Loss
from kltest.loss.derived import Derived
from kltest.loss.global_state import preserved
from kltest.moments.differentiate import RowGradients, differentiate, live_positions
from kltest.rollout import Rollout


def with_rows_of_the_batch(loss: Loss, seed: int = 0) -> Loss:
    """Return the loss with the rows of each batch in place of the numbers N that say how many there are.

    One that only cuts batches into parts of N rows keeps N, so that parts are tried: it takes a batch of one row, and
    for it two parts are one of 2·N rows.
    """
    for name, size in loss.arguments.batch_sizes.items():
        if not _only_cuts(loss, name, size, seed):
            note = f"{name} is the number of rows of each batch, in place of {size}"
            filled = loss.arguments.with_value(name, Derived(name.split(".")[-1]))
            loss = loss.changed(note, arguments=filled)
    return loss


def _only_cuts(loss: Loss, name: str, size: int, seed: int) -> bool:
    base = Rollout.of(instances("ragged", seed)[0], sampler="stale", padding=seed, centre="batch")
    doubled = loss.with_value(name, 2 * size)
    try:
        alone = _gradient(loss, base, 1)
        parts, whole = (_gradient(one, base, 2 * size) for one in (loss, doubled))
    except KltestError:
        return False
    return any(part.any() for part in alone.parts) and whole.close(whole.parts, parts.parts)


def _gradient(loss: Loss, base: Rollout, rows: int) -> RowGradients:
    batch = base.take(np.resize(np.arange(len(base)), rows))
    with preserved(0):
        return differentiate(loss.for_experiments(), batch, live_positions(batch))
