"""`kltest explain`: a check, an estimator or a named gradient in full, and the ways out of a failed check.

Ways out are written as they work: on the command line, in pyproject.toml and in Python.
"""

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated

import typer

from kltest.cli.destinations import print_bytes
from kltest.cli.listing import environments, follows, placement
from kltest.errors import UsageError, did_you_mean
from kltest.estimators import registry
from kltest.estimators.spec import Spec
from kltest.render.tables import wrap
from kltest.truth import ATLAS, NamedGradient
from kltest.truth.atlas import named

if TYPE_CHECKING:
    from kltest.checks import Check

Ways = tuple[tuple[str, str], ...]
"""Places (command line, pyproject.toml, Python), and what to write there."""
LOSS = "losses.py:kl_penalty"
SAMPLERS = {"current": "sampler = policy", "stale": "stale sampler"}
FLAGS = {"placement": "--placement", "sampler": "--sampler", "expect": "--expect"}
SETTINGS = 4
"""Settings of one library that are named one by one."""
MOVED = "Its level may be moved, for all targets; a gradient that is not the declared one refutes all the same:"
EXPECTED = """Keep the loss as it is and say why: the report names it, the failure does not refute, and a pass does,
so that the entry cannot outlive its reason."""
NOT_DECLARED = """No declaration makes it right: it is not about which named gradient is followed."""


def command(
    name: Annotated[str, typer.Argument(metavar="CODE|NAME", help="A check's code, an estimator or a named gradient.")],
    demo: Annotated[
        bool, typer.Option("--demo", help="Run a check's pitfall in the smallest environment that shows it.")
    ] = False,
) -> int:
    print_bytes((demonstrate(name) if demo else explain(name)).encode("utf-8"))
    return 0


@dataclass(frozen=True)
class Section:
    """One part of a check's description: a title, and text, code, what to write in several places, or a list."""

    title: str
    text: str = ""
    code: str = ""
    ways: Ways = ()
    items: tuple[str, ...] = ()


def parts(check: "Check") -> list[Section]:
    """Return the description of a check in the order of reading."""
    called = ", ".join(f"{name}={value!r}" for name, value in check.options.items())
    declared = f"If that is what you want, say so; the wrong loss above follows {check.declare}."
    found = [
        Section("What", check.what),
        Section("Why", check.why),
        Section("Example", check.example),
        Section("Wrong", f"Graded with {called}." if called else "", code=check.wrong_code),
        Section("How serious", f"{serious(check)} {MOVED}", ways=other_level(check)),
        Section("Way out 1: fix it", check.fix, code=check.fixed_code),
        Section(
            "Way out 2: declare what it follows", declared if check.declare else NOT_DECLARED, ways=declaration(check)
        ),
        Section("Way out 3: expect the failure", EXPECTED, ways=expectation(check)),
        Section("See it on your own loss", ways=on_ones_own(check)),
        Section("Recorded libraries that have it", libraries(check)),
        Section("Sources", items=tuple(source for source in check.sources if source)),
    ]
    if check.full_fix:
        code = check.remedy({"ref_logits"}).partition("\n\n")[2]
        found.insert(6, Section("The same with whole distributions", check.full_fix, code=code))
    return found


def serious(check: "Check") -> str:
    """Return how serious a failure is."""
    wrong = "logged value is not the KL" if check.code[2] == "6" else "expected gradient is not the declared one"
    words = f"An error: on ordinary input the {wrong}, or changes with what it must not depend on, so that it refutes."
    if check.level == "warning":
        words = "A warning: on ordinary input the expected gradient is the declared one, so that it refutes nothing."
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
    if not check.declare:
        return ()
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


def demonstrate(name: str) -> str:
    """Return the numbers of a check's pitfall. Raises UsageError if no check has that name."""
    from kltest.checks import CHECKS

    check = _find(name.strip())
    if check is None:
        hint = did_you_mean(name.strip(), CHECKS)
        raise UsageError(f"--demo runs the demonstration of a check; {hint}no check is called {name!r}")
    return f"{check.code} {check.name}\n{check.title}\n\n{check.demonstrate().text()}\n"


def explain(name: str) -> str:
    """Return the description of a name. Raises UsageError, with the nearest names, for an unknown one."""
    from kltest.checks import CHECKS

    wanted = name.strip()
    folded = wanted.casefold()
    if check := _find(wanted):
        end = f"kltest explain {check.code} --demo runs the pitfall in the smallest environment that shows it."
        return _written([f"{check.code} {check.name}", check.title], parts(check)) + f"\n{end}\n"
    if owner := _estimator_names().get(folded.replace("_", "-")):
        return _estimator(registry(None)[owner].spec)
    with suppress(UsageError):
        return _gradient(named(folded.replace("-", "_")))
    known = [*CHECKS, *(check.name for check in CHECKS.values()), *_estimator_names(), *ATLAS]
    raise UsageError(
        f"there is no check, estimator or named gradient called {name!r}; {did_you_mean(wanted, known)}"
        "`kltest list` shows them all (environments have no page of their own)"
    )


def _find(name: str) -> "Check | None":
    from kltest.checks import CHECKS

    return next((check for check in CHECKS.values() if name.casefold() in (check.code.casefold(), check.name)), None)


def _estimator_names() -> Mapping[str, str]:
    """The name behind every name and alias."""
    specs = [estimator.spec for estimator in registry(None).values()]
    return {name: spec.name for spec in specs for name in (*spec.aliases, spec.name)}


def _written(heads: Sequence[str], sections: Sequence[Section]) -> str:
    """Return lines and then the sections that have any content."""
    lines = list(heads)
    for part in sections:
        if part.text or part.code or part.ways or part.items:
            lines += ["", part.title, *(wrap(part.text, indent="  ") if part.text else ())]
        if part.code:
            lines += ["", *textwrap.indent(part.code, " " * 4).splitlines()]
        for place, written in part.ways:
            lines += ["", f"  {place}:", *textwrap.indent(written, " " * 4).splitlines()]
        lines += [f"  {item}" for item in part.items]
    return "\n".join(lines) + "\n"


def _estimator(spec: Spec) -> str:
    aliases = f" (also {', '.join(spec.aliases)})" if spec.aliases else ""
    gradients = (
        f"{words}, {environment}: {follows(spec, environment, sampler)}"
        for sampler, words in SAMPLERS.items()
        for environment in environments(spec.identified.get(sampler, {}))
    )
    return _written(
        [f"{spec.name}{aliases}: an estimator, placement {placement(spec)}", spec.formula],
        [
            Section("Claims", spec.claims),
            Section("Known to be false", spec.known_false),
            Section("Its expected gradient", items=tuple(gradients)),
            Section("Sources", items=(spec.source,) if spec.source else ()),
        ],
    )


def _gradient(row: NamedGradient) -> str:
    followed = [
        f"{estimator.spec.name} ({environment})"
        for estimator in registry(None).values()
        for environment, combination in estimator.spec.identified.get("current", {}).items()
        if combination is not None and set(combination) == {row.name}
    ]
    return _written(
        [f"{row.name}: a named gradient", row.formula],
        [
            Section("Meaning", f"{row.meaning[:1].upper()}{row.meaning[1:]}."),
            Section("Followed, with the sampler equal to the policy, by", ", ".join(followed)),
        ],
    )
