"""Keeps the generated parts of the README in step: `python -m kltest.docs` tells what is not, `--write` mends it.

A generated part stands between `<!-- begin: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

from kltest.errors import UsageError
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.files import as_markdown, write

# Rounding noise (6.2e-16, say) differs from one processor to the next: it is no reason to rewrite a page.
NOISE = re.compile(r"\b\d(?:\.\d+)?e-1\d\b")


def estimators() -> str:
    """Every registered estimator, from its SPEC."""
    from kltest.commands.listing import follows, placement
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
    from kltest.grading.checks import CHECKS

    return as_markdown(
        [{"code": code, "name": f"`{check.name}`", "finds": check.title} for code, check in CHECKS.items()]
    )


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

BLOCKS: dict[str, Callable[[], str]] = {
    "estimators": estimators,
    "checks": checks,
    "grade": grade,
    "benchmarks": benchmarks,
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
    found = stale(text)
    if arguments != ["--write"]:
        print(f"README.md: not in step: {', '.join(found)}; run python -m kltest.docs --write" if found else "in step")
        return 1 if found else 0
    for name, content in found.items():
        text = replace(text, name, content)
    write(page, text)
    for copy, original in PICTURES.items():
        if (root / original).is_file():
            write(root / copy, (root / original).read_bytes())
    print(f"rewritten: {', '.join(found) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
