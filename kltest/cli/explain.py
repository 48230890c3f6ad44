"""`kltest explain`: a check, an estimator or a named gradient in full, from the table it stands in."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kltest.checks import CHECKS, Check
from kltest.cli.listing import follows, placement, worlds
from kltest.errors import UsageError, did_you_mean
from kltest.estimators import registry
from kltest.estimators.spec import Spec
from kltest.truth import ATLAS, NamedGradient

WIDTH = 100
SAMPLERS = {"current": "sampler = policy", "stale": "stale sampler"}


@dataclass(frozen=True)
class Part:
    """One part of what is said of a check: a title, and words, or lines of code, or lines of a list."""

    title: str
    text: str = ""
    code: str = ""
    items: tuple[str, ...] = ()


def parts(check: Check) -> list[Part]:
    """Everything that a check says of its pitfall, in the order in which it is told."""
    called = ", ".join(f"{name}={value!r}" for name, value in check.options.items())
    return [
        Part("What", check.what),
        Part("Why", check.why),
        Part("Example", check.example),
        Part("Wrong", f"Graded with {called}." if called else "", code=check.wrong_code),
        Part("Fix", check.fix, code=check.fixed_code),
        Part("Sources", items=tuple(source for source in check.sources if source)),
    ]


def demonstrate(name: str) -> str:
    """The numbers of a check's pitfall in the smallest world that shows it; UsageError for a name of no check."""
    check = _find(name.strip())
    if check is None:
        hint = did_you_mean(name.strip(), CHECKS)
        raise UsageError(
            f"--demo runs the demonstration of a check, and no check is called {name!r}; {hint}".rstrip("; ")
        )
    return f"{check.code} {check.name}\n{check.title}\n\n{check.demonstrate().text()}\n"


def explain(name: str) -> str:
    """Everything known under a name; UsageError, with the nearest names, for one that nobody has."""
    wanted = name.strip()
    for found in (_check(wanted), _estimator(wanted), _gradient(wanted)):
        if found is not None:
            return "\n".join(found) + "\n"
    hint = did_you_mean(wanted, [*CHECKS, *(check.name for check in CHECKS.values()), *_estimator_names(), *ATLAS])
    raise UsageError(
        f"there is no check, estimator or named gradient called {name!r}; {hint}`kltest list` shows them all"
    )


def _find(name: str) -> Check | None:
    folded = name.casefold()
    return next((check for check in CHECKS.values() if folded in (check.code.casefold(), check.name)), None)


def _check(name: str) -> Iterator[str] | None:
    check = _find(name)
    return None if check is None else _check_words(check)


def _estimator(name: str) -> Iterator[str] | None:
    owner = _estimator_names().get(name.casefold().replace("_", "-"))
    return None if owner is None else _estimator_words(registry()[owner].spec)


def _gradient(name: str) -> Iterator[str] | None:
    row = ATLAS.get(name.casefold().replace("-", "_"))
    return None if row is None else _gradient_words(row)


def _estimator_names() -> Mapping[str, str]:
    """Names and aliases, and the name that each stands for."""
    specs = [estimator.spec for estimator in registry().values()]
    return {name: spec.name for spec in specs for name in (*spec.aliases, spec.name)}


def _check_words(check: Check) -> Iterator[str]:
    yield f"{check.code} {check.name}"
    yield check.title
    for part in parts(check):
        if part.text or part.code:
            yield from ("", part.title, *_wrapped(part.text))
        if part.code:
            yield from ("", *textwrap.indent(part.code, " " * 4).splitlines())
        yield from _listed(part.title, part.items)
    yield from ("", f"kltest explain {check.code} --demo runs the pitfall in the smallest world that shows it.")


def _estimator_words(spec: Spec) -> Iterator[str]:
    aliases = f" (also {', '.join(spec.aliases)})" if spec.aliases else ""
    yield f"{spec.name}{aliases}: an estimator, placement {placement(spec)}"
    yield spec.formula
    yield from _paragraph("Claims", spec.claims)
    yield from _paragraph("Known to be false", spec.known_false)
    yield ""
    yield "Its expected gradient"
    for sampler, words in SAMPLERS.items():
        for world in worlds(spec.identified.get(sampler, {})):
            yield f"  {words}, {world}: {follows(spec, world, sampler)}"
    yield from _listed("Sources", (spec.source,))


def _gradient_words(row: NamedGradient) -> Iterator[str]:
    yield f"{row.name}: a named gradient"
    yield row.formula
    yield from _paragraph("Meaning", f"{row.meaning[:1].upper()}{row.meaning[1:]}.")
    followed = [
        f"{estimator.spec.name} ({world})"
        for estimator in registry().values()
        for world, combination in estimator.spec.identified.get("current", {}).items()
        if combination is not None and set(combination) == {row.name}
    ]
    if followed:
        yield from _paragraph("Followed, with the sampler equal to the policy, by", ", ".join(followed))


def _paragraph(title: str, text: str) -> Iterator[str]:
    if text:
        yield from ("", title, *_wrapped(text))


def _wrapped(text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"  {line}" for line in lines]


def _listed(title: str, items: tuple[str, ...]) -> Iterator[str]:
    if any(items):
        yield from ("", title, *(f"  {item}" for item in items if item))
