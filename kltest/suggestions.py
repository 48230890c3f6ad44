"""“Did you mean”: the names nearest to one that is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`did you mean a or b? ` (with the blank, to stand before more text), empty where nothing is near."""
    names = list(known)
    folded = {name.casefold(): name for name in reversed(names)}
    near = difflib.get_close_matches(wrong.casefold(), folded, n=3, cutoff=0.55)
    return f"did you mean {' or '.join(folded[name] for name in near)}? " if near else ""
