"""KL507: the same batch gives different values or gradients."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import torch
from torch import Tensor

from kltest.checks.batches import usual_batch
from kltest.checks.check import Found
from kltest.checks.demonstrations import Demonstration, Losses, of_calls
from kltest.errors import KltestError
from kltest.identify.findings import Findings, shared
from kltest.loss.chances import Chances
from kltest.loss.global_state import preserved
from kltest.loss.state import State
from kltest.moments.differentiate import CallResult, LossExperiment
from kltest.moments.tolerances import TOLERANCES

# Calls of one batch; a coefficient that is adapted every tenth call or so shows as well.
CALLS = 16
# The same if random numbers are drawn, or state is kept, that changed nothing in those.
MANY = 1000
STEP = count()
FARTHER_OUT = (
    "It draws random numbers that change nothing in the batches whose expected gradient was measured, and something "
    "beyond: there its mean over many draws was compared"
)
Same = Callable[[Tensor, Tensor], bool]


def not_comparable(findings: Findings) -> str | None:
    """Return why calls cannot be compared: no gradient reaches the policy, or one batch gives different results."""
    if findings.observed.blocked:
        return "no gradient reaches the policy at all (KL509)"
    with suppress(KltestError):
        if examine(findings) and findings.observed.unrepeatable:
            return "calls cannot be compared with one another, since they do not repeat (KL507)"
    return None


def examine(findings: Findings) -> Found | None:
    """Call one batch again and again, unless measuring has seen a difference; random numbers go on.

    Those that another check found to act farther out, where they are averaged, are a warning.
    """
    found = _repeated(findings)
    if findings.observed.averaged_far and not (found and found.status == "fail"):
        return _never_seen(findings) or Found(f"{FARTHER_OUT}.", level="warning")
    return found


@shared
def _repeated(findings: Findings) -> Found | None:
    observed, calls = findings.observed, findings.loss.calls
    if observed.nondeterministic:
        if observed.unrepeatable:
            return Found(f"{observed.nondeterministic}.", level="error")
        if observed.draws and (rare := _never_seen(findings)):
            return rare
        same = ", and follows the same expected gradient after other calls" if observed.keeps_state else ""
        sampled = " Its expected gradient was judged by sampling." if observed.draws else ""
        return Found(f"{observed.nondeterministic}{same}.{sampled}", level="warning")
    with preserved():
        draws = calls.draws()
        made, words = CALLS, _changes(findings)
        if not words and (draws.changed() or calls.state.changed()):
            made, words = MANY, _changes(findings, calls=MANY)
        if not words:
            return _rare(findings, draws)
        with calls.holding(draws):
            observed.draws = bool(draws.changed()) and not _changes(findings)
        if not observed.draws:
            kept = calls.state.changed()
            if not kept and not _changes(findings, of_value=False, calls=MANY):
                observed.value_moves = True
                return Found(f"{words} No gradient changed in {MANY} calls.", level="warning")
            observed.unrepeatable = True
            return Found(words + (f" It keeps state in {' and '.join(kept[:3])}." if kept else ""))
        random = bool(_changes(findings, of_value=False, calls=made))
    calls.held = (*calls.held, draws)
    if rare := _never_seen(findings):
        return rare
    words += " It draws random numbers"
    if random:
        observed.nondeterministic = words
        return Found(f"{words}, and none in the batches whose expected gradient was measured.", "inconclusive")
    return Found(f"{words}, which change no gradient.", level="warning")


def _rare(findings: Findings, draws: State) -> Found | None:
    """Say that random numbers are drawn that changed nothing: what they do rarely is not known.

    Those that change what the loss returns, and cancel in its KL part, are no matter of it.
    """
    if not draws.changed() or _cancels(findings):
        return None
    why = f"it draws random numbers, which changed nothing in {MANY} calls: what they do more rarely was not seen"
    return Found(why, "inconclusive", level="error")


@shared
def _never_seen(findings: Findings) -> Found | None:
    """Say that a comparison of a random number came out one way in many calls, if the gradient differs on the other.

    What so rare a number does is in no mean over draws.
    """
    loss, batch, chances = findings.loss.for_experiments(), usual_batch(findings), Chances()
    watched = LossExperiment(loss.within(partial(chances.watched, loss.function)))
    with preserved(), suppress(KltestError):
        held = loss.calls.draws()
        with loss.calls.holding():
            for _ in range(MANY):
                usual = watched.call(batch.replace())
                if not chances.one_sided:
                    return None
        allowed = TOLERANCES[usual.outcome.dtype].groups
        for site in chances.one_sided:
            found = []
            for chances.turned in (None, site):
                with loss.calls.holding(held):
                    found.append(watched.call(batch.replace()))
            if difference(found[0], found[1], partial(_near, allowed), of_value=False):
                why = (
                    f"a comparison of a random number in {site[0].co_name} came out one way in {MANY} calls: where it "
                    "comes out the other way the gradient is another one, and how often that is was not seen"
                )
                return Found(why, "inconclusive", level="error")
    return None


def _cancels(findings: Findings) -> bool:
    """Return True if what is returned differs from call to call, though its KL part does not."""
    loss, batch = findings.loss.for_experiments(), usual_batch(findings)
    first = loss.returned(batch.replace()).loss
    return any(not torch.equal(first, loss.returned(batch.replace()).loss) for _ in range(CALLS))


def _changes(findings: Findings, *, of_value: bool = True, calls: int = CALLS) -> str:
    """Describe the first call of one batch that differs from the first one, empty if none does."""
    experiment, batch = findings.measure.experiment(), usual_batch(findings)
    first = experiment.call(batch.replace())
    allowed = TOLERANCES[first.outcome.dtype].repeated

    for call in range(2, calls + 1):
        if words := difference(first, experiment.call(batch.replace()), partial(_near, allowed), of_value=of_value):
            return f"The same batch of {len(batch)} rollouts is called again, and in call {call} {words}."
    return ""


def _near(allowed: float, one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= allowed * one.abs().max())


def difference(before: CallResult, after: CallResult, same: Same, *, of_value: bool = True) -> str:
    """Describe how the value, or a gradient at live tokens, differs in a second call; empty if all is the same."""
    earlier, later = before.at(before.live), after.at(before.live)
    pairs = {"the value": (before.value, after.value)} if of_value else {}
    for name, some in {**earlier, **later}.items():
        zeros = torch.zeros_like(some)
        pairs[f"the gradient at a live token ({name})"] = earlier.get(name, zeros), later.get(name, zeros)
    for what, (one, other) in pairs.items():
        if one.shape != other.shape:
            return f"{what} has shape {tuple(other.shape)} where it had {tuple(one.shape)}"
        if not same(one, other):
            numbers = (float(part.flatten()[(other - one).abs().argmax()]) for part in (other, one))
            return f"{what} is {{:.6g}} where it was {{:.6g}}".format(*numbers)
    return ""


def every_other_step(logp, ref_logp, mask, step=STEP):
    log_ratio = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)
    weight = 2.0 if next(step) % 2 == 0 else 0.0
    return weight * log_ratio.square() / 2


def demonstrate(losses: Losses) -> Demonstration:
    """Gradient of each loss in two calls on one batch."""
    fresh: Losses = {**losses, "as written": partial(every_other_step, step=count())}
    call = {"p": (0.8,), "ref": (0.5,), "gradient": 0}
    rows = [{"name": f"gradient, {which} call", **call} for which in ("first", "second")]
    return of_calls(fresh, "one token, π = 0.8, ref = 0.5, the same batch twice", rows)
