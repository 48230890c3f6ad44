"""Grade one loss: measure its expected gradient everywhere, say what it is, judge it against what was declared."""

from __future__ import annotations

import inspect
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kltest import __version__
from kltest.adapters import Setting, named
from kltest.counterexample.shrink import example, smallest_failure
from kltest.errors import TargetError, UsageError
from kltest.grading.asked import asked
from kltest.grading.expected_failures import Excuses
from kltest.grading.verdict import run_checks, selected_codes, verdict
from kltest.identify.findings import Combination, Findings
from kltest.identify.instances import DEFAULT_ENVIRONMENTS
from kltest.identify.measure import Measure, Sizes
from kltest.identify.sampling import ERROR_RATE, MARGIN, Sampling
from kltest.identify.uses import fields_used, sampler_matters
from kltest.loss.callables import name_of
from kltest.loss.calling import BoundLoss
from kltest.loss.global_state import preserved
from kltest.loss.outcome import Call, Loss
from kltest.loss.resolve import bind, resolve
from kltest.report import CheckResult, CounterExample, Report
from kltest.rollout import SAMPLER_FIELDS
from kltest.truth import plain

SAMPLERS = {"current": ("current",), "stale": ("stale",), "both": ("current", "stale")}


def grade(
    loss: Callable[..., Any] | str,
    *,
    expect: str | Mapping[str, float] = "reverse_kl",
    placement: str | None = None,
    credit: str | None = None,
    environment: str | Iterable[str] = DEFAULT_ENVIRONMENTS,
    sampler: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    beta: float | None = None,
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
    seed: int = 0,
    timeout: float | None = None,
    group_size: int | None = None,
    batch_size: int | None = None,
    method: str = "exact",
    error_rate: float = ERROR_RATE,
    margin: float = MARGIN,
    samples: int | None = None,
    bound: float | None = None,
    expected_failures: Mapping[str, str] | None = None,
    allow_stale_excuses: bool = False,
    name: str | None = None,
) -> Report:
    """Which gradient does this loss follow, exactly, and is it the one that it is meant to follow?

    `loss` is a callable whose parameters are filled by name from the rollout, or what `kltest grade` takes: a
    registered name, `package.module:function`, `path/to/file.py:function`, a library's setting (`verl:kl_penalty/k1`);
    or what `kltest.loss.resolve` made of one, which says itself how it is placed and called. `expect` is a named
    gradient or a combination of them. The other parameters are the options of `kltest grade`; `placement` and `credit`
    default to the estimator's own, else to a loss and to the whole return; `sampler` to both if gradient, value or
    logged value change with the sampler's log-probs. With the method "sampled", and by itself where enumeration is
    impossible, gradients are sampled: at most `samples` batches in an instance, until the relative bias is below or
    above `margin` at `error_rate`, which is asymptotic unless no gradient of a batch is longer than a `bound`.
    `expected_failures` gives the reasons why checks are expected to fail, by code: they do not refute then, and one
    that passes refutes unless `allow_stale_excuses`.

    Runs the loss in this process. A loss that fails gives a report whose verdict is "error"; a question that is put
    wrongly raises UsageError before anything is run.
    """
    if isinstance(loss, str) and (settings := named(loss)):
        return _of_library(loss, settings, {key: value for key, value in locals().items() if key in DEFAULTS})
    given = asked(
        expect=expect,
        placement=placement,
        credit=credit,
        environment=environment,
        sampler=sampler,
        arguments=arguments,
        beta=beta,
        select=select,
        ignore=ignore,
        seed=seed,
        timeout=timeout,
        group_size=group_size,
        batch_size=batch_size,
        method=method,
        error_rate=error_rate,
        margin=margin,
        samples=samples,
        bound=bound,
        expected_failures=expected_failures,
        allow_stale_excuses=allow_stale_excuses,
        name=name,
    )
    codes = selected_codes(given["select"] or (), given["ignore"] or ())
    excuses = Excuses(given["expected_failures"], given["allow_stale_excuses"])
    sampling = Sampling(given["method"] == "sampled", *(given[n] for n in ("error_rate", "margin", "samples", "bound")))
    call = Call(**{n: given[n] for n in ("placement", "credit", "beta", "arguments")})
    blank = Report(
        target=name or (loss if isinstance(loss, str) else name_of(loss)),
        expect=plain(given["expect"]),
        placement=given["placement"] or "loss",
        seed=given["seed"],
        versions=versions(),
        verdict="error",
        reduction="mean",
        dtype="float64",
    )
    sizes = given["group_size"], given["batch_size"]
    grading = _Grading(blank, given["expect"], given["environment"], codes, given["sampler"], *sizes, sampling, excuses)
    try:
        with time_limit(given["timeout"]):
            grading.run(loss, call, name)
    except TargetError as error:
        return grading.report(error)
    return grading.report()


DEFAULTS = {name: each.default for name, each in inspect.signature(grade).parameters.items() if name != "loss"}


def _of_library(target: str, settings: Sequence[tuple[str, Setting]], given: Mapping[str, Any]) -> Report:
    """One setting of a library, with what was asked for over what the setting asks for."""
    if ":" not in target:
        names = ", ".join(name for name, _ in settings[:3])
        raise UsageError(f"{target} has {len(settings)} settings, of which Python grades one at a time: {names} …")
    setting = settings[0][1]
    changed = {name: value for name, value in given.items() if value != DEFAULTS[name]}
    return grade(setting.target, **{"name": target, **setting.options_with(changed)})


class _Grading:
    """One grading as far as it has come, so that a failure keeps what was measured before it."""

    def __init__(
        self,
        blank: Report,
        declared: Combination,
        environments: tuple[str, ...],
        codes: list[str],
        sampler: str | None,
        group_size: int | None,
        batch_size: int | None,
        sampling: Sampling,
        excuses: Excuses,
    ) -> None:
        self.blank = blank
        self.declared = declared
        self.environments = environments
        self.codes = codes
        self.sampler = sampler
        self.group_size = group_size
        self.batch_size = batch_size
        self.sampling = sampling
        self.excuses = excuses
        self.loss: Loss | None = None
        self.findings: Findings | None = None
        self.results: list[CheckResult] = []
        self.smallest: CounterExample | None = None
        self.example: CounterExample | None = None

    def run(self, target: Callable[..., Any] | str, call: Call, name: str | None) -> None:
        if isinstance(target, BoundLoss):
            loss = target
        else:
            loss = resolve(target, call) if isinstance(target, str) else bind(target, call, name=name)
        self.loss = loss
        with preserved():
            self._measure(loss)

    def _measure(self, loss: Loss) -> None:
        seed = self.blank.seed
        uses = fields_used(loss, seed)
        off_policy_only = loss.spec is not None and loss.spec.off_policy_only
        samplers = SAMPLERS[self.sampler or ("both" if off_policy_only else "current")]
        ignored = ""
        if not (self.sampler or off_policy_only) and uses & SAMPLER_FIELDS:
            if sampler_matters(loss, uses, seed):
                samplers = SAMPLERS["both"]
            else:
                ignored = (
                    f"It is given {' and '.join(sorted(uses & SAMPLER_FIELDS))}, and nothing that it returns, logs or "
                    "differentiates changes with it: it was graded with the sampler equal to the policy only. Ask for "
                    "--sampler both if its rollouts may be stale"
                )
        measure = Measure(
            loss,
            self.declared,
            uses,
            seed=seed,
            sizes=Sizes.of(uses, self.group_size, self.batch_size),
            sampling=replace(self.sampling, rows=len(self.environments) * len(samplers)),
        )
        self.findings = Findings(self.declared, loss.placement, self.environments, samplers, measure)
        self.findings.notes += [ignored] * bool(ignored)
        for environment in self.environments:
            for sampler in samplers:
                self.findings.rows += measure.rows(environment, sampler)
        self.results = run_checks(self.findings, self.codes, self.excuses)
        self.smallest = smallest_failure(self.findings)
        self.example = None if self.smallest else example(self.findings)

    def report(self, error: TargetError | None = None) -> Report:
        found = self.blank if error is None else replace(self.blank, error=str(error))
        loss, findings = self.loss, self.findings
        if loss is None:
            return found
        credit = None if loss.placement == "loss" else loss.credit
        found = replace(found, placement=loss.placement, credit=credit, notes=list(loss.notes))
        if findings is None:
            return found
        return replace(
            found,
            verdict=verdict(findings, self.results, error=found.error),
            reduction=findings.observed.reduction,
            dtype=findings.observed.dtype,
            gradients=[row.published for row in findings.rows],
            value=[row.value for row in findings.rows if row.value is not None],
            checks=self.results,
            smallest=self.smallest,
            example=self.example,
            notes=[*loss.notes, *findings.observed.notes, *findings.notes],
        )


def versions() -> dict[str, str]:
    """What the numbers were computed with."""
    return {
        "kltest": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


# An alarm that is further away than a month is none, and the system may not take it.
LONGEST = 30 * 86_400.0


class _TimeIsUp(KeyboardInterrupt):
    """Passes everything that catches a loss's own errors, as an interrupt from the keyboard does."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TargetError in the main thread when the time is over; UsageError where that cannot be done."""
    if seconds is None or seconds > LONGEST:
        yield
        return
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        raise UsageError("timeout needs the main thread of a POSIX system; leave it out, or use the command line")
    running = True

    def ring(signum: int, frame: object) -> None:
        if running:
            raise _TimeIsUp

    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    theirs, interval = signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    except _TimeIsUp:
        raise TargetError(f"grading did not finish within {seconds:g} s: does the loss return?") from None
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        if theirs:
            # Somebody else's alarm, as a limit on the whole test, goes on; one that is overdue rings at once.
            signal.setitimer(signal.ITIMER_REAL, max(theirs - (time.monotonic() - started), 1e-6), interval)
