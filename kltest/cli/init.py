"""`kltest init`: look at a checkout, show what would hold its KL terms in continuous integration, write and run it."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kltest.errors import INTERRUPTED, UsageError
from kltest.sweeps.progress import Progress

if TYPE_CHECKING:
    from kltest.integration.losses import Held
    from kltest.integration.plan import Plan
    from kltest.scanning.rows import Scan

NOTHING = 5


def command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The checkout.")] = Path(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, and write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking, expected failures as well.")] = False,
    repository: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where CI gets kltest from [default: where this one was installed from]."),
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="REV", help="Which commit, tag or branch of it.")] = None,
) -> int:
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is {'no folder' if folder.exists() else 'not there'}; give the folder of a checkout"
        )
    if not (yes or dry_run or _is_terminal()):
        raise UsageError(
            "init asks before it writes, and there is no terminal to ask on; type kltest init --yes, "
            "or kltest init --dry-run to see what would be written"
        )
    from kltest.integration.plan import Plan, installed_from

    known = installed_from()
    with contextlib.chdir(folder):
        plan = Plan(repository or known[0], revision or (known[1] if repository is None else "main"))
        if plan.complete:
            print("nothing to write: [tool.kltest], the workflow and the hook stand")
            return 0
        if not dry_run and not os.access(".", os.W_OK):
            raise UsageError(f"nothing can be written in {folder}; --dry-run shows what would be")
        written: list[Path] = []
        sys.dont_write_bytecode = True  # of losses that are graded, into a checkout of which nothing else is changed
        try:
            return _init(plan, written, dry_run=dry_run, yes=yes)
        except KeyboardInterrupt:
            left = f"; written: {', '.join(map(str, written))}" if written else "; nothing was written"
            print(f"kltest: interrupted{left}", file=sys.stderr)
            return INTERRUPTED


def _init(plan: "Plan", written: list[Path], *, dry_run: bool, yes: bool) -> int:
    from kltest.files import write
    from kltest.scanning.report import FORMATS

    scan, losses, left = _looked(plan)
    if not scan.rows:
        print(f"kltest: {scan.summary[0]}: nothing to hold", file=sys.stderr)
        return NOTHING
    failing = [f"{loss.text}: {code} {why}" for loss in losses for code, why in loss.failures.items()]
    findings = [row for row in scan.rows if row.status in ("finding", "known") and plan.takes_baseline]
    for line in [*failing, *(f"{row.spot} {row.title}: {' '.join(row.codes)}" for row in findings)]:
        print(f"  {line}")
    counted = _counted(len(failing), len(findings))
    excused = bool(counted) and (dry_run or yes or _agreed(f"Write {counted}, so that the first run is green?"))
    if not excused:
        losses = [replace(loss, failures={}, mixed=False) for loss in losses]
    plan.make(losses, FORMATS["json"](scan) if findings and excused else "")
    _show(plan)
    if not plan.files:
        print("nothing to write")
        return 0
    names = ", ".join(str(file.path) for file in plan.files)
    not_held = f"{left} not held" if left else ""
    if dry_run:
        _say_owner(plan)
        parts = [f"would write {names}{counted and f', with {counted}'}", not_held, "nothing was written"]
        print("; ".join(filter(None, parts)))
        return 0
    if not (yes or _agreed(f"Write {names}?")):
        print("nothing was written")
        return 0
    for file in plan.files:
        try:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            write(file.path, file.text.encode())
        except OSError as error:
            done = f"; written: {', '.join(map(str, written))}" if written else ""
            raise UsageError(f"{file.path} cannot be written: {error.strerror}{done}") from None
        written.append(file.path)
    red = _run(plan)
    _say_owner(plan)
    outcome = f"{f'red: {red}' if red else 'green'}{f' with {counted}' if counted and excused else ''}"
    print("; ".join(filter(None, [outcome, not_held])))
    return 1 if red else 0


def _say_owner(plan: "Plan") -> None:
    """Say which files name an address of kltest that is still to be filled in."""
    from kltest.integration.plan import NOBODY

    if files := [str(file.path) for file in plan.files if NOBODY in file.text]:
        count = f"{len(files)} file{'s' * (len(files) > 1)} ({', '.join(files)})"
        print(f"{NOBODY} is no address: replace OWNER in {count}, or give --repository URL")


def _looked(plan: "Plan") -> tuple["Scan", list["Held"], int]:
    """Scan the checkout, and grade the losses that are found, unless some are configured.

    Returns the scan, the losses that can be held, and how many cannot.
    """
    from kltest.files import cache_folder
    from kltest.grading.isolated import terminated_as_interrupted
    from kltest.integration.losses import declared, held, undecided
    from kltest.scanning.scan import scan

    with terminated_as_interrupted():
        with Progress("scanning", 0) as bar:
            found = scan(
                Path(),
                cache=cache_folder("KLTEST_SCAN_CACHE", "scan"),
                rules=plan.rules,
                progress=lambda row, done, total: bar.advance(row.spot, total=total),
            )
        wanted = [] if plan.configured else declared(found.rows)
        with Progress("grading", len(wanted)) as bar:
            losses, left = held(wanted, lambda name, is_new: bar.advance(name) if is_new else bar.say(name))
        if not plan.configured:
            left |= undecided(found.rows, wanted)
    for text, why in left.items():
        print(f"  not held: {text}: {why}")
    return found, losses, len(left)


def _counted(failures: int, findings: int) -> str:
    """Return how many expected failures and known findings there are, in words."""
    told = [f"{failures} expected failure{'s' * (failures > 1)}"] if failures else []
    told += [f"a baseline of {findings} finding{'s' * (findings > 1)}"] if findings else []
    return " and ".join(told)


def _agreed(question: str) -> bool:
    """Ask on the terminal; only yes is yes."""
    print(f"{question} [y/N] ", end="", flush=True)
    return _answer().strip().lower() in ("y", "yes")


def _answer() -> str:
    return sys.stdin.readline()


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _show(plan: "Plan") -> None:
    for file in plan.files:
        print(f"\n── {file.path} ({'at its end' if file.path.exists() else 'new'})")
        print("\n".join(f"   {line}".rstrip() for line in file.shown.splitlines()))
    for line in plan.standing:
        print(f"\n{line}")
    print()


def _run(plan: "Plan") -> str:
    """Run what was written: the test and the scan, as CI does. Returns what was red."""
    print("running the test and the scan …", flush=True)
    red = []
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder, "pytest.ini")  # without the configuration of the checkout, which may want its plugins
        alone.write_text("[pytest]\n", encoding="utf-8")
        test = [
            "pytest",
            str(plan.test),
            "-q",
            "--noconftest",
            "-p",
            "no:cacheprovider",
            "-c",
            str(alone),
            "--rootdir",
            ".",
        ]
        commands = {"the scan": ["kltest", "scan", "."]}
        if plan.test.exists():
            commands["the test"] = test if find_spec("pytest") else ["kltest", "grade", "--quiet"]
        for name, given in commands.items():
            done = _ran(given)
            if done.returncode:
                print(f"{done.stdout}{done.stderr}", file=sys.stderr)
                red.append(f"{name} (exit code {done.returncode})")
    return " and ".join(red)


def _ran(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    line = [sys.executable, "-P", "-m", *command]
    return subprocess.run(line, env=environment, capture_output=True, encoding="utf-8", errors="replace", check=False)
