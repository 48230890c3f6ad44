"""User code in child processes, so that nothing it does there can harm this one: the only runner of children.

A child runs a generator function and sends what it yields, one step at a time. It may loop for ever, leave the
process, crash the interpreter, exhaust memory or print without end: the parent gets a `Step` that says so. A child
whose time is over dumps its stack and ends itself, whether or not its parent is still there. `Children` runs several
at once. `time_limit` is the limit on code that runs in this process.

No process pool reports the frame in which a child hangs or crashed, keeps the end of its output below Python's level,
or ends the processes that it started.
"""

import contextlib
import ctypes
import faulthandler
import io
import math
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from kltest.errors import KltestError, TargetError, UsageError

Kind = Literal["value", "usage", "failed", "ended", "crashed"]
TAIL = 16_384
LONGEST = 30 * 86_400.0
"""Seconds; a longer limit is ignored, since the system may refuse an alarm that is further away."""
GRACE = 0.5
# Names the folder for tracebacks of bugs, if that of temporary files does not last.
TRACES = "KLTEST_TRACES"
DUMP = b"(most recent call first):"
# Option of Linux's prctl: the signal that a process gets when the thread that forked it ends.
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Step:
    """Result of one step of the child process.

    `kind` is value; usage (a usage error); failed (an error that kltest raised on purpose); ended (the process ended,
    or was ended, without a result); or crashed (a bug of kltest). `message` is for people; that of an end is a
    predicate, to follow its subject. `trace` is the traceback of a crash.
    """

    kind: Kind
    value: Any = None
    message: str = ""
    trace: str = ""

    def result(self, of: str) -> Any:
        """Return the value; raise what kept it from one, with `of` as the subject of an end."""
        match self.kind:
            case "value":
                return self.value
            case "usage":
                raise UsageError(self.message)
            case "crashed":
                raise KltestError(note_bug(self.message, self.trace))
            case _:
                raise TargetError(f"{of} {self.message}" if self.kind == "ended" else self.message)


@dataclass
class Output:
    """Output of a child: the number of its lines, and its last bytes."""

    newlines: int = 0
    tail: bytes = b""

    def add(self, chunk: bytes) -> None:
        """Append output: count its lines, store its end."""
        self.newlines += chunk.count(b"\n")
        self.tail = (self.tail + chunk)[-TAIL:]

    @property
    def lines(self) -> int:
        """Number of lines, one that is not finished included."""
        return self.newlines + bool(self.tail and not self.tail.endswith(b"\n"))

    def last(self, count: int) -> list[str]:
        """Return at most the last `count` lines that were kept."""
        return self.tail.decode("utf-8", "backslashreplace").splitlines()[-count:]


class Child:
    """A process that runs the generator `function(*arguments)` step by step; as a context manager it ends with it.

    The function must be importable. Its arguments and values are pickled. With `fresh` the process shares nothing with
    this one, not even imports.
    """

    def __init__(self, function: Callable[..., Iterator[Any]], *arguments: Any, fresh: bool = False) -> None:
        # Forking keeps torch's import; elsewhere than on Linux forked threads and frameworks are not safe.
        forks = sys.platform == "linux" and not fresh
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self.output, self._stack = Output(), b""
        self._limit: float | None = None
        self._home, self._deadline = "", math.inf
        self._connection, theirs = context.Pipe()
        self._printed, printing = context.Pipe(duplex=False)
        self._stacks, stacking = context.Pipe(duplex=False)
        # A forked child that kept these would not notice the end of its parent.
        ours = (self._connection, self._printed, self._stacks) if forks else ()
        given = (function, arguments, theirs, printing, stacking, ours, os.getpid())
        self._process = context.Process(target=_serve, args=given)
        self._process.start()
        for end in (theirs, printing, stacking):
            end.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, timeout: float | None = None, *, limit: float | None = None, home: str = "") -> "Child":
        """Let the child begin its next step; it ends after `timeout` seconds, or if it fails.

        Args:
            timeout: Seconds that this step may take; None for no limit.
            limit: The limit that messages name, if several steps share it.
            home: File of the user's code, if it is known: a message on a child that hangs names a line there.
        """
        if timeout is not None and timeout > LONGEST:
            timeout = None
        self._limit, self._home = timeout if limit is None else limit, home
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout + GRACE
        with contextlib.suppress(OSError):
            self._connection.send(timeout)
        return self

    def step(self, timeout: float | None = None, *, limit: float | None = None, home: str = "") -> Step:
        """Run the child to its next value, for at most `timeout` seconds; see `begin`."""
        self.begin(timeout, limit=limit, home=home)
        while (step := self.poll()) is None:
            wait(self.sources, self.left)
        return step

    @property
    def sources(self) -> list[Any]:
        """The object that becomes ready when the child has answered, printed or ended."""
        return [self._connection, self._process.sentinel, *([] if self._printed.closed else [self._printed])]

    @property
    def left(self) -> float | None:
        """Seconds until the child is ended, None if it has no limit."""
        return None if self._deadline == math.inf else max(self._deadline - time.monotonic(), 0.0)

    def poll(self) -> Step | None:
        """Return the step that was begun; None if the child is still at work on it, within its time."""
        ready, step = wait(self.sources, 0), None
        if self._printed in ready:
            self._read_output(once=True)
        late, ended = time.monotonic() > self._deadline, self._process.sentinel in ready
        if self._connection in ready or (ended and self._connection.poll()):
            ended = True
            with contextlib.suppress(EOFError, OSError):
                step = pickle.loads(self._connection.recv_bytes())
        if step is None and not ended and not late:
            return None
        if step is None:
            # `join` would wait for ever for a child that closed all its files and lives on.
            until = time.monotonic() + GRACE
            while (code := self._process.exitcode) is None and time.monotonic() < until:
                time.sleep(0.01)
            self.close()
            return Step("ended", message=self._ended(code, late=late))
        if step.kind != "value":
            self.close()
        return step

    def close(self) -> None:
        """End the child and every process that it started, and read what it has printed."""
        if self._connection.closed:
            return
        # Its process group outlives its leader.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._read_output()
        while wait([self._stacks], 0) and (chunk := os.read(self._stacks.fileno(), 1 << 16)):
            self._stack += chunk
        for end in (self._connection, self._printed, self._stacks):
            end.close()

    def _ended(self, code: int | None, *, late: bool) -> str:
        """Say why the child ended, from its exit code and from the stack that it dumped if its time was over."""
        if late or (self._stack and code is not None and code >= 0):
            # The main thread comes last.
            place = _innermost(self._stack.rpartition(DUMP)[2], self._home)
            return f"did not return within {self._limit:g} s (--timeout){place}"
        if code is None:
            return "cut its connection to kltest"
        if code >= 0:
            return f"left the process (exit status {code}) before there was a result"
        if -code == signal.SIGKILL:
            return "was killed (SIGKILL); the usual reason is that memory ran out"
        name = signal.Signals(-code).name if -code in {*signal.Signals} else f"signal {-code}"
        # The thread that crashed comes first.
        return f"crashed the interpreter ({name}){_innermost(self._stack.partition(DUMP)[2], self._home)}"

    def _read_output(self, *, once: bool = False) -> None:
        while not self._printed.closed and wait([self._printed], 0):
            if chunk := os.read(self._printed.fileno(), 1 << 16):
                self.output.add(chunk)
            else:
                self._printed.close()
            if once:
                return


Work = Generator[Child, Step, Any]
"""Work in children: yields a child that has begun a step, is sent that step, and returns a result in the end."""


class Children:
    """Several pieces of work at once; what is not finished ends with the block, and so do all children.

    Args:
        at_once: How many pieces have a child at the same time; the others wait.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._waiting: deque[tuple[Any, Work]] = deque()
        self._running: list[tuple[Any, Work, Child]] = []
        self._results: list[tuple[Any, Any]] = []

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        for _key, work, _child in self._running:
            work.close()

    def add(self, key: Any, work: Work) -> None:
        """Run a piece of work when there is room; `finished` gives its result with this key."""
        self._waiting.append((key, work))
        self._fill()

    def finished(self, *, block: bool = True) -> Iterator[tuple[Any, Any]]:
        """Yield keys and results as they come, until all are there; without `block` those that are there by now."""
        while True:
            self._look()
            while self._results:
                yield self._results.pop(0)
            if not (block and self._running):
                return
            limits = [left for _, _, child in self._running if (left := child.left) is not None]
            wait([source for _, _, child in self._running for source in child.sources], min(limits, default=None))

    def _look(self) -> None:
        for entry in list(self._running):
            key, work, child = entry
            if (step := child.poll()) is not None:
                self._running.remove(entry)
                self._advance(key, work, step)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._at_once:
            self._advance(*self._waiting.popleft(), None)

    def _advance(self, key: Any, work: Work, step: Step | None) -> None:
        try:
            self._running.append((key, work, work.send(step)))  # type: ignore[arg-type]
        except StopIteration as end:
            self._results.append((key, end.value))


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: children are stopped, finished reports are written."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        with contextlib.suppress(TypeError):
            signal.signal(signal.SIGTERM, before)


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


def _serve(
    function: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    connection: Connection,
    printing: Connection,
    stacking: Connection,
    ours: tuple[Connection, ...],
    parent: int,
) -> None:
    """Run in the child: a step for every timeout received, until the parent closes the connection."""
    os.setsid()
    if sys.platform == "linux":
        # The kernel ends it with its parent, however that one ended: a second SIGTERM may interrupt its cleaning up.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    for end in ours:
        end.close()
    with contextlib.suppress(OSError):
        # If memory runs out, the kernel should end this process and not the parent.
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _capture(printing)
    faulthandler.enable(file=stacking.fileno())
    steps: Iterator[Any] | None = None
    while True:
        try:
            timeout = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if timeout is not None:
            faulthandler.dump_traceback_later(max(timeout, 1e-3), exit=True, file=stacking.fileno())
        try:
            steps = steps or function(*arguments)
            step = Step("value", next(steps))
        except UsageError as error:
            step = Step("usage", message=str(error))
        except KltestError as error:
            step = Step("failed", message=str(error))
        except MemoryError:
            step = Step("ended", message="exhausted the memory")
        except (SystemExit, KeyboardInterrupt) as error:
            step = Step("ended", message=f"left the process ({describe(error)})")
        except BaseException as error:
            step = Step("crashed", message=describe(error), trace=traceback.format_exc())
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(step))


def describe(error: BaseException) -> str:
    """Return an exception on one line."""
    return "".join(traceback.format_exception_only(error)).strip()


def note_bug(what: str, trace: str) -> str:
    """Return a message for people on a failure of kltest; the traceback goes to a file if one can be written."""
    message = f"kltest itself failed: {what}. This is a bug in kltest, not in the loss: please report it"
    try:
        handle, path = tempfile.mkstemp(prefix="kltest-bug-", suffix=".txt", dir=os.environ.get(TRACES))
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
    except OSError:
        return f"{message} with this traceback:\n{trace}"
    return f"{message} with the traceback in {path}"


def _capture(printing: Connection) -> None:
    """Send everything written to standard output and error, by Python or below it, to the parent."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(printing.fileno(), number)
        stream = open(number, "w", 1, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    printing.close()


def _innermost(stack: bytes, home: str) -> str:
    """Return `, in f at file:line` for the innermost frame of a dumped stack in the user's code.

    That is `home` and the files beside it; if it is not known, what is not Python, torch, kltest or the program.
    """
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)\n', stack.decode("utf-8", "backslashreplace"))
    ours, python, torch = str(Path(__file__).parents[1]), str(Path(os.__file__).parent), f"{os.sep}torch{os.sep}"
    beside = str(Path(home).parent) + os.sep if home else ""
    program = os.path.realpath(sys.argv[0])
    for file, line, function in frames:
        standard = file.startswith(python) and "-packages" not in file
        foreign = file.startswith(("<", ours)) or standard or torch in file or os.path.realpath(file) == program
        if file == home or (file.startswith(beside) and not foreign):
            return f", in {function} at {file}:{line}"
    return ""


def without_kltest(file: str, folder: str) -> Iterator[str]:
    """Yield the output of a program, run in a folder as a main module that cannot import kltest; for a child.

    Raises:
        TargetError: The program raised.
    """
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kltest"}
    printed = io.StringIO()
    os.chdir(folder)
    sys.path.insert(0, folder)
    for name in ours:
        del sys.modules[name]
    # A module that is None cannot be imported.
    sys.modules["kltest"] = None  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(file, run_name="__main__")
    except BaseException as error:
        raise TargetError(f"failed: {describe(error)}") from error
    finally:
        sys.modules.update(ours)
    yield printed.getvalue()
