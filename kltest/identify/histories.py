"""Losses that keep state between calls: graded with the state that some calls leave, and again after other calls.

A loss with a baseline of earlier batches follows the same expected gradient whatever its state is: it can be graded in
any. If other calls leave another expected gradient, as with a scale taken from the first batch, it follows none.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from numpy.linalg import norm

from kltest.errors import KltestError
from kltest.identify.case import Case
from kltest.identify.rows import Observed, Row
from kltest.loss.calling import Loss
from kltest.loss.global_state import preserved
from kltest.loss.outcome import Calls
from kltest.loss.state import State
from kltest.moments import NonDeterministicError
from kltest.moments.differentiate import at_leaves
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout

# Rows of the calls before: what is kept may depend on the order of shapes, on the first batch, or on their number.
FEW = (1, 2, 3, 4, 5, 6, 7, 8, 12)
# So many that a schedule has ended, and a warm-up.
MORE = (12, *range(10, 0, -1), *FEW, *[3] * 1000)
# Calls after these, one by one: a loss may do otherwise in each third or fourth of them.
PHASES = 9
# Environments are mild, gradients of size one.
ROUNDING = 1e-12


def rows_after(
    calls: Calls, observed: Observed, measure: Callable[[], list[Row]], histories: Callable[[], list[State]]
) -> list[Row]:
    """Measure rows; after each of some histories, if the loss keeps state.

    Experiments that follow are made with the state after the last, and with the same random numbers in each call.

    Raises:
        NonDeterministicError: The loss does not repeat itself, or the histories leave different gradients.
    """
    held = [(state,) for state in histories()] if observed.keeps_state else [()]
    found = []
    try:
        for kept in held:
            with calls.holding(*kept):
                found.append(measure())
        if observed.keeps_state and not alike(found, observed.dtype):
            raise NonDeterministicError("the loss", "state", calls.state.changed())
    except NonDeterministicError as error:
        observed.nondeterministic = str(error)
        if error.why == "state" and not observed.keeps_state:
            observed.keeps_state = True
            return rows_after(calls, observed, measure, histories)
        observed.unrepeatable = True
        raise
    calls.held = (*held[-1], *[calls.draws()] * observed.draws)
    return found[-1]


def histories(loss: Loss, case: Case) -> list[State]:
    """Return the state that a few calls leave behind, and that of more calls with other rollouts in another order.

    Before it comes one a few calls later, if the gradient of a batch is another one there: that which differs most.
    """
    rollouts = Rollout.of(case.instances[0], sampler=case.sampler, padding=case.seed)
    calls, found = loss.calls, []
    # What is kept may be used by calls of its own shape alone: all rollouts, then as many as are graded in one call.
    for sizes, start in (((*FEW, len(rollouts)), 0), ((*MORE, len(rollouts), case.group or 1), len(rollouts) // 2)):
        calls.state.reset()
        with calls.holding():
            for rows in sizes:
                with suppress(KltestError):  # it may take some sizes only
                    loss(rollouts.take([(start + row) % len(rollouts) for row in range(rows)]))
        found.append(calls.kept())
    return [found[0], *_other_phase(loss, rollouts, found[1]), found[1]]


def _other_phase(loss: Loss, rollouts: Rollout, state: State) -> list[State]:
    after = []
    state.reset()
    for _ in range(PHASES):
        now, batch = loss.calls.kept(), rollouts.replace()
        with suppress(KltestError), loss.calls.holding(), preserved(0):
            gradients = at_leaves(loss, loss(batch).objective, batch)
            after.append((now, torch.cat([one.flatten() for one in gradients])))
    state.reset()
    if not after:
        return []
    first = after[0][1]
    other, gradient = max(after, key=lambda one: float((one[1] - first).norm()))
    return [other] if float((gradient - first).norm()) > ROUNDING else []


def alike(measured: Sequence[Sequence[Row]], dtype: str) -> bool:
    """Return True if rows that were measured after all histories have the same gradients; `dtype` is the loss's."""
    kinds = [[(row.batch, row.method, row.method == "exact" or row.agrees) for row in part] for part in measured]
    if any(kind != kinds[0] for kind in kinds) or any(decided is None for *_, decided in kinds[0]):
        return False
    return all(
        float(norm(one - other)) <= max(TOLERANCES[dtype].gradient * float(norm(one)), ROUNDING)
        for others in measured[1:]
        for pair in zip(measured[0], others, strict=True)
        for one, other in zip(*(row.gradients for row in pair), strict=True)
    )
