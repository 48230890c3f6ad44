"""Destinations of reports, `FORMAT[:PATH]`: tried before the work, written after it.

GitHub Actions keeps the summary of a step in a file (its path is in GITHUB_STEP_SUMMARY) to which other commands of the
step write as well. Reports are appended to it, and the format `github` writes a summary there by itself.
"""

import os
import re
import shutil
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kltest import files
from kltest.errors import KltestError, UsageError
from kltest.render import FORMATS, PLAIN, Terminal, known, render, render_changes
from kltest.render.changes import Changes
from kltest.report import Report

SUMMARY = "GITHUB_STEP_SUMMARY"
# Formats that show the words of a loss, such as an error message, line by line.
WORDS = ("text", "markdown")


@dataclass(frozen=True)
class Destination:
    """A format and its file (None: standard output); `adds` if the file is appended to."""

    form: str
    path: Path | None = None
    adds: bool = False


def destinations(texts: Iterable[str], formats: Collection[str] = FORMATS) -> list[Destination]:
    """Return the destinations that `--output` names, in one of the `formats`, found to be writable.

    Raises:
        UsageError: If a format is unknown or a path cannot be written.
    """
    found: list[Destination] = []
    texts = list(texts)
    summary = os.environ.get(SUMMARY, "")
    if summary and "github" in texts and not any(text.endswith(f":{summary}") for text in texts):
        texts.append(f"markdown:{summary}")
    for text in texts:
        form, colon, path = text.partition(":")
        known(form, formats)
        if colon and not path:
            raise UsageError(f"--output {text!r} names no file after the colon; give {form}:PATH, or {form} alone")
        file = Path(path) if path not in ("", "-") else None
        destination = Destination(form, file, adds=bool(path) and path == summary)
        if destination.path is not None:
            _try(destination.path)
            if any(other.path is not None and _same(other.path, destination.path) for other in found):
                raise UsageError(f"--output: two formats cannot both be written to {path}")
        if destination not in found:
            found.append(destination)
    return found


def with_page(texts: Sequence[str]) -> tuple[list[str], Path]:
    """Return `--output` with an HTML file among its destinations, one in a temporary folder if there is none."""
    for text in texts:
        form, _, path = text.partition(":")
        if form == "html" and path not in ("", "-"):
            return [*texts], Path(path)
    page = Path(tempfile.mkdtemp(prefix="kltest-"), "report.html")
    return [*texts, f"html:{page}"], page


def show(page: Path) -> None:
    """Open a page in the browser, or say where it is."""
    if not webbrowser.open(page.resolve().as_uri()):
        print(f"kltest: no browser could be started; the report is {page}", file=sys.stderr)


def write(
    reports: Sequence[Report],
    where: Sequence[Destination],
    changes: Changes | None = None,
    *,
    verbose: bool = False,
    quiet: bool = False,
) -> None:
    """Write the reports, and the changes after them in the formats that show them, else on standard error.

    Text is a report's first screen, all of it if `verbose`, one line if `quiet`; other formats are whole.

    Raises:
        KltestError: If a file could not be written, after all others are.
    """

    def text(destination: Destination, shown: Terminal) -> str:
        written = render(destination.form, reports, replace(shown, quiet=quiet))
        words = render_changes(destination.form, changes, shown) if changes else ""
        return f"{written}\n{words}" if words else written

    try:
        deliver(where, text, verbose=verbose)
    finally:
        if changes and not any(render_changes(each.form, changes) for each in where):
            sys.stderr.write(render_changes("text", changes))


def deliver(where: Iterable[Destination], text: Callable[[Destination, Terminal], str], *, verbose: bool) -> None:
    """Write the text of each destination; KltestError if one could not be written, after all others are."""
    failed = []
    for destination in where:
        written = text(destination, replace(terminal() if destination.path is None else PLAIN, verbose=verbose))
        if destination.path is None and destination.form in WORDS and os.environ.get("GITHUB_ACTIONS") == "true":
            written = _no_command(written)
        data = written.encode("utf-8", "backslashreplace")
        try:
            if destination.path is None:
                print_bytes(data)
            elif destination.adds or (destination.path.exists() and not destination.path.is_file()):
                with destination.path.open("ab" if destination.adds else "wb") as file:  # a pipe or a device, too
                    file.write(data)
            else:  # an earlier report stays if there is no room for this one
                files.write(destination.path.resolve() if destination.path.is_symlink() else destination.path, data)
        except BrokenPipeError:
            raise
        except OSError as error:
            failed.append(f"cannot write {destination.path or 'standard output'}: {error.strerror or error}")
        except KltestError as error:
            failed.append(str(error))
    if failed:
        raise KltestError("the report is not written: " + "; ".join(failed))


def print_bytes(data: bytes) -> None:
    """Write to standard output in UTF-8, as JSON and XML need it, whatever the encoding of the terminal."""
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:
        sys.stdout.write(data.decode("utf-8"))
    else:
        sys.stdout.flush()
        stream.write(data)
    sys.stdout.flush()


def _no_command(text: str) -> str:
    """The text without commands: the runner of GitHub obeys lines that begin with `::` or contain `##[`."""
    return re.sub(r"(?m)^(\s*):(?=:)", r"\1\:", text).replace("##[", "#\\#[")


def terminal() -> Terminal:
    """Return width and colours of standard output, plain text if it is no terminal."""
    if not sys.stdout.isatty():
        return PLAIN
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Terminal(width=shutil.get_terminal_size((PLAIN.width, 24)).columns, colour=colour)


def _try(path: Path) -> None:
    """Open the file for writing without changing it; a file that this creates is removed again."""
    try:
        existed = path.exists()
        if existed and not path.is_file() and not path.is_dir():
            # Opening a pipe would wait for its reader.
            if not os.access(path, os.W_OK):
                raise PermissionError("permission denied")
            return
        path.open("ab").close()
        if not existed:
            path.unlink()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--output: {str(path)!r} cannot be written ({reason}); choose another path") from None


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other) and not (one.exists() and not one.is_file())
