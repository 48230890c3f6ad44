"""A limit on the time of a grading: an alarm in the process that calls it, and words for what it cut off.

The words say what stands, what was not reached, and whether the loss hangs. `isolated` ends children that take longer.
"""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kltest.checks import CHECKS
from kltest.errors import UsageError
from kltest.grading.isolated import LONGEST
from kltest.identify.findings import Findings, Row, proportion
from kltest.loss.frames import Frame
from kltest.loss.outcome import Calls
from kltest.report import CheckResult

# A call that was cut off hangs if it took more than this share of the time, and this many times the longest other.
HANGS = 4


class TimeIsUp(KeyboardInterrupt):
    """Raised by the alarm; a loss that catches every Exception does not catch this one."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeIsUp in the main thread when the time is over, or UsageError if no alarm can be set."""
    if seconds is None or seconds > LONGEST:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("timeout needs the main thread of a POSIX system; leave it out, or use the command line")
    running = True

    def ring(signum: int, frame: object) -> None:
        if running:
            raise TimeIsUp

    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    theirs, interval = signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if before is None else before)
        if theirs:
            # An alarm that was set before, as a limit on the whole test, goes on; one that is overdue rings at once.
            signal.setitimer(signal.ITIMER_REAL, max(theirs - (time.monotonic() - started), 1e-6), interval)


def hangs(calls: Calls, limit: float) -> bool:
    """True if the call that was under way when the time was over is one that does not return, it seems."""
    return calls.interrupted > max(limit / HANGS, HANGS * calls.longest)


def on_hanging(name: str, calls: Calls | None, limit: float, frame: Frame | None) -> str:
    """Say in which call the loss hangs, and where; without calls it was not even loaded."""
    place = f", in {frame.function} at {frame.file}:{frame.line}" if frame else ""
    if calls is None:
        return f"{name} could not be loaded within {limit:g} s (--timeout){place}"
    words = f"{name} did not return within {limit:g} s (--timeout): its call {calls.count + 1} had taken "
    return f"{words}{calls.interrupted:.2g} s{place}" + (f", after {_counted(calls)}" if calls.count else "")


def on_slow(calls: Calls, limit: float, where: tuple[str, int] | None, findings: Findings | None, checks: int) -> str:
    """Say what was measured and what was not; `checks` is the number of those that were not made."""
    planned = [f"{e} ({s})" for e in findings.environments for s in findings.samplers] if findings else []
    rows = {f"{row.environment} ({row.sampler})" for row in findings.rows} if findings else set()
    measured = ", ".join(pair for pair in planned if pair in rows) or "nothing"
    left = ", ".join([*(pair for pair in planned if pair not in rows), f"{checks} checks"])
    loss = f" of the loss at {where[0]}:{where[1]}" if where else ""
    counted = f"{_counted(calls)}{loss}"
    return f"the time was over after {limit:g} s (--timeout): {counted}; measured: {measured}; not reached: {left}"


def not_made(codes: Sequence[str], limit: float) -> list[CheckResult]:
    """Return the results of checks that were not reached."""
    missing = (CHECKS[code] for code in codes)
    why = f"not reached within {limit:g} s"
    return [CheckResult(check.code, check.name, "inconclusive", why, level=check.level) for check in missing]


def without_scale(row: Row) -> Row:
    """Return a row that may agree up to scale, which was not tried, as not judged."""
    if not (row.wrong and proportion(row.identified, row.expected)):
        return row
    return replace(row, agrees=None, note="agreement up to scale was not tried in time")


def _counted(calls: Calls) -> str:
    return f"{calls.count} calls of {calls.seconds / max(calls.count, 1):.2g} s each"
