"""Many batches in one call of a loss, by torch.vmap: the loss meets each with its own rows alone.

torch.vmap refuses what would have to look at the numbers of a single batch: a branch on one of them, `.item()`, a mask
that selects elements. Such a loss is called with one batch at a time.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from kltest.errors import KltestError, TargetError
from kltest.loss.calling import Loss
from kltest.loss.outcome import Outcome
from kltest.rollout import LEAVES, Rollout

# Fields of every call, whether the loss reads them or not: it is placed by them.
ALWAYS = ("logp", "mask")


def mapped(loss: Loss, size: int, read: Iterable[str]) -> Loss:
    """Return a loss that takes many batches, one below the other, and adds up what they give a call each.

    Its value and its metric have an entry for each row.

    Args:
        loss: The loss that is called with each.
        size: Rows of a batch.
        read: Names of the fields that earlier calls of the loss read.

    Raises:
        TargetError: By a call: torch.vmap refuses the loss; or it keeps something between calls, or draws random
            numbers, which all batches would share; or a batch gives no finite number.
    """

    def called(rollout: Rollout) -> Outcome:
        fields = {name: rollout.peek(name).unflatten(0, (-1, size)) for name in _fields(rollout, read)}
        # What all batches share is no matter of one of them, so that the loss may look at its numbers.
        shared = {name: field[0] for name, field in fields.items() if name not in LEAVES and (field == field[:1]).all()}
        own = {name: field for name, field in fields.items() if name not in shared}
        beta, outcomes = rollout.peek("beta"), list[Outcome]()

        def each(fields: dict[str, Tensor]) -> dict[str, Tensor]:
            outcomes.append(loss(Rollout.within_vmap({**shared, **fields}, beta)))
            reports = ("objective", "value", "metric")
            return {name: report for name in reports if (report := getattr(outcomes[-1], name)) is not None}

        if kept := loss.calls.state.changed():
            raise TargetError(f"{loss.name} keeps something between calls: {', '.join(kept)}")
        before, draws = loss.calls.state.now(), loss.calls.draws()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of operations that it calls with one batch after the other
                found = torch.vmap(each)(own)
        except KltestError:
            raise
        except Exception as error:
            raise TargetError(f"{loss.name} cannot be called with many batches at once: {error}") from error
        finally:
            before.reset()
            drawn = draws.changed()
            draws.reset()
        objective = found["objective"]
        if drawn or not bool(objective.detach().isfinite().all()):
            raise TargetError(f"{loss.name} draws random numbers, or a batch gives no finite number")
        value, metric = (_of_rows(found[name], size) if name in found else None for name in ("value", "metric"))
        return Outcome(objective.sum(), "scalar", value=value, metric=metric, dtype=outcomes[0].dtype)

    return loss.changed(instead=called)


def _fields(rollout: Rollout, read: Iterable[str]) -> list[str]:
    """Names of the fields of a rollout behind those that a loss read."""
    given = rollout.keys()
    return [name for name in dict.fromkeys((*ALWAYS, *sorted(read))) if name in given]


def _of_rows(report: Tensor, size: int) -> Tensor:
    """(N·size, …) of what N batches report, as (N,) or (N, size, …)."""
    return report.repeat_interleave(size) if report.dim() == 1 else report.flatten(0, 1)
