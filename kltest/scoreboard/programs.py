"""A program that shows a setting's gradient with the library alone, written, run and compared before it is given."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kltest.adapters import NAMES
from kltest.adapters.adapter import Door, Setting
from kltest.environments import Instance, sequence
from kltest.errors import KltestError
from kltest.grading.isolation import Child, describe
from kltest.report import GradientRow, Report
from kltest.truth import combine

SECONDS = 300.0
AGREE = {"float64": 1e-6, "float32": 2e-3}
"""Relative to the size of the gradient: rounding, and coefficients that are given to a few digits."""
KEYS = ("vocabulary", "length", "policy", "reference", "sampler", "expected")


class ProgramError(KltestError):
    """A program did not run, or what it printed is not what grading found."""


@dataclass(frozen=True)
class Program:
    """Its text, empty if there is none; `note` says why there is none, or in what it differs from what was graded.

    `of_door` says that the door writes it, again whenever it is asked, so that nobody has to keep it.
    """

    code: str = ""
    note: str = ""
    of_door: bool = False


def program(library: Door, setting: Setting, report: Report) -> Program:
    """A program for what was found of a setting, already run; none where nothing was found.

    Raises ProgramError if it fails or prints another gradient than grading found.
    """
    if not report.gradients:
        return Program()
    example = report.smallest or report.example
    ours = setting.target.startswith("kltest.")
    if not ours and example and example.code:
        # The grader ran it before it gave it out.
        return Program(example.code, example.note)
    code = library.reproduction(setting) if library.reproduction else ""
    if not code:
        reason = "it is called through a function of kltest's" if ours else "no small world shows it"
        return Program(note=example.note if example and not ours else reason)
    return Program(code, compared(_said(code), report), of_door=library.name in NAMES)


def _said(code: str) -> dict[str, Any]:
    """What a program prints on its last line, run in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(code, encoding="utf-8")
        printed = _by_forking(file) if sys.platform == "linux" and "jax" not in sys.modules else _anew(file)
    lines = printed.strip().splitlines() or ["nothing"]
    try:
        said = json.loads(lines[-1])
        return {key: said[key] for key in KEYS}
    except (ValueError, KeyError, TypeError):
        raise ProgramError(f"the last line of the program without kltest is not as agreed: {lines[-1][:100]}") from None


def _by_forking(file: Path) -> str:
    """In a fork of this process, which has imported the library already."""
    with Child(_run, str(file)) as child:
        step = child.step(SECONDS)
    if step.kind != "value":
        raise ProgramError(f"the program without kltest {step.message}")
    return str(step.value)


def _run(file: str) -> Iterator[str]:
    """What a program prints, run as a main module for which there is no kltest."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "kltest"}
    printed = io.StringIO()
    os.chdir(Path(file).parent)
    for name in ours:
        del sys.modules[name]
    # What is None here cannot be imported.
    sys.modules["kltest"] = None  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(file, run_name="__main__")
    except BaseException as error:
        raise ProgramError(f"failed: {describe(error)}") from error
    finally:
        sys.modules.update(ours)
    yield printed.getvalue()


def _anew(file: Path) -> str:
    """With this interpreter, started anew."""
    # Without kltest's folder, so that it cannot be used unnoticed where it is put on the path by hand.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(file)]
    try:
        done = subprocess.run(
            command, cwd=file.parent, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProgramError(f"the program without kltest did not end within {SECONDS:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise ProgramError(f"the program without kltest failed: {last}")
    return done.stdout


def compared(said: dict[str, Any], report: Report) -> str:
    """Whether the gradient that a program printed is the one that was identified; a note where that cannot be said."""
    world = sequence(said["vocabulary"], said["length"])
    policy, reference = (np.log(np.array(said[name])) for name in ("policy", "reference"))
    sampler = None if said["sampler"] is None else np.log(np.array(said["sampler"]))
    instance = Instance.of(world, policy, reference, sampler)
    row = _row(report, "current" if sampler is None else "stale", said["length"])
    if row is None or row.identified is None:
        return "its gradient has no name to compare it with"
    truth, found = combine(row.identified, instance), np.array(said["expected"])
    scale = max(float(np.linalg.norm(truth)), float(np.linalg.norm(combine({"reverse_kl": 1.0}, instance))))
    if found.shape != truth.shape or not np.linalg.norm(found - truth) <= AGREE[report.dtype] * scale:
        raise ProgramError(
            f"the program without kltest prints a gradient that differs from {row.identified} by "
            f"{np.linalg.norm(found - truth) / scale:.2g} of its size"
            if found.shape == truth.shape
            else f"the program without kltest prints a gradient of shape {found.shape}, not {truth.shape}"
        )
    return ""


def _row(report: Report, sampler: str, length: int) -> GradientRow | None:
    name = "bandit" if length == 1 else "sequence"
    rows = [row for row in report.gradients if (row.environment, row.sampler) == (name, sampler)]
    return next((row for row in rows if row.batch == 1), rows[0] if rows else None)
