"""The command line, called in this process, and gradings that need no loss."""

import json
from importlib.resources import files
from typing import Any

import jsonschema
from click.testing import Result
from typer.testing import CliRunner

from kltest.cli import app
from kltest.grading.jobs import Graded
from kltest.report import Report

SCHEMA = json.loads((files("kltest.render") / "grade-2.schema.json").read_text(encoding="utf-8"))
GRADED = "kltest.cli.grade.graded"
"""The function that grades for the command line."""


def call(*arguments: str, code: int | None = None) -> Result:
    """Run a command, without a traceback whatever it is; with `code` it must end so."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert "Traceback" not in result.output
    assert code is None or result.exit_code == code, (arguments, result.output)
    return result


def refused(*arguments: str) -> str:
    """Return what a usage error says: exit 2, nothing on standard output."""
    result = call(*arguments, code=2)
    assert result.stdout == ""
    assert result.stderr.strip()
    return " ".join(result.stderr.split())


def graded(*arguments: str, code: int | None = None) -> Any:
    """Return the JSON of a grading, which holds to the schema."""
    found = json.loads(call("grade", *arguments, "--output", "json", code=code).stdout)
    jsonschema.validate(found, SCHEMA)
    return found


def canned(*verdicts: str) -> Any:
    """Return a stand-in for grading: these verdicts for the targets, "confirmed" if there are more."""

    def reports(jobs, *others, **options):
        for number, job in enumerate(jobs):
            verdict = verdicts[number] if number < len(verdicts) else "confirmed"
            report = Report(job.name, "reverse_kl", "loss", 0, {}, verdict, "per-row", "float64", error="x")
            yield Graded(number, report, "value")

    return reports


def toml(value: Any) -> str:
    """Return a value in TOML's inline form; TypeError if it has none."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(name)} = {toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    raise TypeError(value)
