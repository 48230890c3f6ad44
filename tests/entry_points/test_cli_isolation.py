"""A child process: steps, failures, and that nothing it started outlives it."""

import ctypes
import multiprocessing
import os
import subprocess
import sys
import time

import pytest
from processes import until

from kltest.errors import TargetError, UsageError
from kltest.grading.isolated import TAIL, Child, Children, Output

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups and signals")


def counts(first):
    print("before", first)
    yield first
    print("after")
    yield first + 1


def raises(error):
    yield None
    raise error


def calls(function, *arguments):
    yield None
    function(*arguments)


def segfaults():
    ctypes.string_at(0)


def closes_everything():
    os.closerange(3, 256)
    time.sleep(60)


def starts_another(path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open(path, "w") as file:
        file.write(str(other.pid))
    yield other.pid
    time.sleep(300)


def prints_and_sleeps(count):
    for number in range(count):
        print("said", number)
    yield None
    print("and then", flush=True)
    deep(40)


def deep(depth):
    return time.sleep(300) if depth == 0 else deep(depth - 1)


def gone(pid):
    """Whether a process has ended (a zombie that nobody waits for has)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("fresh", [False, True])
def test_values_come_one_step_at_a_time_and_prints_are_kept(fresh):
    with Child(counts, 3, fresh=fresh) as child:
        assert (child.step(60).value, child.output.lines) == (3, 1)
        assert child.step(60).value == 4
        assert child.step(60).kind == "crashed"
    assert child.output.last(5) == ["before 3", "after"]


@pytest.mark.parametrize(
    ("work", "kind", "words"),
    [
        ((raises, UsageError("put it so")), "usage", "put it so"),
        ((raises, TargetError("it failed")), "failed", "it failed"),
        ((raises, SystemExit(3)), "ended", "left the process"),
        ((raises, MemoryError()), "ended", "memory"),
        ((raises, ZeroDivisionError("ours")), "crashed", "ZeroDivisionError: ours"),
        ((calls, segfaults), "ended", "crashed the interpreter (SIGSEGV), in segfaults at"),
        ((calls, os.kill, 0, 9), "ended", "memory ran out"),
        ((calls, closes_everything), "ended", "cut its connection"),
    ],
)
def test_each_failure_has_its_kind(work, kind, words):
    with Child(*work) as child:
        assert child.step().kind == "value"
        step = child.step()
    assert step.kind == kind
    assert b"Fatal" not in child.output.tail
    assert words in step.message
    assert ("Traceback" in step.trace) == (kind == "crashed")


def test_what_a_child_started_ends_with_it(tmp_path):
    with Child(starts_another, tmp_path / "pid") as child:
        pid = child.step(60).value
        assert not gone(pid)
        assert "did not return within 0.3 s" in child.step(0.3).message
        until(gone, pid)
    with Child(starts_another, tmp_path / "pid") as child:
        pid = child.step(60).value
    until(gone, pid)


def holds_a_child(path):
    child = Child(starts_another, path / "another")
    child.step(60)
    (path / "child").write_text(str(child._process.pid))
    child.step(300)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends a process with the one that forked it")
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    parent = multiprocessing.get_context("fork").Process(target=holds_a_child, args=(tmp_path,))
    parent.start()
    until(lambda: (tmp_path / "child").is_file() and (tmp_path / "child").read_text())
    child = int((tmp_path / "child").read_text())
    assert not gone(child)
    parent.kill()
    parent.join()
    until(gone, child)
    os.kill(int((tmp_path / "another").read_text()), 9)


@pytest.mark.parametrize("count", [0, 3, 5000])
def test_a_timeout_says_where_without_mixing_it_into_what_was_printed(count):
    with Child(prints_and_sleeps, count) as child:
        assert child.step(60).kind == "value"
        step = child.step(0.2)
    assert "in deep at" in step.message
    assert child.output.lines == count + 1
    assert child.output.last(1) == ["and then"]
    assert b"File" not in child.output.tail


def test_output_counts_all_lines_and_keeps_the_last():
    output = Output()
    for number in range(10_000):
        output.add(f"line {number}\n".encode())
    output.add(b"unfinished \xff")
    assert output.lines == 10_001
    assert output.last(2) == ["line 9999", "unfinished \\xff"]
    assert len(output.tail) <= TAIL


def sleeps(seconds):
    yield os.getpid()
    time.sleep(seconds)
    yield seconds


def slept(seconds):
    """A piece of work: the child's number, and the value or the failure of its second step."""
    with Child(sleeps, seconds) as child:
        first = yield child.begin(60)
        second = yield child.begin(1)
    return first.value, second.value or second.message


def test_several_children_work_at_once_and_a_slow_one_holds_no_other_up():
    with Children(2) as children:
        for number, seconds in enumerate([300, 0.01, 0.02, 0.03]):
            children.add(number, slept(seconds))
        assert list(children.finished(block=False)) == []
        found = list(children.finished())
    assert [number for number, _ in found] == [1, 2, 3, 0]
    assert [value for _, (_, value) in found[:3]] == [0.01, 0.02, 0.03]
    assert "did not return within 1 s" in found[3][1][1]
    assert all(gone(pid) for _, (pid, _) in found)


def test_what_is_not_finished_ends_with_the_block():
    with Children(1) as children:
        children.add("slow", slept(300))
        children.add("waiting", slept(0.01))
        (running,) = multiprocessing.active_children()
    assert gone(running.pid)
