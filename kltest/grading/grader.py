"""Grading of one loss: resolve it, measure its expected gradient, check it, and report."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kltest.adapters import named
from kltest.checks import CHECKS
from kltest.checks.scale import agree_up_to_scale
from kltest.counterexample.shrink import example, smallest_failure
from kltest.errors import KltestError, TargetError, UsageError
from kltest.grading.branches import other_branches
from kltest.grading.forms import switch
from kltest.grading.isolated import TimeIsUp, time_limit
from kltest.grading.options import OPTIONS, RENAMED, Options, checked, documented, without_effect
from kltest.grading.readers import READERS
from kltest.grading.verdict import as_specified, run_checks, selected_codes, verdict
from kltest.identify.case import left_out
from kltest.identify.findings import Findings, Row, proportion
from kltest.identify.graded import fields_used, kl_part, sampler_matters
from kltest.identify.instances import instances
from kltest.identify.measure import GROUP_FIELDS, GROUPS, Measure, Sizes
from kltest.identify.parts import ascent
from kltest.identify.sampling import Sampling
from kltest.identify.stated import with_rows_of_the_batch
from kltest.loss.callables import first_line, name_of, source_file
from kltest.loss.calling import Loss
from kltest.loss.frames import Frame, own_frame
from kltest.loss.global_state import preserved
from kltest.loss.outcome import Calls
from kltest.loss.resolve import resolve
from kltest.loss.results import ACCEPTED
from kltest.moments.caller import SIZES
from kltest.report import CheckResult, CounterExample, Report
from kltest.rollout import SAMPLER_FIELDS, Rollout
from kltest.samplers import TRUNCATED
from kltest.truth import is_of_groups, plain
from kltest.version import versions

# A call that was cut off hangs if it took more than this share of the time, and this many times the longest other.
HANGS = 4
# Seconds for which a busy machine may hold up any call.
A_PAUSE = 0.1
# Seconds that there are at least until a loss is found: one that is at hand takes a thousandth, on any processor.
LOOK_UP = 0.05
# Words of the errors that reshaping, cutting and unpacking a batch of another size raises.
OF_SHAPES = ("shape", "size", "unpack", "divi", "multiple", "dimension", "chunk", "split", "range", "batch", "group")
# Rows of the batches on which is tried if a loss takes some sizes only, and what is said.
SIZES_TRIED = (1, *sorted(SIZES))
ONE_AT_A_TIME = "It takes one rollout at a time: grade a function that calls it with each row and returns the mean"
SOME_SIZES = "It runs on batches of {} rows, of those tried: give {} {}"
ON_POLICY = "With the policy as sampler it ran: --sampler current grades it for rollouts of the policy alone"
NO_SIZE = f"It is no matter of their number: batches of {SIZES_TRIED[0]} to {SIZES_TRIED[-1]} rows were tried"
OF_CHOICES = (
    "Environments have a vocabulary of a few tokens: make the number a parameter of the function, as k=20, which is "
    "then set to what a vocabulary has, or take min(20, logits.shape[-1])"
)
LAID_OUT = (
    "It seems to take a batch as a list of tensors, of objects or of dictionaries: rollouts come as tensors (B, T)"
)
# Words of the errors that a tensor raises where a list of them is meant, or a name where an object is.
OF_LAYOUTS = ("must be tuple of Tensors", "indices must be integers", "'str' object has no attribute")
BOTH = ("current", "stale")


@documented
def grade(
    loss: Callable[..., Any] | str,
    *,
    expect: str | Mapping[str, float] = "reverse_kl",
    placement: str | None = None,
    credit: str | None = None,
    environment: str | Iterable[str] = ("bandit", "sequence", "ragged"),
    sampler: str | None = None,
    part: str = "kl",
    arguments: Mapping[str, Any] | None = None,
    beta: float | None = None,
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
    seed: int = 0,
    timeout: float | None = None,
    group_size: int | None = None,
    batch_size: int | None = None,
    method: str = "exact",
    error_rate: float = 1e-6,
    margin: float = 0.05,
    samples: int | None = None,
    bound: float | None = None,
    strict: bool = False,
    levels: Mapping[str, str] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    allow_unexpected_passes: bool = False,
    name: str | None = None,
    call: bool = False,
    read: bool = False,
    allow_stale_excuses: bool = False,
) -> Report:
    """Identify the exact expected gradient of a loss and compare it with the claimed one.

    The loss runs in this process. If it fails, the report's verdict is "error". Gradients that cannot be enumerated are
    sampled until the relative bias is below or above `margin` at `error_rate`.

    Args:
        loss: A callable whose parameters are filled by name with tensors of a batch of rollouts, such as `logp`,
            `ref_logp` and `mask`, each (B, T). Or a text as for `kltest grade`: a registered name ("k3-loss"),
            "package.module:function", "path/to/file.py:function", or a library's setting ("verl:kl_penalty/k1"). Or
            what `kltest.loss.resolve` returned.
        {options}
        call: Call the loss; never read its source instead.
        read: Read the source of the loss, and do not call it. By default it is read where it cannot be called.
        allow_stale_excuses: Deprecated name of `allow_unexpected_passes`.

    Returns:
        A Report: `verdict` is "confirmed", "refuted", "inconclusive" or "error"; `gradients` has a row for each
        environment and sampler, `checks` a result for each check.

    Raises:
        UsageError: An option has a wrong value, the loss cannot be found, or a parameter of it cannot be filled and
            its source cannot be read either.
    """
    given = {option: value for option, value in locals().items() if option not in ("loss", "call", "read")}
    if all([switch(call, "call"), switch(read, "read")]):
        raise UsageError("call and read exclude each other; give one of them")
    if isinstance(loss, str) and named(loss):
        loss, given = _setting(loss, given)
    options = Options.of(**given)
    grading = Grading.of(options.name or (loss if isinstance(loss, str) else name_of(loss)), options)
    if read:
        if (found := _read(loss, given)) is None:
            raise UsageError(f"{grading.blank.target}: only a function of a file can be read")
        return found
    error = None
    try:
        for _ in grading.steps(loss):
            pass
    except UsageError as raised:
        error = raised
    report = grading.report()
    unmade = bool(error) and not report.calls
    if not call and (unmade or cannot_be_called(report)) and not options.arguments:
        try:
            found = _read(loss, given, "call=True says why")
        except UsageError as why:
            found = None
            if str(why) != str(error):
                report = replace(report, error=f"{report.error}\n{why}")
                error = error and UsageError(f"{error}\n{why}")
        if found is not None:
            return found
    if error:
        raise error
    return report


def cannot_be_called(report: Report) -> bool:
    """Return True for a loss that was not measured: it took no rollouts, or returned what is no loss of them."""
    hints = (ONE_AT_A_TIME, SOME_SIZES.partition("{")[0], NO_SIZE, OF_CHOICES, LAID_OUT, ACCEPTED)
    understood = not report.error or not any(words in report.error for words in hints)
    return bool(report.error) and not report.gradients and not (report.calls and understood)


def _read(loss: Any, given: Mapping[str, Any], why: str = "") -> Report | None:
    """Return the report of a function's source, None if it has none; UsageError if that cannot be read."""
    target = loss if isinstance(loss, str) else _target(loss)
    changed = {name: given[name] for name, option in OPTIONS.items() if given[name] not in (None, option.default)}
    chosen = checked(changed, lambda option: option.name)
    name = chosen.pop("name", None) or (loss if isinstance(loss, str) else name_of(loss))
    return READERS[0](target, name, chosen, why) if READERS and target else None


def _target(function: Any) -> str:
    """Return a function of a module or a class as the command line names it; the empty string for anything else."""
    names, file = getattr(function, "__qualname__", ""), source_file(function)
    return f"{file}:{names}" if inspect.isfunction(function) and file and "<" not in names else ""


@dataclass
class Grading:
    """One grading as far as it has come: what was measured before a loss fails or the time is over stands.

    `finished` is true after the last step. `error` is why the loss could not be graded, with the `frame` in which it
    failed; `unfinished` is what was not reached in time.
    """

    blank: Report
    options: Options
    loss: Loss | None = None
    findings: Findings | None = None
    scaled: bool = False
    results: list[CheckResult] = field(default_factory=list)
    smallest: CounterExample | None = None
    example: CounterExample | None = None
    error: str = ""
    frame: Frame | None = None
    unfinished: str = ""
    finished: bool = False
    seconds: float = 0.0

    @classmethod
    def of(cls, name: str, options: Options) -> "Grading":
        """Return a grading that has not begun."""
        return cls(unmeasured(options, name), options)

    def steps(self, target: Callable[..., Any] | str) -> Iterator[None]:
        """Grade row by row and check by check, within the time limit; what the loss raises ends it."""
        run, limit, began = self._run(target), self.options.timeout, time.monotonic()
        while not self.finished:
            try:
                least = LOOK_UP if self.loss is None else 1e-3
                with time_limit(None if limit is None else max(limit - self.seconds, least)):
                    self.finished = next(run, True)
            except TimeIsUp as alarm:
                self._stop(alarm, limit or 0.0)
            except TargetError as error:
                self.error, self.frame, self.finished = str(error), getattr(error, "frame", None), True
                self.error += _on_sizes(error, self.options, self.loss) or _on_samplers(self.findings)
            self.seconds = time.monotonic() - began
            yield

    def _run(self, target: Callable[..., Any] | str) -> Iterator[bool]:
        self._resolve(target)
        codes = selected_codes(self.options.select, self.options.ignore, self.options.part)
        with preserved(self.options.seed):  # a loss that draws random numbers draws the same ones in every grading
            for _ in self._measure():
                yield False
            findings, options = self.findings, self.options
            assert findings is not None
            agree_up_to_scale(findings)
            self.scaled = True
            for row in other_branches(findings, options) if options.part == "kl" else ():
                findings.others.append(row)
                yield False
            for result in run_checks(findings, codes, options):
                self.results.append(result)
                yield False
            self.smallest = smallest_failure(findings)
            self.example = None if self.smallest else example(findings)

    def _resolve(self, target: Callable[..., Any] | str) -> None:
        """Find the loss; a registered policy loss is graded as one."""
        self.loss = resolve(target, self.options.call, self.options.name)
        if self.loss.spec is not None and self.loss.spec.part == "policy" and self.options.part == "kl":
            self.options = replace(self.options, part="policy")
            self.blank = replace(self.blank, expect=plain(self.options.expect))

    def _measure(self) -> Iterator[None]:
        """Measure row by row what is graded."""
        assert self.loss is not None
        options = self.options = _with_group_size(self.loss, self.options)
        self.loss = with_rows_of_the_batch(self.loss, options.seed)
        self.loss = part_of(self.loss, options)
        self.findings = findings = plan(self.loss, options)
        for environment in findings.environments:
            for sampler in findings.samplers:
                findings.rows += findings.measure.rows(environment, sampler)
                yield

    def measured(self, target: Callable[..., Any] | str) -> Findings:
        """Return the findings of a loss whose rows are measured, without any check; what it raises is not caught."""
        self._resolve(target)
        with preserved(self.options.seed):
            for _ in self._measure():
                pass
        assert self.findings is not None
        return self.findings

    def _stop(self, alarm: TimeIsUp, limit: float) -> None:
        """Say what was reached when the time was over; a call that took most of it never returns, it seems."""
        self.finished = True
        name, loss, findings = self.blank.target, self.loss, self.findings
        if loss is None or _hangs(loss.calls, limit):
            self.frame = own_frame(alarm, source_file(loss.function) if loss else None)
            self.error = _on_hanging(name, loss.calls if loss else None, limit, self.frame)
            return
        missing = selected_codes(self.options.select, self.options.ignore, self.options.part)[len(self.results) :]
        self.unfinished = _on_slow(loss.calls, limit, first_line(loss.function), findings, len(missing))
        self.results += _not_made(missing, limit)
        if findings and not self.scaled:
            findings.rows = [_without_scale(row) for row in findings.rows]

    def report(self) -> Report:
        """Return the report of what was reached."""
        loss, findings = self.loss, self.findings
        known: dict[str, Any] = {"error": self.error, "seconds": self.seconds, "unfinished": self.unfinished}
        if self.frame:
            known["source"] = (self.frame.file, self.frame.line)
        if self.unfinished:
            known["verdict"] = "inconclusive"
        if loss:
            known["placement"] = "shaped-reward" if loss.shaped else loss.placement
            known["credit"] = None if loss.placement == "loss" else loss.credit
            known |= {"notes": loss.notes, "calls": loss.calls.count, "filled": loss.filled}
            known["calling"] = loss.calls.seconds + loss.calls.backward
            known.setdefault("source", first_line(loss.function))
        if loss and findings:
            look_back(findings)
            found = verdict(findings, self.results, error=self.error)
            known |= {
                "verdict": "inconclusive" if self.unfinished and found == "confirmed" else found,
                "reduction": findings.observed.reduction,
                "dtype": findings.observed.dtype,
                "gradients": [
                    replace(row.published, scale=row.scale or (1.0 if row.agrees else None)) for row in findings.rows
                ],
                "value": [row.value for row in findings.rows if row.value is not None],
                "checks": list(self.results),
                "smallest": self.smallest,
                "example": self.example,
                "reach": findings.reach if findings.rows else None,
                "notes": [*loss.notes, *findings.observed.notes, *findings.notes, *self._remarks(loss, findings)],
            }
        return replace(self.blank, **known)

    def _remarks(self, loss: Loss, findings: Findings) -> Iterator[str]:
        sampled = any(row.method == "sampled" for row in findings.rows)
        yield from without_effect(self.options, loss.placement, sampled=sampled)
        if loss.spec and not self.options.arguments and self.options.placement is self.options.credit is None:
            yield from as_specified(findings, loss.spec)


def plan(loss: Loss, options: Options) -> Findings:
    """Return findings without rows: what will be measured, and how."""
    uses, declared = fields_used(loss, options.seed), dict(options.expect)
    samplers, notes = _samplers(loss, uses, options)
    sampling = Sampling(
        options.method == "sampled",
        error_rate=options.error_rate,
        margin=options.margin,
        samples=options.samples,
        bound=options.bound,
        rows=len(options.environment) * len(samplers),
    )
    stated = loss.arguments.group_size
    if stated and stated[1] == options.group_size:
        notes = [*notes, f"Groups have {stated[1]} rollouts, as {stated[0]} says; --group-size grades others"]
    sizes = Sizes.of(uses, options.group_size, options.batch_size)
    policy = options.part != "kl"
    if is_of_groups(declared) and not (policy and sizes.grouped):
        raise UsageError(f"{plain(declared)} is of groups: grade a loss that reads rewards, with --part policy or all")
    measure = Measure(loss, declared, uses, seed=options.seed, sizes=sizes, sampling=sampling, policy=policy)
    findings = Findings(declared, loss.placement, options.environment, samplers, measure)
    findings.notes += notes
    return findings


def part_of(loss: Loss, options: Options) -> Loss:
    """Return what is graded of a loss: its KL part, or the direction in which another part of it ascends."""
    if options.part == "kl":
        return kl_part(loss, options.expect, options.seed, options.group_size)
    return ascent(loss, options.part, options.seed)


def _with_group_size(loss: Loss, options: Options) -> Options:
    """Return the options with the group size that the loss states, if none was asked for and it is not the usual."""
    stated = loss.arguments.group_size
    if stated is None or stated[1] == GROUPS[0] or options.group_size or options.batch_size:
        return options
    return replace(options, group_size=stated[1])


def look_back(findings: Findings) -> None:
    """Note how far the rows looked; the checks that looked further have noted it themselves."""
    for row in findings.rows:
        for instance in row.case.instances:
            findings.see(instance, row.sampler, row.batch)
    for case in dict.fromkeys(row.case for row in findings.rows if row.sampler.startswith(TRUNCATED)):
        findings.notes.append(f"In {case.environment} {left_out(case)}.")


def _samplers(loss: Loss, uses: frozenset[str], options: Options) -> tuple[tuple[str, ...], list[str]]:
    """The samplers to grade under, and a note if the loss takes the sampler's log-probs without depending on them."""
    off_policy_only = loss.spec is not None and loss.spec.off_policy_only
    if options.sampler or off_policy_only:
        return BOTH if options.sampler in (None, "both") else (options.sampler,), []
    taken = sorted(uses & SAMPLER_FIELDS)
    if taken and sampler_matters(loss, uses, options.seed):
        return BOTH, []
    note = (
        f"It takes {' and '.join(taken)}, but its KL part and what it logs do not change with it: it was graded with "
        "the sampler equal to the policy only. Ask for --sampler both if its rollouts may be stale"
    )
    return ("current",), [note] * bool(taken)


def _setting(target: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A library's setting: what is graded for it, and its own options under those that differ from the defaults."""
    settings = named(target, to_grade=True)
    if ":" not in target:
        names = ", ".join(name for name, _ in settings[:3])
        raise UsageError(f"{target} has {len(settings)} settings, and Python grades one at a time: {names} …")
    setting = settings[0][1].for_part(given["part"])
    changed = {name: value for name, value in given.items() if name in RENAMED or value != OPTIONS[name].default}
    return setting.target, {"name": target, **setting.options_with(changed)}


def unmeasured(options: Options, target: str, *, reduction: str = "mean", error: str = "") -> Report:
    """Return the report of a loss before anything is measured."""
    return Report(
        target=target,
        expect=plain(options.expect),
        placement=options.placement or "loss",
        seed=options.seed,
        versions=versions(torch, np),
        verdict="error",
        reduction=reduction,
        dtype="float64",
        error=error,
    )


def _hangs(calls: Calls, limit: float) -> bool:
    """Return True if the call that was under way when the time was over seems to be one that does not return."""
    return calls.interrupted > max(limit / HANGS, HANGS * calls.longest, A_PAUSE)


def _on_sizes(error: TargetError, options: Options, loss: Loss | None) -> str:
    """Return a hint if it seems to refuse the number of tokens to choose from, or of rows, or tensors; else ""."""
    cause = error.__cause__
    if "index k out of range" in str(cause):  # of topk
        return f"\n{OF_CHOICES}"
    if isinstance(cause, TypeError | AttributeError) and any(words in str(cause) for words in OF_LAYOUTS):
        return f"\n{LAID_OUT}"
    of_shapes = isinstance(cause, AssertionError) or (
        isinstance(cause, RuntimeError | ValueError | IndexError | ZeroDivisionError)
        and any(word in str(cause) for word in OF_SHAPES)
    )
    if not of_shapes or options.group_size or options.batch_size or loss is None:
        return ""
    taken = [rows for rows in SIZES_TRIED if _takes(loss, rows, options)]
    if taken == [1]:
        return f"\n{ONE_AT_A_TIME}"
    if not taken or len(taken) == len(SIZES_TRIED):
        return f"\n{NO_SIZE}"
    given = "--group-size" if loss.takes & GROUP_FIELDS else "--batch-size"
    return f"\n{SOME_SIZES.format(' and '.join(map(str, taken)), given, min(size for size in taken if size > 1))}"


def _on_samplers(findings: Findings | None) -> str:
    """Return a hint if it ran with the policy as sampler, and not with another one; else ""."""
    seen = {row.sampler for row in findings.rows} if findings else set()
    return f"\n{ON_POLICY}" if findings and seen == {"current"} and findings.samplers[-1] != "current" else ""


def _takes(loss: Loss, rows: int, options: Options) -> bool:
    """Return True if a loss runs on batches of so many rows in each environment."""
    try:
        for environment in options.environment:
            base = Rollout.of(instances(environment, options.seed)[0], padding=options.seed)
            loss(base.take(np.resize(np.arange(len(base)), rows)))
    except KltestError:
        return False
    return True


def _on_hanging(name: str, calls: Calls | None, limit: float, frame: Frame | None) -> str:
    """Say in which call the loss hangs, and where; without calls it was not even loaded."""
    place = f", in {frame.function} at {frame.file}:{frame.line}" if frame else ""
    if calls is None:
        return f"{name} could not be loaded within {limit:g} s (--timeout){place}"
    words = f"{name} did not return within {limit:g} s (--timeout): its call {calls.count + 1} had taken "
    return f"{words}{calls.interrupted:.2g} s{place}" + (f", after {_counted(calls)}" if calls.count else "")


def _on_slow(calls: Calls, limit: float, where: tuple[str, int] | None, findings: Findings | None, checks: int) -> str:
    """Say what was measured and what was not; `checks` is the number of those that were not made."""
    planned = [f"{e} ({s})" for e in findings.environments for s in findings.samplers] if findings else []
    rows = {f"{row.environment} ({row.sampler})" for row in findings.rows} if findings else set()
    measured = ", ".join(pair for pair in planned if pair in rows) or "nothing"
    left = ", ".join([*(pair for pair in planned if pair not in rows), f"{checks} checks"])
    loss = f" of the loss at {where[0]}:{where[1]}" if where else ""
    counted = f"{_counted(calls)}{loss}"
    return f"the time was over after {limit:g} s (--timeout): {counted}; measured: {measured}; not reached: {left}"


def _not_made(codes: Sequence[str], limit: float) -> list[CheckResult]:
    """Return the results of checks that were not reached."""
    missing = (CHECKS[code] for code in codes)
    why = f"not reached within {limit:g} s"
    return [CheckResult(check.code, check.name, "inconclusive", why, level=check.level) for check in missing]


def _without_scale(row: Row) -> Row:
    """Return a row that may agree up to scale, which was not tried, as not judged."""
    if not (row.wrong and proportion(row.identified, row.expected)):
        return row
    return replace(row, agrees=None, note="agreement up to scale was not tried in time")


def _counted(calls: Calls) -> str:
    return f"{calls.count} calls of {calls.seconds / max(calls.count, 1):.2g} s each"
