"""User code in a child process, so that nothing it does there can harm this one.

A child runs a generator function and sends what it yields, one step at a time. It may loop for ever, leave the
process, crash the interpreter, exhaust memory or print without end: the parent gets a `Step` that says so.

Our own, since no process pool reports the frame in which a child hangs or crashed, keeps the end of
its output below Python's level, or ends the processes that it started.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from kltest.errors import KltestError, UsageError
from kltest.grading.time_limit import LONGEST

Kind = Literal["value", "usage", "failed", "ended", "crashed"]
TAIL = 16_384
GRACE = 0.5
DUMP = b"(most recent call first):"
FATAL = b"Fatal Python error"
ORPHAN_SECONDS = 30.0


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


@dataclass
class Output:
    """Output of a child: the number of its lines, and its last bytes."""

    newlines: int = 0
    tail: bytes = b""

    def add(self, chunk: bytes) -> None:
        self.newlines += chunk.count(b"\n")
        self.tail = (self.tail + chunk)[-TAIL:]

    @property
    def lines(self) -> int:
        return self.newlines + bool(self.tail and not self.tail.endswith(b"\n"))

    def cut(self, mark: bytes) -> None:
        """Drop everything from `mark` on."""
        kept, _, cut = self.tail.partition(mark)
        self.newlines -= cut.count(b"\n")
        self.tail = kept

    def last(self, count: int) -> list[str]:
        return self.tail.decode("utf-8", "backslashreplace").splitlines()[-count:]


class Child:
    """A process that runs the generator `function(*arguments)` step by step; as a context manager it ends with it.

    The function must be importable. Its arguments and values are pickled.
    """

    def __init__(self, function: Callable[..., Iterator[Any]], *arguments: Any) -> None:
        # Forking keeps torch's import; elsewhere than on Linux forked threads and frameworks are not safe.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.output = Output()
        self._connection, theirs = context.Pipe()
        self._printed, printing = context.Pipe(duplex=False)
        self._stacks, stacking = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(function, arguments, theirs, printing, stacking))
        self._killed, self._home = False, ""
        self._process.start()
        for end in (theirs, printing, stacking):
            end.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, timeout: float | None = None, *, limit: float | None = None, home: str = "") -> Step:
        """Run the child to its next value; end it after `timeout` seconds, or if it fails.

        Args:
            timeout: Seconds that this step may take; None for no limit.
            limit: The limit that messages name, if several steps share it.
            home: File of the user's code, if it is known: a message on a child that hangs names a line there.
        """
        named, self._home = timeout if limit is None else limit, home
        if timeout is not None and timeout > LONGEST:
            timeout = None
        with contextlib.suppress(OSError):
            self._connection.send(timeout)
        step = self._answer(None if timeout is None else time.monotonic() + timeout, named)
        if step.kind != "value":
            self.close()
        return step

    def close(self) -> None:
        """End the child and every process that it started."""
        if self._connection.closed:
            return
        self._kill()
        self._process.join()
        self._read_output()
        for end in (self._connection, self._printed, self._stacks):
            end.close()

    def _answer(self, deadline: float | None, limit: float | None) -> Step:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            printed = [] if self._printed.closed else [self._printed]
            ready = wait([self._connection, self._process.sentinel, *printed], left)
            if self._printed in ready:
                self._read_output(once=True)
            if self._connection in ready or (self._process.sentinel in ready and self._connection.poll()):
                try:
                    return pickle.loads(self._connection.recv_bytes())
                except (EOFError, OSError):
                    return self._ended()
            if self._process.sentinel in ready:
                return self._ended()
            if deadline is not None and time.monotonic() >= deadline:
                return Step("ended", message=f"did not return within {limit:g} s (--timeout){self._stack()}")

    def _stack(self) -> str:
        """Return the innermost line that the child is executing; it dumps its stack when it gets SIGUSR1."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
        dumped = b""
        # Nothing marks the end of a dump, so the first line of the user's code ends the wait.
        until = time.monotonic() + GRACE
        while not (found := _innermost(dumped, self._home)) and wait(
            [self._stacks], max(0.0, until - time.monotonic())
        ):
            if not (chunk := os.read(self._stacks.fileno(), 1 << 16)):
                break
            dumped += chunk
        return found

    def _ended(self) -> Step:
        until = time.monotonic() + GRACE
        while self._process.exitcode is None and time.monotonic() < until:
            time.sleep(GRACE / 100)
        code = self._process.exitcode
        self._kill()
        self._read_output()
        if code is None:
            message = "cut its connection to kltest"
        elif code >= 0:
            message = f"left the process (exit status {code}) before there was a result"
        elif -code == signal.SIGKILL:
            message = "was killed (SIGKILL); the usual reason is that memory ran out"
        else:
            message = f"crashed the interpreter ({_signal_name(-code)}){_innermost(self.output.tail, self._home)}"
            self.output.cut(FATAL)
        return Step("ended", message=message)

    def _read_output(self, *, once: bool = False) -> None:
        while not self._printed.closed and wait([self._printed], 0):
            if chunk := os.read(self._printed.fileno(), 1 << 16):
                self.output.add(chunk)
            else:
                self._printed.close()
            if once:
                return

    def _kill(self) -> None:
        """Kill the child's process group, which outlives its leader if the user's code started processes."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()


def _serve(
    function: Callable[..., Iterator[Any]],
    arguments: tuple[Any, ...],
    connection: Connection,
    printing: Connection,
    stacking: Connection,
) -> None:
    """Run in the child: a step for every timeout received, until the parent closes the connection."""
    os.setsid()
    with contextlib.suppress(OSError):
        # If memory runs out, the kernel should end this process and not the parent.
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _capture(printing)
    faulthandler.register(signal.SIGUSR1, file=stacking.fileno(), all_threads=False)
    steps: Iterator[Any] | None = None
    while True:
        try:
            timeout = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if timeout is not None:
            # A parent that was killed cannot end this process, so it ends itself some time after the limit.
            faulthandler.dump_traceback_later(timeout + ORPHAN_SECONDS, exit=True, file=2)
        try:
            steps = steps or function(*arguments)
            step = Step("value", next(steps))
        except StopIteration:
            step = Step("crashed", message="asked for more steps than there are")
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
    """Return a message for people on a failure of kltest; the traceback is kept in a file if one can be written."""
    message = f"kltest itself failed: {what}. This is a bug in kltest, not in the loss: please report it"
    try:
        handle, path = tempfile.mkstemp(prefix="kltest-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
    except OSError:
        return f"{message} with this traceback:\n{trace}"
    return f"{message} with the traceback in {path}"


def _capture(printing: Connection) -> None:
    """Send everything written to standard output and error, by Python or below it, to the parent."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(printing.fileno(), number)
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    printing.close()
    faulthandler.enable(file=2)


def _innermost(output: bytes, home: str = "") -> str:
    """Return `, in f at file:line` for the innermost frame of a dumped stack in the user's code.

    That is `home` and the files beside it; if it is not known, what is not Python, torch, kltest or the program.
    """
    _, found, dump = output.partition(DUMP)
    text = dump.decode("utf-8", "backslashreplace") if found else ""
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)\n', text)
    ours, python, torch = str(Path(__file__).parents[1]), str(Path(os.__file__).parent), f"{os.sep}torch{os.sep}"
    beside = str(Path(home).parent) + os.sep if home else ""
    program = os.path.realpath(sys.argv[0])
    for file, line, function in frames:
        standard = file.startswith(python) and "-packages" not in file
        foreign = file.startswith(("<", ours)) or standard or torch in file or os.path.realpath(file) == program
        if file == home or (file.startswith(beside) and not foreign):
            return f", in {function} at {file}:{line}"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
