"""`kltest explain`: a check, an estimator or a named gradient in full."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kltest.cli.listing import environments, follows, placement
from kltest.cli.ways_out import Ways, declaration, expectation, libraries, on_ones_own, other_level, serious
from kltest.errors import UsageError, did_you_mean
from kltest.estimators import registry
from kltest.estimators.spec import Spec
from kltest.render.tables import wrap
from kltest.truth import ATLAS, NamedGradient

if TYPE_CHECKING:
    from kltest.checks import Check

MOVED = "Its level may be moved, for all targets; a gradient that is not the declared one refutes all the same:"
EXPECTED = """Keep the loss as it is and say why: the report names it, the failure does not refute, and a pass does,
so that the entry cannot outlive its reason."""
NOT_DECLARED = """No declaration makes it right: it is not about which named gradient is followed."""
SAMPLERS = {"current": "sampler = policy", "stale": "stale sampler"}


def command(
    name: Annotated[str, typer.Argument(metavar="CODE|NAME", help="A check's code, an estimator or a named gradient.")],
    demo: Annotated[
        bool, typer.Option("--demo", help="Run a check's pitfall in the smallest environment that shows it.")
    ] = False,
) -> int:
    from kltest.cli.destinations import say

    say((demonstrate(name) if demo else explain(name)).encode("utf-8"))
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
    return [
        Section("What", check.what),
        Section("Why", check.why),
        Section("Example", check.example),
        Section("Wrong", f"Graded with {called}." if called else "", code=check.wrong_code),
        Section("How serious", f"{serious(check)} {MOVED}", ways=other_level(check)),
        Section("Way out 1: fix it", check.fix, code=check.fixed_code),
        *_full_fix(check),
        Section("Way out 2: declare what it follows", *_declared(check)),
        Section("Way out 3: expect the failure", EXPECTED, ways=expectation(check)),
        Section("See it on your own loss", ways=on_ones_own(check)),
        Section("Recorded libraries that have it", libraries(check)),
        Section("Sources", items=tuple(source for source in check.sources if source)),
    ]


def _full_fix(check: "Check") -> list[Section]:
    """Return the fix of a loss that takes whole next-token distributions, if it differs."""
    code = check.remedy({"ref_logits"}).partition("\n\n")[2]
    return [Section("The same with whole distributions", check.full_fix, code=code)] if check.full_fix else []


def _declared(check: "Check") -> tuple[str, str, Ways]:
    """Return text, code and what to write, for a part."""
    if not check.declare:
        return NOT_DECLARED, "", ()
    return f"If that is what you want, say so; the wrong loss above follows {check.declare}.", "", declaration(check)


def demonstrate(name: str) -> str:
    """Return the numbers of a check's pitfall. Raises UsageError if no check has that name."""
    from kltest.checks import CHECKS

    check = _find(name.strip())
    if check is None:
        hint = did_you_mean(name.strip(), CHECKS)
        raise UsageError(
            f"--demo runs the demonstration of a check, and no check is called {name!r}; {hint}".rstrip("; ")
        )
    return f"{check.code} {check.name}\n{check.title}\n\n{check.demonstrate().text()}\n"


def explain(name: str) -> str:
    """Return the description of a name. Raises UsageError, with the nearest names, for an unknown one."""
    from kltest.checks import CHECKS

    wanted = name.strip()
    folded = wanted.casefold()
    if check := _find(wanted):
        words = _check_words(check)
    elif owner := _estimator_names().get(folded.replace("_", "-")):
        words = _estimator_words(registry()[owner].spec)
    elif row := ATLAS.get(folded.replace("-", "_")):
        words = _gradient_words(row)
    else:
        hint = did_you_mean(wanted, [*CHECKS, *(check.name for check in CHECKS.values()), *_estimator_names(), *ATLAS])
        raise UsageError(
            f"there is no check, estimator or named gradient called {name!r}; {hint}`kltest list` shows them all "
            "(environments have no page of their own)"
        )
    return "\n".join(words) + "\n"


def _find(name: str) -> "Check | None":
    from kltest.checks import CHECKS

    return next((check for check in CHECKS.values() if name.casefold() in (check.code.casefold(), check.name)), None)


def _estimator_names() -> Mapping[str, str]:
    """The name behind every name and alias."""
    specs = [estimator.spec for estimator in registry().values()]
    return {name: spec.name for spec in specs for name in (*spec.aliases, spec.name)}


def _check_words(check: "Check") -> Iterator[str]:
    yield f"{check.code} {check.name}"
    yield check.title
    for part in parts(check):
        if part.text or part.code or part.ways:
            yield from ("", part.title, *(wrap(part.text, indent="  ") if part.text else ()))
        if part.code:
            yield from ("", *textwrap.indent(part.code, " " * 4).splitlines())
        for place, written in part.ways:
            yield from ("", f"  {place}:", *textwrap.indent(written, " " * 4).splitlines())
        yield from _listed(part.title, part.items)
    yield from ("", f"kltest explain {check.code} --demo runs the pitfall in the smallest environment that shows it.")


def _estimator_words(spec: Spec) -> Iterator[str]:
    aliases = f" (also {', '.join(spec.aliases)})" if spec.aliases else ""
    yield f"{spec.name}{aliases}: an estimator, placement {placement(spec)}"
    yield spec.formula
    yield from _paragraph("Claims", spec.claims)
    yield from _paragraph("Known to be false", spec.known_false)
    yield ""
    yield "Its expected gradient"
    for sampler, words in SAMPLERS.items():
        for environment in environments(spec.identified.get(sampler, {})):
            yield f"  {words}, {environment}: {follows(spec, environment, sampler)}"
    yield from _listed("Sources", (spec.source,))


def _gradient_words(row: NamedGradient) -> Iterator[str]:
    yield f"{row.name}: a named gradient"
    yield row.formula
    yield from _paragraph("Meaning", f"{row.meaning[:1].upper()}{row.meaning[1:]}.")
    followed = [
        f"{estimator.spec.name} ({environment})"
        for estimator in registry().values()
        for environment, combination in estimator.spec.identified.get("current", {}).items()
        if combination is not None and set(combination) == {row.name}
    ]
    if followed:
        yield from _paragraph("Followed, with the sampler equal to the policy, by", ", ".join(followed))


def _paragraph(title: str, text: str) -> Iterator[str]:
    if text:
        yield from ("", title, *wrap(text, indent="  "))


def _listed(title: str, items: tuple[str, ...]) -> Iterator[str]:
    if any(items):
        yield from ("", title, *(f"  {item}" for item in items if item))
