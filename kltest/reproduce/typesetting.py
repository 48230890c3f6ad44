"""Figures and the paper, from results alone.

Each script of figures/ has `draw(rows) -> Figure`. `READS` names the experiments whose results it is called with, a
frame each (if it is missing: the one that is called like the figure). The paper is typeset with Typst, which reads the
text from paper/ and every number and table from results.
"""

import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kltest.errors import KltestError, UsageError
from kltest.files import write
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.frames import frame

# Metadata that would differ between two drawings, by format; random names are ruled out by the style's hash salt.
DATES: dict[str, tuple[str, ...]] = {"pdf": ("CreationDate", "ModDate"), "svg": ("Date",), "png": ()}
# What the text reads of results.
RESULTS = ("*/numbers.json", "*/settings.json", "*/*.csv", "figures/*.svg")
# Citation of a number in the text: #n("atlas", "bias", estimator: "k3-loss", digits: 2), the experiment first, then the
# quantity, then the columns that single it out; what says how to print it is no column.
CITATION = re.compile(
    r'#?\b(?:n|power)\(\s*"([\w-]+)"\s*,\s*"([^"]+)"((?:\s*,\s*[\w-]+:\s*(?:"[^"]*"|[^\s",()]+))*),?\s*\)'
)
COLUMN = re.compile(r'([\w-]+):\s*("[^"]*"|[^\s",()]+)')
FORMAT = ("digits", "figures", "percent")
Cited = tuple[str, tuple[tuple[str, Any], ...]]
# The date in the PDF's metadata, fixed so that the same text and results give the same bytes.
TIMESTAMP = 1_600_000_000


def sources(checkout: Checkout, name: str) -> tuple[str, ...]:
    """Return the experiments that a figure reads."""
    return getattr(checkout.load("figures", name), "READS", (name,))


def draw(checkout: Checkout, name: str, output: Path) -> list[Path]:
    """Draw one figure from the results in `output` and write it as PDF, SVG and PNG to output/figures/."""
    # Matplotlib chooses its back end when it is first imported; these drawings need no display.
    os.environ.setdefault("MPLBACKEND", "agg")
    # Fonts and resolution count when a figure is saved as much as when it is drawn.
    with checkout.load("figures", "style").styled():
        figure = drawn(checkout, name, output)
        return [write(output / "figures" / f"{name}.{kind}", render(figure, kind)) for kind in DATES]


def drawn(checkout: Checkout, name: str, output: Path) -> Any:
    """Return one figure, drawn from the results in `output`; whoever calls sets the style."""
    files = [output / source / f"{source}.json" for source in sources(checkout, name)]
    try:
        rows = [frame(json.loads(file.read_text(encoding="utf-8"))) for file in files]
    except FileNotFoundError as error:
        raise KltestError(f"there is no {error.filename} to draw; `kltest reproduce` makes it") from error
    return checkout.load("figures", name).draw(*rows)


def render(figure: Any, kind: str) -> bytes:
    """Return the figure as a file's content: the same bytes every time, so without a date."""
    content = io.BytesIO()
    figure.savefig(content, format=kind, metadata=dict.fromkeys(DATES[kind]))
    return content.getvalue()


def typeset(checkout: Checkout, output: Path) -> Path:
    """Write output/paper/paper.pdf. UsageError if Typst is not installed or results are missing; KltestError, with
    the place in the text, if Typst refuses it.
    """
    try:
        import typst
    except ImportError as error:
        raise UsageError("the paper needs Typst: python -m pip install typst") from error
    text = written(checkout)
    for experiment in sorted({experiment for experiment, _ in cited(text)}):
        if not (output / experiment / "numbers.json").is_file():
            raise UsageError(f"there are no results of {experiment} in {output}; `kltest reproduce` makes them")
    if missing := uncovered(text, output):
        raise UsageError(
            f"the paper cites numbers that the results in {output} do not contain: {'; '.join(missing)}. "
            "Run `kltest reproduce --retry-failed`, which tries again what failed before, or correct the text"
        )
    with staged(checkout, output) as root:
        try:
            pdf = typst.compile(
                str(root / "paper.typ"), root=str(root), format="pdf", ignore_system_fonts=True, timestamp=TIMESTAMP
            )
        except typst.TypstError as error:
            raise KltestError(f"Typst cannot build the paper: {error}") from error
    return write(output / "paper" / "paper.pdf", pdf)


@contextmanager
def staged(checkout: Checkout, output: Path) -> Iterator[Path]:
    """A folder with the text and what it reads, for Typst reads nothing outside its root."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(checkout.root / "paper", root, dirs_exist_ok=True)
        for source, patterns in ((output, RESULTS), (checkout.root, ("benchmarks/*.csv",))):
            for path in (path for pattern in patterns for path in source.glob(pattern)):
                target = root / "data" / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        yield root


def written(checkout: Checkout) -> str:
    """The whole text of the paper, all of its files."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((checkout.root / "paper").rglob("*.typ")))


def cited(text: str) -> set[Cited]:
    """The numbers that the text cites: the experiment, and the columns of its table that single one out."""
    found = set()
    for experiment, quantity, rest in CITATION.findall(text):
        columns = {name: json.loads(value) for name, value in COLUMN.findall(rest)}
        found.add((experiment, _key({"quantity": quantity} | columns)))
    return found


def uncovered(text: str, output: Path) -> list[str]:
    """The numbers that the text cites and the results do not have, as experiment: quantity, column value, …"""
    citations, known = cited(text), set()
    for experiment in {experiment for experiment, _ in citations}:
        path = output / experiment / "numbers.json"
        known |= {(experiment, _key(row)) for row in json.loads(path.read_text())} if path.is_file() else set()
    return sorted(
        f"{experiment}: {', '.join(str(value) if name == 'quantity' else f'{name} {value}' for name, value in key)}"
        for experiment, key in citations - known
    )


def _key(row: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    found = {name: value for name, value in row.items() if name not in (*FORMAT, "value")}
    return (("quantity", found.pop("quantity")), *sorted(found.items()))
