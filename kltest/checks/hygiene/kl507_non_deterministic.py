"""KL507: the same batch gives different values or gradients."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import count
from math import log

from torch import Tensor

from kltest.checks.check import Found
from kltest.checks.demonstrations import gradient, of_calls, rollout
from kltest.checks.losses import squared_sum
from kltest.checks.usual_batch import usual_batch
from kltest.counterexample.demonstration import Demonstration
from kltest.errors import KltestError
from kltest.identify.findings import Findings
from kltest.loss.global_state import preserved
from kltest.moments.differentiate import CallResult
from kltest.moments.tolerances import TOLERANCES

# Calls of one batch; a coefficient that is adapted every tenth call or so shows as well.
CALLS = 16
STEP = count()


def examine(findings: Findings) -> Found | None:
    return findings.once(_differs)


def not_comparable(findings: Findings) -> str | None:
    """Return why calls cannot be compared: no gradient reaches the policy, or one batch gives different results."""
    if findings.blocked:
        return "no gradient reaches the policy at all (KL509)"
    with suppress(KltestError):
        if findings.once(_differs):
            return "calls cannot be compared with one another, since they do not repeat (KL507)"
    return None


def _differs(findings: Findings) -> Found | None:
    """Call one batch again and again; the random state goes on from call to call."""
    experiment = findings.measure.experiment()
    batch = usual_batch(findings)
    with preserved():
        first = experiment.call(batch.replace())
        for call in range(2, CALLS + 1):
            if words := _difference(first, experiment.call(batch.replace())):
                return Found(f"The same batch of {len(batch)} rollouts gives {words} in call {call}.")
    if noticed := findings.observed.nondeterministic:
        return Found(f"{noticed}.")
    return None


def _difference(first: CallResult, again: CallResult) -> str | None:
    dtype = first.outcome.dtype
    one, other = (float(result.value.sum()) for result in (first, again))
    if not _same(first.value, again.value, dtype):
        return f"values that sum to {one:.6g} in the first call and to {other:.6g}"
    if first.gradients.keys() != again.gradients.keys():
        return "a gradient with respect to other inputs"
    for name, before in first.gradients.items():
        found = again.gradients[name]
        if not _same(before, found, dtype):
            place = int((before - found).abs().argmax())
            one, other = (float(part.flatten()[place]) for part in (before, found))
            return f"the gradient {one:.6g} at an entry of {name} in the first call and {other:.6g}"
    return None


def _same(one: Tensor, other: Tensor, dtype: str) -> bool:
    if one.shape != other.shape:
        return False
    scale = float(one.abs().max())
    return bool((one - other).abs().max() <= TOLERANCES[dtype].repeated * scale)


def every_other_step(logp, ref_logp, mask, step=STEP):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    weight = 2.0 if next(step) % 2 == 0 else 0.0
    return weight * log_ratio.square() / 2


def demonstrate() -> Demonstration:
    batch = rollout((log(0.8),), (log(0.5),))
    return of_calls(
        "one token, π = 0.8, ref = 0.5, the same batch twice",
        {"as written": partial(every_other_step, step=count()), "fixed": squared_sum},
        {"gradient, first call": (batch, gradient(0)), "gradient, second call": (batch, gradient(0))},
    )
