"""The search for changes of a loss's source that are confirmed, and proof that all but the KL term stays as it is."""

import ast
import difflib
import hashlib
import io
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.errors import KltestError
from kltest.files import PACKAGE, relative
from kltest.grading.fixing.changes import Rewrite, Rewrites
from kltest.grading.fixing.definition import Editable
from kltest.grading.fixing.seen import SAME, look
from kltest.grading.grader import Grading
from kltest.grading.options import Options
from kltest.identify.case import Case, relative_bias, size, target
from kltest.identify.findings import Combination, Findings
from kltest.identify.graded import batches, called
from kltest.identify.measure import Measure
from kltest.loss.callables import source_file
from kltest.loss.calling import Loss, Record
from kltest.loss.global_state import preserved
from kltest.loss.placement import with_rewards
from kltest.loss.results import Reader
from kltest.moments import BatchOfOneError, exact
from kltest.names import listed
from kltest.report import Fix, Report
from kltest.rollout import Rollout
from kltest.truth import gradient

# Seconds of search; a candidate that was begun is finished.
SECONDS = 60.0
# Rows of the batches on which expressions are looked at: several groups, else fewer.
ROWS = (24, 12, 8, 4, 2, 1)
# Largest change of what is to stay, absolute.
UNCHANGED = 1e-12
# Distance from the declared gradient, up to scale, at which a candidate is worth grading.
NEAR = 1e-4


@dataclass
class Fixing:
    """The search for one graded loss.

    Attributes:
        loss: the loss as it was resolved, before its KL part was taken.
        grading: its finished grading.
    """

    loss: Loss
    grading: Grading
    report: Report
    tried: int = 0

    def run(self, seconds: float = SECONDS) -> Report:
        """Return the report with up to two fixes, of two kinds, or with the reason why there is none."""
        if self.report.verdict != "refuted" or self.grading.findings is None:
            return self.report
        if self.loss.spec is not None or Path(source_file(self.loss.function) or "").is_relative_to(PACKAGE):
            own = "no fix: this is code of kltest, a registered estimator or what calls a library"
            return replace(self.report, advice=own)
        if name := self._bonus():
            term = f"{self.report.expect}±COEFFICIENT*{name}"
            return replace(self.report, advice=f"no fix: it has an entropy beside its KL term; declare it, as {term}")
        try:
            definition = Editable.of(self.loss.function)
            batch = self._batch()
            body = look(definition, self._kl_part, batch)
        except KltestError as error:
            return replace(self.report, advice=f"no fix: {str(error).splitlines()[0]}")
        written = [name for name, field in self.loss.fields.items() if field in self._kl_part.record.writes]
        changes = Rewrites(body, dict(self.grading.options.expect), written, careful="KL502" not in self._failed).all()
        found = list(self._confirmed(definition, batch, changes, time.monotonic() + seconds))
        return replace(self.report, fixes=found, advice="" if found else self._why_none())

    def _bonus(self) -> str:
        """Return which entropy stands beside the KL term and is not declared: what is left where the reference is the
        policy."""
        options = self.grading.options
        instance = self._findings.measure.case("ragged", "current").instances[0]
        near = replace(instance, reference=instance.policy)
        with suppress(KltestError):
            loss = self._kl_part.changed(record=Record())
            # A factor of the KL term that is not detached leaves such a gradient as well, and no value.
            if not self._kl_part.for_experiments()(self._batch().near_reference()).objective.detach().abs() > SAME:
                return ""
            left = exact(loss, near, padding=options.seed, logs=False, known="mean").gradient
            for name in ("entropy", "local_entropy"):
                entropy = gradient(name, near)
                own = (left * entropy).sum() / (entropy**2).sum() * entropy
                if name not in options.expect and abs(left - own).max() < NEAR * abs(left).max():
                    return name
        return ""

    def _why_none(self) -> str:
        """Say that nothing was found, and which fields a fix may need that the function does not take."""
        needed = {"logp": "log-probs of the tokens", "mask": "mask", "old_logp": "log-probs of the sampler"}
        if not any(row.wrong and row.sampler == "stale" for row in self._findings.rows):
            del needed["old_logp"]
        lacking = [f"{words} ({name})" for name, words in needed.items() if name not in self._findings.observed.uses]
        takes = f"; it takes no {' and no '.join(lacking)}, which a fix may need" if lacking else ""
        code = self.report.errors[0].code if self.report.errors else "KL105"
        found = f"no fix inside of the function was found ({self.tried} changes were tried){takes}"
        return f"{found}. `kltest explain {code}` says what is to change"

    @property
    def _findings(self) -> Findings:
        assert self.grading.findings is not None
        return self.grading.findings

    @property
    def _failed(self) -> set[str]:
        return {check.code for check in self.report.failed}

    @property
    def _kl_part(self) -> Loss:
        assert self.grading.loss is not None
        return self.grading.loss

    def _batch(self) -> Rollout:
        """Return a batch that the loss takes, of unlike rows, drawn by another policy."""
        options, failure = self.grading.options, None
        for batch in batches(options.seed, options.group_size, ROWS, sampler="stale", centre="batch"):
            try:
                with preserved():
                    self._kl_part.for_experiments().returned(batch.replace())
                return batch
            except KltestError as error:
                failure = error
        assert failure is not None
        raise failure

    def _confirmed(
        self, definition: Editable, batch: Rollout, changes: Sequence[Rewrite], deadline: float
    ) -> Iterator[Fix]:
        """Yield fixes of two kinds at most, the smallest first; the second is looked for a quarter of the time.

        Those that move what the function returns with other values of its options come last.
        """
        kept = _Kept(self._kl_part, batch, self._failed)
        others = {words: kept.of(loss) for words, loss in self._with_other_options(definition)}
        before = kept.measured()
        unlike = {words: one.gradient() for words, one in others.items()}
        kinds: set[str] = set()
        last: list[tuple[Rewrite, str]] = []
        for change, moved in chain(((change, "") for change in changes), last):
            if time.monotonic() > deadline or len(kinds) == 2:
                return
            if change.kind in kinds:
                continue
            with suppress(KltestError), definition.running(definition.code(definition.changed(change.edits))):
                self.tried += not moved
                after = kept.measured()
                if not moved and not (kept.stays(before, after) and self._promises()):
                    continue
                move = [words for words, one in others.items() if not all_same(one.gradient(), unlike[words])]
                move += [change.shared] if change.shared and not move else []
                if move and not moved:
                    last.append((change, " and ".join(move)))
                    continue
                report = self._graded()
                if report is not None and self._is_better(report, scaled=change.scaled):
                    kinds.add(change.kind)
                    deadline = min(deadline, time.monotonic() + SECONDS / 4)
                    logs = any(code.startswith("KL6") for code in self._failed)
                    yield _fix(definition, change, report, before, after, moved, logs=logs)

    def _with_other_options(self, definition: Editable) -> Iterator[tuple[str, Loss]]:
        """Yield the loss with other values of options: texts that its body compares them with, and switches."""
        loss = self._kl_part
        compared: dict[str, set[str]] = {}
        for node in ast.walk(definition.node):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
                parts = [part for one in node.comparators for part in ast.walk(one) if isinstance(part, ast.Constant)]
                compared.setdefault(node.left.id, set()).update(
                    one.value for one in parts if isinstance(one.value, str)
                )
        for parameter in loss.arguments.parameters:
            value = loss.arguments.fillings.get(parameter.name, parameter.default)
            texts: Sequence[object] = sorted(compared.get(parameter.name, ()))
            values = [not value] if isinstance(value, bool) else texts
            for other in values:
                if other != value:
                    yield (
                        f"{parameter.name}={other!r}",
                        loss.changed(arguments=loss.arguments.with_value(parameter.name, other), record=Record()),
                    )

    def _is_better(self, report: Report, *, scaled: bool) -> bool:
        """Return True if a report confirms without a new warning (noise aside, the price of a fix), a sum over rows in
        place of a mean, or another scale than the one that was there."""
        new = [check.code for check in report.warnings if check.code not in self._failed]
        added_up = report.reduction == "sum" != self.report.reduction
        known = [abs(c) for row in self._findings.rows for name, c in (row.identified or {}).items() if name != "zero"]
        scales = [row.scale for row in report.gradients if row.scale]
        # What has no gradient has no scale either: that of a coefficient in the source is kept.
        kept = all(any(abs(one - c) < SAME * c for c in known) for one in scales) if known else scaled
        if "KL106" in new and kept:
            new.remove("KL106")
        return report.verdict == "confirmed" and not added_up and all(code.startswith("KL8") for code in new)

    def _promises(self) -> bool:
        """Return True if the changed loss follows the declared gradient, or its multiple, where it did not."""
        wrong = [row for row in self._findings.rows if row.wrong]
        rows = (*reversed(wrong), *reversed(self._findings.rows))
        places = dict.fromkeys((row.environment, row.sampler) for row in rows)
        return all(self._near(environment, sampler) for environment, sampler in list(places)[:2])

    def _near(self, environment: str, sampler: str) -> bool:
        loss, known = self._kl_part.changed(record=Record()), self._findings.measure
        try:
            return follows_nearly(loss, known.declared, known.case(environment, sampler))
        except BatchOfOneError:
            again = Measure(loss, known.declared, self._findings.observed.uses, seed=known.seed, sizes=known.sizes)
            return all(row.agrees is not False for row in again.rows(environment, sampler))

    def _graded(self) -> Report | None:
        """Grade the changed loss as the first was graded, what it failed first; None as soon as anything disagrees."""
        options = replace(self.grading.options, timeout=None)
        if not any(row.wrong for row in self._findings.rows):
            errors = tuple(check.code for check in self.report.errors)
            if self._graded_with(replace(options, select=errors, ignore=())) is None:
                return None
        return self._graded_with(options)

    def _graded_with(self, options: Options) -> Report | None:
        loss = self.loss.changed(record=Record(), reader=Reader(self.loss.function))
        grading = Grading.of(self.report.target, options)
        for _ in grading.steps(loss):
            if grading.findings and any(row.wrong for row in grading.findings.rows) and grading.scaled:
                return None
            if any(result.refutes for result in grading.results):
                return None
        return grading.report()


def follows_nearly(loss: Loss, declared: Combination, case: Case) -> bool:
    """Return True if a loss follows a gradient, up to scale, on the first instance of a case: quick to see, and a hint.

    Raises:
        BatchOfOneError: The loss cannot be called with one rollout.
        TargetError: It fails.
    """
    instance = case.instances[0]
    found = exact(loss, instance, case.sampler, padding=case.seed, logs=False, known="mean").gradient
    wanted = target(declared, instance, case.sampler)
    scale = float((found * wanted).sum() / (wanted**2).sum()) if wanted.any() else 1.0
    return scale > 0 and relative_bias(found / scale, wanted, size(instance)) < NEAR


@dataclass(frozen=True)
class _Measured:
    """Numbers that are to stay: all that a loss returns but its KL term, and what it logs; and the loss's own value."""

    rest: list[Tensor]
    value: float


@dataclass(frozen=True)
class _Kept:
    """Measures on a batch what a loss returns and logs beside its KL term, which is to stay when that changes."""

    loss: Loss
    batch: Rollout
    failed: Collection[str] = ()

    def measured(self) -> _Measured:
        """Return the numbers of the function's present code."""
        value, logged, _ = self._called(self.batch)
        rest: tuple[Tensor, ...] = ()
        if self.loss.takes_beta:
            # A term that ignores β is there at 0 as well, but for a reference that is the policy.
            rest = self._called(self.batch.near_reference() if "KL510" in self.failed else self.batch, 0.0)
        elif self.loss.unrewarded:
            up, down = (torch.linspace(*ends, len(self.batch)).double() for ends in ((0.1, 0.9), (0.8, 0.2)))
            ones, others = (self._called(with_rewards(self.batch, each), rewarded=True) for each in (up, down))
            rest = tuple(one - other for one, other in zip(ones, others, strict=True))
        return _Measured([*rest, logged], float(value.sum()))

    def stays(self, before: _Measured, after: _Measured) -> bool:
        """Return True if nothing moved but the KL term and the loss's own value."""
        return all_same(before.rest, after.rest)

    def of(self, loss: Loss) -> "_Kept":
        """Return the same for another loss."""
        return replace(self, loss=loss)

    def gradient(self) -> list[Tensor]:
        """Return the value of one call, what it logs and its gradient; nothing if it fails."""
        with suppress(KltestError):
            return list(self._called(self.batch))
        return []

    def _called(
        self, batch: Rollout, beta: float | None = None, *, rewarded: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the value of one call, what it logged, in one row of numbers, and its gradient at all leaves."""
        numbers: list[Tensor] = []
        function = self.loss.function

        def read(*arguments: Any, **named: Any) -> Any:
            answer = function(*arguments, **named)
            # Before the backward pass, which may write into them.
            numbers[:] = [number.detach().double().flatten().clone() for number in _numbers(answer)]
            return answer

        changes: dict[str, Any] = {"unrewarded": False} if rewarded else {}
        result, each, gradient = called(self.loss.changed(function=read, **changes), batch, beta, seed=0)
        own = result.loss.detach().double().flatten()
        for place, number in enumerate(numbers):
            if number.shape == own.shape and torch.equal(number.abs(), own.abs()):
                del numbers[place]
                break
        # What is logged wrongly is to change.
        stay = [] if any(code.startswith("KL6") for code in self.failed) else numbers
        return each, torch.cat([torch.zeros(0).double(), *stay]), gradient


def _numbers(answer: Any) -> Iterator[Tensor]:
    """Yield the numbers of what a loss returned, as tensors."""
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, bool | int | float | np.number | np.ndarray):
        yield torch.as_tensor(answer)
    elif isinstance(answer, dict):
        for part in answer.values():
            yield from _numbers(part)
    elif isinstance(answer, list | tuple):
        for part in answer:
            yield from _numbers(part)
    elif hasattr(answer, "__dict__"):
        yield from _numbers(vars(answer))


def all_same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return True if numbers that are to stay do."""

    def same(one: Tensor, other: Tensor) -> bool:
        return one.shape == other.shape and torch.allclose(one, other, rtol=UNCHANGED, atol=UNCHANGED, equal_nan=True)

    return len(ones) == len(others) and all(map(same, ones, others))


def _fix(
    definition: Editable,
    change: Rewrite,
    report: Report,
    before: _Measured,
    after: _Measured,
    moved: str,
    *,
    logs: bool,
) -> Fix:
    """Return a confirmed change as plain data."""
    values = "what it returns keeps its value"
    if abs(before.value - after.value) > UNCHANGED * max(abs(before.value), 1.0):
        values = f"the value that it returns changes, on a batch of ours from {before.value:.4g} to {after.value:.4g}"
    if logs:
        values += "; what is logged changes"
    rows = {(row.environment, row.sampler): row.relative_variance for row in report.gradients}
    variance = rows.get(("ragged", "current"), next(iter(rows.values())))
    found = fix_of(definition, change, values)
    words = found.words + (f"; it changes {moved} as well" if moved else "")
    return replace(found, words=words, variance=variance)


def fix_of(definition: Editable, change: Rewrite, value: str) -> Fix:
    """Return a change as plain data; `value` says what becomes of what is returned. Its variance is not known."""
    text = definition.changed(change.edits)
    old, new = (io.StringIO(one, newline="").readlines() for one in (definition.text, text))
    file = relative(definition.path, Path.cwd())
    name = file.lstrip("/")
    lines = difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")
    diff = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    first = _common(old, new)
    tail = _common(old[first:][::-1], new[first:][::-1])
    return Fix(
        file=file,
        first=first + 1,
        last=len(old) - tail,
        text="".join(new[first : len(new) - tail]),
        diff=diff,
        words=change.words + _left_over(definition, text),
        value=value,
        variance=None,
        needs_logits=change.needs_logits,
        digest=hashlib.sha256(definition.text.encode()).hexdigest(),
    )


def _left_over(definition: Editable, text: str) -> str:
    """Say which variables of the function nothing reads after a change."""
    place = definition.node.name, definition.node.lineno
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    after = next((node for node in functions if (node.name, node.lineno) == place), definition.node)
    read, still_read = (_names(node, ast.Load) for node in (definition.node, after))
    names = sorted((read - still_read) & _names(after, ast.Store))
    return f"; nothing reads {listed(names)} any more" if names else ""


def _names(function: ast.FunctionDef, use: type[ast.expr_context]) -> set[str]:
    return {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, use)}


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many lines two texts have in common at the beginning."""
    return next(
        (n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
