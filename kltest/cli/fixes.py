"""`--fix`: whether a fix was asked for, and the files into which fixes are written with `--fix=apply`."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kltest import files
from kltest.errors import KltestError, UsageError
from kltest.report import Fix, Report

if TYPE_CHECKING:
    from kltest.scanning.rows import Row

SHOW, APPLY = "show", "apply"


def asked(fix: str | None) -> bool:
    """Return True if fixes were asked for; UsageError if for anything but to be shown or applied."""
    if fix not in (None, SHOW, APPLY):
        raise UsageError(f"--fix={fix}: write --fix to see the change, --fix=apply to have it written")
    return fix is not None


def applied(found: "Sequence[Report | Row]") -> Iterator[str]:
    """Write the first fix of each report, or finding, into its file, and yield a sentence on each."""
    for one in found:
        if one.fixes:
            yield write(one.fixes[0])
        elif one.advice:
            yield f"{one.target if isinstance(one, Report) else one.spot}: nothing was written: {one.advice}"


def write(fix: Fix) -> str:
    """Write one fix, unless its file has changed since it was read; return what was done, in words."""
    path = Path(fix.file).resolve()
    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != fix.digest:
            return f"{fix.file} has changed since it was read, and was not written; ask for the fix again"
        lines = io.StringIO(data.decode(), newline="").readlines()
        lines[fix.first - 1 : fix.last] = [fix.text]
        files.write(path, "".join(lines))
    except OSError as error:
        return f"{fix.file} was not written: {error.strerror}"
    except KltestError as error:
        return f"{fix.file} was not written: {error}"
    return f"{fix.file}:{fix.first} was written: {fix.words}"
