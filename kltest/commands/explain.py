"""`kltest explain`: a check, an estimator or a named gradient in full, from the table it stands in."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from kltest.commands.listing import follows, placement, worlds
from kltest.errors import UsageError
from kltest.estimators import registry
from kltest.estimators.spec import Spec
from kltest.grading.checks import CHECKS, Check
from kltest.suggestions import did_you_mean
from kltest.truth import ATLAS, NamedGradient

WIDTH = 100
SAMPLERS = {"current": "sampler = policy", "stale": "stale sampler"}


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


def _check(name: str) -> Iterator[str] | None:
    folded = name.casefold()
    found = [check for check in CHECKS.values() if folded in (check.code.casefold(), check.name)]
    return _check_words(found[0]) if found else None


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
    parts = {"What": check.what, "Why": check.why, "Example": check.example, "Fix": check.fix}
    for title, text in parts.items():
        yield from _paragraph(title, text)
    yield from _sources(check.sources)


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
    yield from _sources((spec.source,))


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
        lines = textwrap.wrap(text, WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        yield from ("", title, *(f"  {line}" for line in lines))


def _sources(sources: tuple[str, ...]) -> Iterator[str]:
    if any(sources):
        yield from ("", "Sources", *(f"  {source}" for source in sources if source))
