"""What an experiment set out to show, and whether it did."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Claim:
    """One row of the summary. `agrees` is None where the claim was not run; `found` then says why."""

    experiment: str
    claim: str
    source: str
    expected: str
    found: str
    agrees: bool | None
    tolerance: str = ""

    @property
    def verdict(self) -> str:
        return {True: "yes", False: "NO", None: "not run"}[self.agrees]

    def row(self) -> dict[str, object]:
        return asdict(self)


def score(claims: Sequence[Claim]) -> float | None:
    """The share of the claims that were run and agree: 1 where everything came out as expected, None where none ran."""
    judged = [claim.agrees for claim in claims if claim.agrees is not None]
    return sum(judged) / len(judged) if judged else None


def summary(claims: Sequence[Claim], width: int) -> str:
    """The table at the end of a run: aligned, cut to the width of the terminal, disagreements repeated in full."""
    table = [("agrees", "claim", "expected", "found")]
    table += [(claim.verdict, f"{claim.experiment}: {claim.claim}", claim.expected, claim.found) for claim in claims]
    # The verdict keeps its seven columns; what is left is shared by the three texts.
    room = max(width - 7 - 6, 45)
    widths = (7, room - 2 * (room * 3 // 10), room * 3 // 10, room * 3 // 10)
    lines = ["  ".join(_fit(cell, size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.insert(1, "─" * min(width, sum(widths) + 6))
    wrong = [claim for claim in claims if claim.agrees is False]
    for claim in wrong:
        lines += ["", f"Disagrees: {claim.experiment}: {claim.claim}", f"  source    {claim.source}"]
        lines += [f"  expected  {claim.expected}", f"  found     {claim.found}"]
        lines += [f"  tolerance {claim.tolerance}"] if claim.tolerance else []
    agreed, unknown = sum(claim.agrees is True for claim in claims), sum(claim.agrees is None for claim in claims)
    lines += _scores(claims)
    lines += ["", f"{agreed} of {len(claims)} claims agree, {len(wrong)} disagree, {unknown} not run."]
    return "\n".join(lines)


def _scores(claims: Sequence[Claim]) -> list[str]:
    """A line an experiment, where there are several."""
    names = list(dict.fromkeys(claim.experiment for claim in claims))
    if len(names) < 2:
        return []
    found = {name: score([claim for claim in claims if claim.experiment == name]) for name in names}
    width = max(map(len, names))
    return ["", *(f"{name:{width}}  score {'–' if value is None else f'{value:.2f}'}" for name, value in found.items())]


def _fit(text: str, width: int) -> str:
    """Cut or padded to a number of terminal columns; combining marks take none."""
    columns = 0
    for index, character in enumerate(text):
        columns += 0 if unicodedata.combining(character) else 1
        if columns > width:
            return text[: index - 1] + "…"
    return text + " " * (width - columns)
