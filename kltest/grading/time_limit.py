"""A limit on the time that a grading may take in the process that calls it."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kltest.errors import UsageError

LONGEST = 30 * 86_400.0
"""Seconds; a longer limit is ignored, since the system may refuse an alarm that is further away."""


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
