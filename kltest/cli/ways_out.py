"""Ways out of a failed check, with exact syntax, and where it shows: for `kltest explain` and its page."""

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kltest.checks import Check

Ways = tuple[tuple[str, str], ...]
"""Places (command line, pyproject.toml, Python), and what to write there."""
LOSS = "losses.py:kl_penalty"
FLAGS = {"placement": "--placement", "sampler": "--sampler", "expect": "--expect"}
SETTINGS = 4
"""Settings of one library that are named one by one."""


def serious(check: "Check") -> str:
    """Return how serious a failure is."""
    if check.level == "warning":
        words = "A warning: on ordinary input the expected gradient is the declared one, so that it refutes nothing."
    else:
        of = (
            "logged value is not the KL"
            if check.code.startswith("KL6")
            else "expected gradient is not the declared one"
        )
        words = f"An error: on ordinary input the {of}, or changes with what it must not depend on, so that it refutes."
    return f"{words} {check.otherwise}".rstrip()


def other_level(check: "Check") -> Ways:
    """Return how to move the check to the other level, for all targets."""
    other = "error" if check.level == "warning" else "warning"
    return (
        ("pyproject.toml", f'[tool.kltest]\nlevels = {{ {check.code} = "{other}" }}'),
        ("Python", f'kltest.grade(loss, levels={{"{check.code}": "{other}"}})'),
    )


def declaration(check: "Check") -> Ways:
    """Return how to declare what the wrong loss follows; nothing if no declaration makes it right."""
    return _places(f"--expect '{check.declare}'", f'expect = "{check.declare}"', f'expect="{check.declare}"')


def expectation(check: "Check") -> Ways:
    """Return how to list the check as an expected failure."""
    code, reason = check.code, "why it is accepted"
    return _places(
        f'--expect-failure {code}="{reason}"',
        f'expected-failures = {{ {code} = "{reason}" }}',
        f'expected_failures={{"{code}": "{reason}"}}',
    )


def _places(flag: str, setting: str, argument: str) -> Ways:
    return (
        ("command line", f"kltest grade {LOSS} {flag}"),
        ("pyproject.toml", f'[tool.kltest]\ntargets = [{{ target = "{LOSS}", {setting} }}]'),
        ("Python", f"kltest.grade(loss, {argument})"),
    )


def on_ones_own(check: "Check") -> Ways:
    """Return how to see the check on one's own loss."""
    options = "".join(f" {FLAGS[name]} {value}" for name, value in check.options.items() if name in FLAGS)
    return (
        ("command line", f"kltest grade {LOSS} --select {check.code} --verbose{options}"),
        ("the example", f"kltest explain {check.code} --demo"),
    )


def libraries(check: "Check") -> str:
    """Return the recorded libraries in which the check failed, with their settings."""
    from kltest.scoreboard import recorded

    rows = recorded.read()
    newest = {row["library"]: row["version"] for row in reversed(rows)}
    rows = [row for row in rows if row["version"] == newest[row["library"]]]
    failed = [row for row in rows if check.code in (found["code"] for found in row["failed"])]
    words = []
    for (library, version), group in groupby(failed, key=itemgetter("library", "version")):
        names = [row["setting"] for row in group]
        more = f" and {len(names) - SETTINGS} more settings" if len(names) > SETTINGS else ""
        words.append(f"{library} {version} ({', '.join(names[:SETTINGS])}{more})")
    return f"{'; '.join(words)}." if words else "None of the recorded settings."
