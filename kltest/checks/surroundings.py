"""What a loss asks of its surroundings: another gradient in another precision, on a GPU, compiled, later, elsewhere.

A branch that asks for the precision of a tensor, for a GPU, for autocast, for a compiler, for the time or for an
environment variable runs in no environment here. So the answer is pretended (kltest.loss.surroundings), and everything
is computed in float64 on the CPU all the same: what differs is no rounding. Trainers use half precision and GPUs, they
compile, they pass slices of larger tensors, and hours go by: another gradient there is an error. What an environment
variable does is a fact about the loss: a warning. Masks have the type that trainers have, of integers or bools, as far
as the loss takes that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
import torch

from kltest.checks.batches import apart, as_array, batch_of, companions, noticeable, usual_batch
from kltest.checks.check import Found
from kltest.errors import KltestError, TargetError
from kltest.identify.findings import Findings, shared
from kltest.loss.state import State
from kltest.loss.surroundings import (
    Pretended,
    compiling,
    deterministic,
    later,
    on_device,
    other_switches,
    slices,
    under_autocast,
    variable,
    variables_read,
)
from kltest.moments.differentiate import differentiate, live_positions
from kltest.rollout import Rollout

# Log-ratios of a token that training reaches, and tokens that have each: summed up to 9.
FAR = ((1, (-5.0, -3.5, -2.0, 2.0, 3.5, 5.0)), (3, (-3.0, 3.0)))
# Share of a gradient up to which a constant that goes with the precision, as its smallest number, is none of it.
MUCH = 1e-2
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MASKS = {"integers": torch.int64, "bools": torch.bool}
DEVICES = {"cuda": "a GPU", "mps": "an Apple GPU", "xpu": "an Intel GPU"}
# Prompts of a batch, and numbers that a data set may give them.
PROMPTS, FIRST_PROMPT, STEP_OF_PROMPTS = 3, 48213, 101
# Hours by which clocks are moved ahead, and values of environment variables.
HOURS = (2, 240)
VALUES = ("0", "1", "2", "8", "true", "")

Surroundings = Callable[[], AbstractContextManager[object]]


class Usual(NamedTuple):
    """A batch, which one it is in words, and its gradient where nothing is pretended."""

    batch: Rollout
    which: str
    gradient: np.ndarray


@shared
def precisions(findings: Findings) -> Found | None:
    """Report another gradient where floating-point numbers are said to be of another type, or autocast to be on."""
    kinds = {f"Where numbers are of {name}": (partial(Pretended, kind),) for name, kind in PRECISIONS.items()}
    # Under the same pretence: where the code asks for float32, float64 would be other random numbers.
    double = partial(Pretended, torch.float64)
    usual = [one._replace(gradient=_gradient(findings, one.batch, double)) for one in _batches(findings)]
    autocast = {"Where autocast is on": (under_autocast,)}
    changes = chain(_changes(findings, usual, kinds, MUCH), _changes(findings, _batches(findings), autocast, MUCH))
    words = next(changes, "")
    return Found(words, level="error") if words else None


@shared
def elsewhere(findings: Findings) -> Found | None:
    """Report another gradient of slices, masks of integers, on a GPU, compiled, later, or with another variable."""
    function = findings.loss.function
    tried: dict[str, tuple[Any, ...]] = {
        "Where tensors are slices of larger ones, as logps[:, :-1],": (nullcontext, slices),
        "Where tensors are on a GPU": (partial(Pretended, device="cuda"),),
        **{f"Where torch has {device}": (partial(on_device, kind, function),) for kind, device in DEVICES.items()},
        "Where the loss is compiled": (partial(compiling, function),),
        "Where torch is asked for deterministic algorithms": (deterministic,),
        **{f"{hours} hours later": (partial(later, 3600.0 * hours, function),) for hours in HOURS},
    }
    if words := next(_changes(findings, _batches(findings), tried), ""):
        return Found(words, level="error")
    if found := _of_other_groups(findings) or _of_other_masks(findings):
        return found
    first, *_ = _batches(findings)
    names: set[str] = set()
    _off(findings, first, partial(variables_read, names))
    settings: dict[str, tuple[Any, ...]] = {
        f"With the environment variable {name} set to {value!r}": (partial(variable, name, value),)
        for name, value in product(sorted(names), VALUES)
    }
    settings |= {f"With {name}": (other,) for name, other in other_switches(function)}
    words = next(_changes(findings, [first], settings), "")
    return Found(words, level="warning") if words else None


def _changes(
    findings: Findings, batches: Sequence[Usual], tried: Mapping[str, tuple[Any, ...]], most: float | None = None
) -> Iterator[str]:
    """Yield a sentence for each place where the gradient of a batch is off by more than rounding, or than `most`."""
    for where, there in tried.items():
        for usual in batches:
            if (off := _off(findings, usual, *there)) > (noticeable(findings) if most is None else most):
                yield f"{where} {_words(usual.which, off)}"


def _of_other_groups(findings: Findings) -> Found | None:
    """Report another gradient where prompts have numbers as in a data set, which are large and not consecutive."""
    if "group" not in findings.observed.uses:
        return None
    batch = usual_batch(findings)
    prompts = torch.arange(len(batch)) * PROMPTS // len(batch)
    usual = _gradient(findings, batch.replace(group=prompts))
    off = _off(findings, Usual(batch.replace(group=prompts * STEP_OF_PROMPTS + FIRST_PROMPT), "", usual))
    if off <= noticeable(findings):
        return None
    return Found(f"Where prompts are numbered {FIRST_PROMPT}, {FIRST_PROMPT + STEP_OF_PROMPTS} … {_words('', off)}")


def _of_other_masks(findings: Findings) -> Found | None:
    """Report another gradient where the mask has another type; a loss that takes bools alone is only warned of.

    Where there is none at all, as of numbers that are cast to the mask's type, torch refuses to go backward.

    Far from the reference log-ratios are no whole numbers either, and there are no more masks: one batch is enough.
    """
    form = findings.loss.record.form
    if form is None or "mask" not in findings.observed.uses:
        return None
    others = {
        f"With a mask of {what}": (nullcontext, None, kind) for what, kind in MASKS.items() if kind != form.mask_type
    }
    words = next(_changes(findings, _batches(findings)[:1], others), "")
    return Found(words, level="warning" if form.mask_type else "error") if words else None


def _words(which: str, off: float) -> str:
    return f"the gradient {which + ' ' * bool(which)}differs by {off:.2g} of its size, computed with the same numbers."


@shared
def _batches(findings: Findings) -> list[Usual]:
    """Return the usual batch, and some with rollouts as far from the reference as training leads, with the gradients.

    Such rollouts are in one batch, or each in one if the loss does not take that.
    """
    tried: list[tuple[list[tuple[Rollout, str]], list[tuple[Rollout, str]]]]
    tried = [([(usual_batch(findings), "of the same batch")], [])]
    for length, ratios in FAR:
        words = f"of rollouts of {length} tokens with log-ratios of up to {max(ratios):g} each"
        several, *alone = (
            (batch_of([*some], companions(findings), length=length), words) for some in (ratios, *zip(ratios))
        )
        tried.append(([several], alone))
    found: list[Usual] = []
    for first, instead in tried:
        for batches in (first, instead):
            with suppress(KltestError):
                found += [Usual(batch, words, _gradient(findings, batch)) for batch, words in batches]
                break
    return found


def _off(findings: Findings, usual: Usual, *there: Any) -> float:
    """Distance of the gradient there from the usual one, relative to that; 0 where the loss fails."""
    try:
        off = apart(_gradient(findings, usual.batch, *there), usual.gradient)
    except KltestError:
        return 0.0
    return off if np.isfinite(off) else 0.0


def _gradient(
    findings: Findings,
    batch: Rollout,
    pretend: Surroundings = nullcontext,
    given: Any = None,
    masks: torch.dtype | None = None,
) -> np.ndarray:
    """Gradients of a batch, with the same random numbers and the same state of the loss in each call."""
    loss = findings.measure.loss.for_experiments(masks=masks).changed(instead=None).within(pretend, given)
    with loss.calls.holding(*loss.calls.held, *_held(findings)):
        found = differentiate(loss, batch.replace(), live_positions(batch))
    if masks and not found.by_leaf:
        raise TargetError(f"{loss.name} has no gradient with a mask of {masks}")
    return as_array(found, batch)


@shared
def _held(findings: Findings) -> tuple[State, State]:
    """Return what the loss keeps between calls, and where its random generators stand.

    That is what it keeps before the first call, if that matters: of prompts with other numbers it knows nothing else.
    """
    calls = findings.loss.calls
    return calls.state if findings.observed.keeps_state else calls.kept(), calls.draws()
