"""Builds the paper: Typst reads the text from paper/ and every number and table from results."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kltest.errors import KltestError, UsageError
from kltest.files import write
from kltest.reproduce.checkout import Checkout

# How the text cites a number: #n("atlas", "bias", estimator: "k3-loss", digits: 2), the experiment first, then the
# quantity, then the columns that single it out; what says how to print it is no column.
CITATION = re.compile(
    r'#?\b(?:n|power)\(\s*"([\w-]+)"\s*,\s*"([^"]+)"((?:\s*,\s*[\w-]+:\s*(?:"[^"]*"|[^\s",()]+))*),?\s*\)'
)
COLUMN = re.compile(r'([\w-]+):\s*("[^"]*"|[^\s",()]+)')
FORMAT = ("digits", "figures", "percent")
Cited = tuple[str, tuple[tuple[str, Any], ...]]
# The date in the PDF's metadata, fixed so that the same text and results give the same bytes.
TIMESTAMP = 1_600_000_000


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
            "Run `kltest reproduce` again, or correct the text"
        )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(checkout.root / "paper", root, dirs_exist_ok=True)
        _stage(output, root / "data")
        try:
            pdf = typst.compile(
                str(root / "paper.typ"), root=folder, format="pdf", ignore_system_fonts=True, timestamp=TIMESTAMP
            )
        except typst.TypstError as error:
            raise KltestError(f"Typst cannot build the paper: {error}") from error
    return write(output / "paper" / "paper.pdf", pdf)


def written(checkout: Checkout) -> str:
    """The whole text of the paper, all of its files."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((checkout.root / "paper").rglob("*.typ")))


def cited(text: str) -> set[Cited]:
    """The numbers that the text cites: the experiment, and the columns of its table that single one out."""
    return {
        (experiment, _key({"quantity": quantity} | {name: json.loads(value) for name, value in COLUMN.findall(rest)}))
        for experiment, quantity, rest in CITATION.findall(text)
    }


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


def _stage(output: Path, data: Path) -> None:
    """Results beside the text, since Typst reads nothing outside its root."""
    for pattern in ("*/numbers.json", "*/settings.json", "*/*.csv", "figures/*.svg"):
        for path in output.glob(pattern):
            target = data / path.relative_to(output)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
