"""Keeps generated pages in step: `python -m kltest.docs` tells what is not, `--write` mends it.

A generated part of the README stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`; the pages of the checks,
docs/checks/CODE.md and their index, the scoreboard of libraries with its programs, and docs/finetune.md are generated
whole.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from kltest.errors import UsageError
from kltest.files import as_markdown, write
from kltest.reproduce.checkout import Checkout

if TYPE_CHECKING:
    from kltest.checks import Check

# Rounding noise (6.2e-16, say) differs from one processor to the next: it is no reason to rewrite a page.
NOISE = re.compile(r"\b\d(?:\.\d+)?e-1\d\b")


def estimators() -> str:
    """Every registered estimator, from its SPEC."""
    from kltest.cli.listing import follows, placement
    from kltest.estimators import registry

    rows = [
        {
            "estimator": f"`{name}`",
            "placement": placement(estimator.spec),
            "one step": follows(estimator.spec, "bandit"),
            "sequences": follows(estimator.spec, "sequence"),
            "sequences, stale sampler": follows(estimator.spec, "sequence", "stale"),
        }
        for name, estimator in registry().items()
    ]
    return as_markdown(rows)


def checks() -> str:
    """Every check, from its own file."""
    from kltest.checks import CHECKS

    return as_markdown(
        [
            {"code": f"[{code}]({PAGES}/{code}.md)", "name": f"`{check.name}`", "finds": check.title}
            for code, check in CHECKS.items()
        ]
    )


def libraries() -> str:
    """What each library does by default, and what to take instead."""
    from kltest.scoreboard import recorded
    from kltest.scoreboard.guide import advice
    from kltest.scoreboard.table import lines

    rows = []
    for each in advice(lines(recorded.read())):
        right = [f"`{line.setting}`" for line in (*each.settings, *each.recipes)]
        for line in each.defaults:
            cells = {column: line.cells[column] for column in ("one step", "sequences", "off-policy")}
            rows.append({"library": each.library, "by default": f"`{line.setting}`", **cells, "follows ∇KL(π‖ref)": ""})
        rows[-1]["follows ∇KL(π‖ref)"] = ", ".join(right[:3]) + (" …" if len(right) > 3 else "") or "–"
    return as_markdown(rows)


def library_pages() -> dict[str, str]:
    """The scoreboard of real libraries, from what is recorded of them."""
    from kltest.scoreboard import recorded
    from kltest.scoreboard.pages import files

    return {f"docs/{name}": content for name, content in files(recorded.read()).items()}


def finetune_pages() -> dict[str, str]:
    """The settings and metrics of the language-model runner."""
    from kltest.finetune.guide import page

    return {"docs/finetune.md": page()}


def check_pages() -> dict[str, str]:
    """A page a check, and their index, by the path below the root."""
    from kltest.checks import CHECKS

    pages = {f"{PAGES}/{code}.md": check_page(check) for code, check in CHECKS.items()}
    return {f"{PAGES}/README.md": check_index(), **pages}


def check_page(check: Check) -> str:
    """What `kltest explain` says of a check and what its demonstration prints."""
    from kltest.cli.explain import parts

    demonstration = check.demonstrate()
    head, *rows = demonstration.cells()
    sections = []
    for part in parts(check):
        paragraphs = [escaped(part.text)] if part.text else []
        paragraphs += [f"```python\n{part.code}\n```"] if part.code else []
        paragraphs += ["\n".join(f"- {escaped(item)}" for item in part.items)] if part.items else []
        sections.append("\n\n".join([f"## {part.title}", *paragraphs]))
    numbers = as_markdown([dict(zip(head, row, strict=True)) for row in rows])
    shown = (
        f"## Demonstration\n\n```text\n$ kltest explain {check.code} --demo\n{demonstration.setting}\n```\n\n{numbers}"
    )
    lines = [f"# {check.code} `{check.name}`", escaped(check.title) + ".", *sections[:3], shown.rstrip(), *sections[3:]]
    return "\n\n".join([*lines, "[All checks](README.md)"]) + "\n"


def check_index() -> str:
    """All checks by family."""
    from kltest.checks import CHECKS

    lines = [
        "# The checks",
        "Each is a known way to get a KL term wrong; its code is stable. "
        "`kltest explain CODE` prints a page, `--demo` runs its demonstration.",
    ]
    for digit, family in FAMILIES.items():
        rows = [
            {"code": f"[{code}]({code}.md)", "name": f"`{check.name}`", "finds": check.title}
            for code, check in CHECKS.items()
            if code[2] == digit
        ]
        if rows:
            lines.append(f"## {digit}xx {family}\n\n{as_markdown(rows).rstrip()}")
    return "\n\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Prose in which nothing is taken for markup."""
    return re.sub(r"([\\`*_{}\[\]<>|$])", r"\\\1", text)


def stale_pages() -> dict[str, str | None]:
    """The pages that are not in step, with what they should be; None for one that should not be there."""
    root = Checkout.find().root
    fresh = check_pages() | library_pages() | finetune_pages()
    found: dict[str, str | None] = {}
    for path, content in fresh.items():
        file = root / path
        if not file.is_file() or NOISE.sub("0", file.read_text(encoding="utf-8")) != NOISE.sub("0", content):
            found[path] = content
    left = sorted(
        file.relative_to(root).as_posix() for folder in (PAGES, PROGRAMS) for file in (root / folder).glob("*.*")
    )
    return found | {path: None for path in left if path not in fresh}


def grade() -> str:
    """What `kltest grade k3-loss` prints."""
    code = "import sys; sys.argv[1:] = ['grade', 'k3-loss']; from kltest.cli import main; main()"
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode != 1:  # k3 in the loss is refuted; anything else is not what the page is to show
        raise UsageError(f"`kltest grade k3-loss` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return f"```text\n$ kltest grade k3-loss\n{done.stdout.rstrip()}\n```\n"


def benchmarks() -> str:
    """What was measured last, from benchmarks/results: the medians of all cases of a claim, smallest to largest."""
    groups: dict[tuple[str, str, float | None, bool], list[float]] = {}
    for path in sorted((Checkout.find().root / "benchmarks" / "results").glob("*.json")):
        for row in json.loads(path.read_text(encoding="utf-8")):
            kind = "any function" if STRANGER in row["case"] else "registered" if row["claim"] in BY_KIND else ""
            groups.setdefault((row["claim"], kind, row["bound"], row["at_most"]), []).append(row["ratio"])
    rows = []
    for (claim, kind, bound, at_most), ratios in groups.items():
        low, high = (f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
        met = sum(ratio <= bound if at_most else ratio >= bound for ratio in ratios) if bound is not None else None
        rows.append(
            {
                "ratio": claim,
                "loss": kind,
                "measured": low if low == high else f"{low} – {high}",
                "aim": "–" if bound is None else f"{'≤' if at_most else '≥'} {bound:g}",
                "met": "–" if met is None else "yes" if met == len(ratios) else f"{met} of {len(ratios)}",
            }
        )
    return as_markdown(rows)


# Claims that are measured both for estimators that declare how they work and for functions of which nothing is known.
STRANGER = "as a stranger"
BY_KIND = (
    "exact moments / the loss's own forward and backward, fixed length",
    "exact moments / the loss's own forward and backward, ragged or shared contexts",
    "peak memory of exact moments / fields of the loss",
    "one backward pass per rollout / exact moments",
    "vmap(grad) / exact moments",
)


def experiments() -> str:
    """Every experiment, from its settings."""
    from kltest.reproduce.experiment import Experiment

    checkout = Checkout.find()
    rows = []
    for name in checkout.experiments():
        settings = Experiment(checkout, name).settings
        rows.append(
            {
                "experiment": f"[{name}](experiments/{name}/README.md)",
                "about": settings.title,
                "tags": ", ".join(settings.tags),
                "can be set": ", ".join(f"`{value}`" for value in settings.values) or "–",
            }
        )
    return as_markdown(rows)


def zoo() -> str:
    """How many losses of each family the checks are held to; that they are is what tests/test_zoo.py asserts."""
    tests = str(Checkout.find().root / "tests")
    sys.path.insert(0, tests)
    try:
        from zoo.table import clean, mutants  # type: ignore[import-not-found]
    finally:
        sys.path.remove(tests)
    wrong, right = mutants(), clean()
    due = Counter(code[2] for row in wrong for code in (row.code, *row.also))
    written = Counter(row.code[2] for row in wrong)
    rows = [
        {
            "family": f"KL{digit}xx, {name[:1].lower()}{name[1:]}",
            "wrong losses": str(written[digit]),
            "failures due": str(due[digit]),
            "found (recall)": "all",
            "not due (precision)": "not counted" if digit == "8" else "none",
        }
        for digit, name in FAMILIES.items()
    ]
    total = {
        "family": f"**together**, and **{len(right)}** right losses",
        "wrong losses": str(len(wrong)),
        "failures due": str(sum(due.values())),
        "found (recall)": "all",
        "not due (precision)": "none",
    }
    return as_markdown([*rows, total])


BLOCKS: dict[str, Callable[[], str]] = {
    "zoo": zoo,
    "estimators": estimators,
    "checks": checks,
    "grade": grade,
    "benchmarks": benchmarks,
    "experiments": experiments,
    "libraries": libraries,
}


# Where the pages of the checks are, the programs of the scoreboard, and what the codes of checks begin with.
PAGES = "docs/checks"
PROGRAMS = "docs/reproductions"
FAMILIES = {
    "1": "Which gradient",
    "2": "Sequences",
    "3": "Off-policy",
    "4": "Groups",
    "5": "Hygiene",
    "6": "Logged value",
    "7": "Approximations",
    "8": "Variance (warnings)",
}

# Pictures on the page, each a copy of a figure among the results.
PICTURES = {"docs/atlas.png": "results/figures/atlas.png"}


def blocks(text: str) -> dict[str, str]:
    """The marked parts of a page by name, whoever writes them."""
    found = re.findall(r"<!-- begin: ([\w-]+) -->\n(.*?)<!-- end: \1 -->", text, flags=re.DOTALL)
    return dict(found)


def replace(text: str, name: str, content: str) -> str:
    """The page with another content for one of its marked parts; UsageError if it has no such part."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
    if begin not in text or end not in text:
        raise UsageError(f"the page has no part between {begin.strip()} and {end}")
    before, rest = text.split(begin, 1)
    return before + begin + content + end + rest.split(end, 1)[1]


def stale(text: str) -> dict[str, str]:
    """The generated parts of a page that are not in step, with what they should be."""
    fresh = {name: BLOCKS[name]() for name in blocks(text) if name in BLOCKS}
    return {name: new for name, new in fresh.items() if NOISE.sub("0", new) != NOISE.sub("0", blocks(text)[name])}


def main(arguments: list[str]) -> int:
    root = Checkout.find().root
    page = root / "README.md"
    text = page.read_text(encoding="utf-8")
    found, pages = stale(text), stale_pages()
    names = [*(f"README.md: {name}" for name in found), *pages]
    if arguments != ["--write"]:
        print(f"not in step: {', '.join(names)}; run python -m kltest.docs --write" if names else "in step")
        return 1 if names else 0
    for name, content in found.items():
        text = replace(text, name, content)
    write(page, text)
    for path, whole in pages.items():
        if whole is None:
            (root / path).unlink()
        else:
            write(root / path, whole)
    for copy, original in PICTURES.items():
        if (root / original).is_file():
            write(root / copy, (root / original).read_bytes())
    print(f"rewritten: {', '.join(names) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
