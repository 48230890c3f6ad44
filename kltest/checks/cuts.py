"""Numbers of a loss beyond what is tried: a longest rollout, a chunk, a floor, a crop of the vocabulary, a token's id.

Code behind a comparison with such a number runs in no environment, batch or rollout here. So the number is made small,
or the id that of the token that ends a rollout. It stands in the signature, in an object, or in the code, where only
numbers are meant that are compared with a size. What then changes is a fact about the loss, not about its gradient as
it is used: a warning, or of a generous limit in the code a note. But a step of training takes all its values in use:
another gradient at a later one is an error, unless it is a multiple, as of a coefficient with a schedule, or none. So
do vocabularies: a number in the code below the size of one, or of its logits, is an error, and so are ids kept in
sixteen bits.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import numpy as np
import torch

from kltest.checks.batches import (
    ANOTHER,
    as_array,
    evenly,
    gradient_of,
    limit,
    lost_tokens,
    nearest_multiple,
    norm,
    of_instance,
)
from kltest.checks.check import Found
from kltest.checks.stress import farther, right_in_long_rollouts
from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.findings import Findings, shared
from kltest.loss.constants import Sizes, exchanged_numbers, names_in, numbers_above, watched_numbers
from kltest.moments.differentiate import differentiate
from kltest.names import LOGITS, SUPPORT_SIZES, listed, says_token_id, support_size, training_step
from kltest.rollout import Rollout

# Numbers above this are beyond the rows of all batches; what cuts long rollouts at less is seen in those.
LARGE = 32
# They are tried at these: below the tokens and rows of the batch, and some that do not divide them.
SMALL = (1, 2, 3, 5, 7)
ROWS = 12
# Steps of training, of which some have a common divisor and some have none.
LATER = (0, 2, 3, 10, 101, 1024, 10_007, 1_000_000)
# The same as shares of a run.
LATER_SHARES = (0.0, 0.3, 0.7, 1.0)
# Ids of tokens that are tried: numbers in the code, below the largest vocabulary that there is. Log-prob of tokens that
# make a vocabulary so large.
MOST_IDS, LARGEST_ID, UNLIKELY = 64, 2**19, -60.0
# The last id of a vocabulary as large as that of trainers, beyond every usual limit of one.
MANY_IDS = 2**17 + 29
# The largest ids that are exact in numbers of these types, whose names stand in code.
EXACT_UP_TO = {"float16": 2**11, "half": 2**11, "int16": 2**15 - 1, "short": 2**15 - 1, "uint16": 2**16 - 1}
# What training reaches: ids of a vocabulary, and tokens in one call. Tokens of a rollout, or rows, that it often has: a
# limit beyond is generous, and only told.
VOCABULARY, TOKENS, OFTEN = 2**18, 2**15, 4096
# Numbers in the code above this are beyond the rows, and those that are lengths are seen in long rollouts. As many as
# this are tried; distance from one at which an id is no other number in the code.
LARGE_IN_CODE, MOST, AWAY = 257, 16, 98
# Share of the usual log-ratios at which bounds on numbers other than lengths and sizes do not act.
NEAR = 0.1
# The same at which bounds that begin at a later step do.
FAR = 4.0


@shared
def cuts(findings: Findings) -> Found | None:
    """Report the first of such numbers that changes the gradient by more than a factor where it is made small."""
    if not findings.agree:
        return None
    numbers, ids = list(_numbers(findings)), _token_ids(findings)
    if (numbers or ids) and findings.loss.instead is not None:
        names = [*(name for name, _, _ in numbers), *(["the ids of tokens"] if ids else [])]
        why = f"other values of {listed(names)} were not tried, since it draws random numbers"
        return Found(why, "inconclusive", level=None if any(_is_step(name) for name, _, _ in numbers) else "warning")
    found: list[Found] = []
    for name, value, others in numbers:
        scheduled = _is_step(name)
        batches = _batches(findings, FAR if scheduled else NEAR)
        usual = _gradients(findings, batches)
        for other in others:
            try:
                changed = _gradients(findings, batches, name, other)
            except KltestError:  # it refuses what is longer
                continue
            if _is_another(usual, changed, limit(findings), scheduled):
                step = _other_step(name, value, other) if scheduled else None
                found.append(step or _cut(name, value, other, usual, changed))
                break
        else:
            same = "a multiple of it, or none," if scheduled else "the same, up to a factor,"
            findings.notes.append(f"{name} is {value}; the gradient is {same} at {listed(list(map(str, others)))}.")
    found += _cuts_in_code(findings)
    if not found and (cut := _in_large_vocabulary(findings)):
        found.append(cut)
    if ids and (cut := _cut_by_id(findings, ids)):
        found.append(cut)
    return min(found, key=lambda one: one.level == "warning", default=None)


def _cuts_in_code(findings: Findings) -> list[Found]:
    """Report numbers in the code that are compared with sizes, and change the gradient where they are small.

    A size that grows with the vocabulary is that of trainers' logits: of up to a quarter of a million ids and, if it
    grows with the tokens, of as many tokens as one call has.
    """
    function = findings.loss.function
    numbers = set() if findings.loss.instead is not None else numbers_above(function, LARGE_IN_CODE)
    if not (numbers and right_in_long_rollouts(findings)):
        return []
    batches = _batches(findings, NEAR)
    first, last = batches[1], batches[1].peek("ref_logits").shape[-1] - 1
    seen: Sizes = {}
    wide: Sizes = {}
    for sizes, batch in ((seen, first), (wide, _with_id(first, last, last + 1))):
        ids = "tokens" in findings.observed.uses
        with suppress(KltestError):
            _gradients(findings, [batch], surroundings=partial(watched_numbers, function, numbers, sizes, ids))
    if not seen:
        return []
    found: list[Found] = []
    same: list[str] = []
    usual = _gradients(findings, batches, surroundings=nullcontext)
    for number in sorted(seen, key=abs)[:MOST]:
        for other in SMALL:
            small = partial(exchanged_numbers, function, {number: int(math.copysign(other, number))})
            try:
                changed = _gradients(findings, batches, surroundings=small)
            except KltestError:
                continue
            if _is_another(usual, changed, limit(findings), False):
                grows = any(after > before for before, after in zip(seen[number], wide.get(number, []), strict=False))
                reached = VOCABULARY * (TOKENS if max(seen[number]) > last + 1 else 1)
                error = grows and abs(number) < reached
                cut = _cut("a number in its code", number, other, usual, changed, error, grows)
                if error or abs(number) <= OFTEN:
                    found.append(cut)
                else:
                    findings.notes.append(cut.message)
                break
        else:
            same.append(str(number))
    if same:
        what = f"Where {listed(same)}, in its code and compared with a size, is"
        findings.notes.append(f"{what} {listed(list(map(str, SMALL)))}, the gradient is the same.")
    return found


def _token_ids(findings: Findings) -> list[int]:
    """Return numbers in the code, and in what it reads, that are ids in a vocabulary larger than those that are tried.

    Each is followed by the next, on the other side of a comparison. Numbers that a parameter states are none of them.
    """
    if "tokens" not in findings.observed.uses:
        return []
    stated = {value for value in findings.loss.arguments.stated.values() if isinstance(value, int | float)}
    vocabulary = _instance(findings).environment.vocabulary
    if _supports_more(findings, vocabulary):
        return []
    ids = {one for one in findings.loss.calls.numbers() - stated if vocabulary <= one < LARGEST_ID}
    exact = {EXACT_UP_TO[name] for name in names_in(findings.loss.function) & EXACT_UP_TO.keys()}
    return [each for one in [*sorted(exact), *sorted(ids - exact)][:MOST_IDS] for each in (one, one + 1)]


def _cut_by_id(findings: Findings, ids: list[int]) -> Found | None:
    """Report an id at which the gradient changes by more than a factor if the token that ends a rollout has it."""
    batches = [batch for batch in _batches(findings, NEAR) if len(batch) < ROWS]
    last = batches[0].peek("ref_logits").shape[-1] - 1
    usual = _gradients(findings, batches)

    def changed(one: int) -> np.ndarray:
        """Return the gradient where that token has another id; the usual one if it looks tokens up in a table."""
        try:
            return _gradients(findings, [_with_id(batch, last, one) for batch in batches], columns=[*range(last), one])
        except KltestError:
            return usual

    for one in ids:
        if not _is_another(usual, found := changed(one), limit(findings), False):
            continue
        none = lost_tokens(usual, found)
        # Of ids beyond, which the code does not name, it makes other tokens: that is no choice of a token.
        beyond = one + AWAY
        taken = not none and beyond < VOCABULARY and _is_another(usual, changed(beyond), limit(findings), False)
        where = f"where {one}{' or ' + str(beyond) if taken else ', a number in its code,'}"
        return Found(
            f"It depends on the ids of tokens, beyond the vocabularies that are tried here: {where} is the id of the "
            f"token that ends a rollout, {none or ANOTHER}, in batches of {ROWS // 3} rollouts.",
            level="error" if taken else "warning",
        )
    tried = listed(list(map(str, dict.fromkeys(ids[::2]))))
    findings.notes.append(f"The gradient is the same where the token that ends a rollout has the id {tried}.")
    return None


def _in_large_vocabulary(findings: Findings) -> Found | None:
    """Report another gradient of logits in a vocabulary as large as that of trainers, whose other tokens have none."""
    if findings.loss.instead is not None or not findings.observed.uses & LOGITS:
        return None
    batch = _batches(findings, NEAR)[1]
    last = batch.peek("ref_logits").shape[-1] - 1
    if _supports_more(findings, last + 1):
        return None
    usual = _gradients(findings, [batch])
    try:
        wide = _gradients(findings, [_with_id(batch, last, MANY_IDS)], columns=[*range(last), MANY_IDS])
    except KltestError:  # it looks tokens up in a table
        return None
    if not _is_another(usual, wide, limit(findings), False):
        return None
    return Found(
        f"In a vocabulary of {MANY_IDS + 1:,} tokens, of which one is the last and others are as good as impossible, "
        f"{lost_tokens(usual, wide) or ANOTHER}.",
        level="error",
    )


def _with_id(batch: Rollout, token: int, one: int) -> Rollout:
    """Return a batch in a vocabulary that has the id, in which one token has it; other tokens that are new have none.

    Log-probs of next tokens are made so long only if the loss reads them.
    """

    def wide(name: str) -> torch.Tensor:
        narrow = batch.peek(name).detach()
        logits = torch.full((*narrow.shape[:-1], one + 1), UNLIKELY, dtype=narrow.dtype)
        logits[..., :token], logits[..., one] = narrow[..., :token], narrow[..., token]
        return logits

    tokens = batch.peek("tokens")
    fields = {name: partial(wide, name) for name in LOGITS}
    return batch.replace(tokens=torch.where(tokens == token, one, tokens), **fields)


def _is_another(usual: np.ndarray, changed: np.ndarray, limit: float, scheduled: bool) -> bool:
    """Return True unless a gradient is a positive multiple of the usual one, or none where it is `scheduled`."""
    factor = nearest_multiple(changed, usual)
    off = norm(changed - factor * usual) / (norm(usual) or 1.0)
    lost = factor < -limit if scheduled else factor <= 0
    return off > limit * max(1.0, abs(factor)) or bool(usual.any() and lost)


def _is_step(name: str) -> bool:
    return training_step(name) is not None


def _before_the_first_call(findings: Findings) -> dict[str, object]:
    """Return what the loss stated before it was called, if it keeps something between calls."""
    if not findings.observed.keeps_state:
        return {}
    calls = findings.loss.calls
    now = calls.kept()
    calls.state.reset()
    stated = dict(findings.loss.arguments.stated)
    now.reset()
    return stated


def _numbers(findings: Findings) -> Iterator[tuple[str, float | None, tuple[float, ...]]]:
    """Yield names of numbers that are beyond what is tried, with their values and others to try."""
    vocabulary = _instance(findings).environment.vocabulary
    before = _before_the_first_call(findings)
    for name, value in findings.loss.arguments.stated.items():
        if before.get(name, value) != value:  # its calls change it: that is state, which KL507 is about
            continue
        if name.split(".")[-1] in SUPPORT_SIZES:  # a head of the vocabulary, which KL701 is about
            continue
        if value is None and _is_step(name):  # trainers pass it
            yield name, None, _later(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if _is_step(name):
            yield name, value, _later(name)
        elif says_token_id(name):
            if "tokens" in findings.observed.uses and value not in range(vocabulary):
                yield name, value, (vocabulary - 1,)
        elif value > LARGE:
            yield name, value, SMALL


def _instance(findings: Findings) -> Instance:
    """Return the instance whose rollouts are tried, with a vocabulary as where a support is graded."""
    return findings.measure.case("ragged", "stale").instances[0]


def _supports_more(findings: Findings, vocabulary: int) -> bool:
    """Return True if a support has more tokens than here in a larger vocabulary, and so rightly another gradient."""
    support = findings.loss.support
    return support is not None and support_size(support.k, vocabulary) < support.k


def _batches(findings: Findings, apart: float) -> list[Rollout]:
    """Return batches of all lengths, and of short and of long rollouts, so that a common divisor differs.

    Log-ratios are this share of the usual ones.
    """
    instance = _instance(findings)
    rows = evenly(instance.paths.by_length, ROWS)
    rollout = of_instance(findings, farther(instance, apart, apart))
    return [rollout.take(some) for some in (rows, rows[: ROWS // 3], rows[-ROWS // 3 :])]


def _gradients(
    findings: Findings,
    batches: list[Rollout],
    name: str = "",
    value: float = 0.0,
    columns: list[int] | None = None,
    surroundings: Callable[[], AbstractContextManager[object]] | None = None,
) -> np.ndarray:
    """(N, T, 1 + V) gradients in all rows of the batches, with this value of a number, perhaps at some logits alone.

    Inside surroundings those at padding are among them.
    """
    loss = findings.measure.experiment().loss
    if name:
        loss = loss.with_value(name, value)
    if surroundings:
        loss = loss.within(surroundings)
    found = []
    for batch in batches:
        joint = as_array(differentiate(loss, batch, None), batch) if surroundings else gradient_of(loss, batch)
        found.append(joint if columns is None else joint[..., [0, *(1 + column for column in columns)]])
    return np.concatenate(found)


def _later(name: str) -> tuple[float, ...]:
    return LATER if training_step(name) == 1 else LATER_SHARES


def _other_step(name: str, step: float | None, other: float) -> Found:
    return Found(f"Where {name} is {other}, the gradient of some rollouts is no multiple of that where it is {step}.")


def _cut(
    name: str,
    value: float | None,
    other: float,
    usual: np.ndarray,
    changed: np.ndarray,
    error: bool = False,
    grows: bool = False,
) -> Found:
    before, after = (each.any(axis=-1) for each in (usual, changed))
    cut = int((before & ~after).sum())
    does = "cuts at" if cut else "depends on"
    what = f"{cut} of {int(before.sum())} tokens have no gradient" if cut else ANOTHER
    compared = ", compared with a size that grows with the vocabulary" if grows else ""
    return Found(
        f"It {does} {name}, which is {value}{compared}, beyond what is tried here: with {other} in its place {what}, "
        f"in batches of {ROWS} and of {ROWS // 3} rollouts of up to {usual.shape[1]} tokens.",
        level="error" if error else "warning",
    )
