"""Standalone programs of settings, run and compared with what grading found before they are given out."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kltest.adapters import NAMES, Adapter, Setting
from kltest.adapters.standalone import LENGTH, environment
from kltest.counterexample.environment import kind
from kltest.errors import KltestError
from kltest.grading.isolated import Child, without_kltest
from kltest.report import Report
from kltest.truth import combine

SECONDS = 300.0
# Relative to the norm of the gradient: rounding, and coefficients that are given to a few digits.
AGREE = {"float64": 1e-6, "float32": 2e-3}


class ProgramError(KltestError):
    """A program did not run, or what it printed is not what grading found."""


def standalone(library: Adapter, setting: Setting, batches: Iterable[int]) -> str:
    """Return the program that an adapter writes, "" if none; in pairs if no batch of one rollout was graded."""
    if library.standalone is None:
        return ""
    alone = min(batches, default=1) == 1
    return (library.standalone(setting) if alone else library.standalone(setting, batch=2)).strip()


def program(library: Adapter, setting: Setting, report: Report) -> dict[str, Any]:
    """Return a setting's program, run already, as fields of its row: the adapter's, else the counter-example's.

    A `program` that the adapter can write again is not stored. `program_note` says why there is none, or why it was not
    compared with what was graded.
    """
    fields = {"program": "", "program_of_adapter": False, "program_note": ""}
    example, known = report.smallest or report.example, library.name in NAMES
    if not report.gradients:
        return fields
    if code := standalone(library, setting, (row.batch for row in report.gradients)):
        try:
            note = compared(_printed(code), report, stale="\nq = " in code)
        except ProgramError as error:
            return {**fields, "program_note": str(error)}
        return {"program": "" if known else code, "program_of_adapter": known, "program_note": note}
    if example is None or setting.target.startswith("kltest."):
        return {**fields, "program_note": "no program shows it without kltest"}
    # The grader ran its program before it gave it out.
    return {**fields, "program": example.code, "program_note": example.note}


def _printed(code: str) -> np.ndarray:
    """The gradient on the last line that a program prints, run in a folder of its own.

    It runs in a child of this process, which has imported the library already.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(code, encoding="utf-8")
        with Child(without_kltest, str(file), folder) as child:
            step = child.step(SECONDS)
    if step.kind != "value":
        raise ProgramError(f"the standalone program {step.message}")
    last = (str(step.value).strip().splitlines() or ["nothing"])[-1]
    try:
        return np.array(json.loads(last), dtype=float)
    except (ValueError, TypeError):
        raise ProgramError(f"the standalone program does not end with its gradient: {last[:100]}") from None


def compared(found: np.ndarray, report: Report, *, stale: bool) -> str:
    """Compare the gradient that a program printed with the identified one; return a note if that is unnamed.

    Raises:
        ProgramError: they differ.
    """
    instance = environment(stale=stale, actions=found.shape[-1]).instance()
    wanted = kind(LENGTH, ends=False), "stale" if stale else "current"
    rows = [row for row in report.gradients if (row.environment, row.sampler) == wanted]
    row = min(rows, key=lambda row: row.batch, default=None)
    if row is None or row.identified is None:
        return "its gradient is unnamed, so there is nothing to compare it with"
    truth = combine(row.identified, instance)
    scale = max(float(np.linalg.norm(truth)), float(np.linalg.norm(combine({"reverse_kl": 1.0}, instance))))
    if found.shape != truth.shape:
        raise ProgramError(f"the standalone program prints a gradient of shape {found.shape}, not {truth.shape}")
    if not (off := float(np.linalg.norm(found - truth)) / scale) <= AGREE[report.dtype]:
        raise ProgramError(
            f"the standalone program prints a gradient that differs from {row.identified} by {off:.2g} of its norm"
        )
    return ""
