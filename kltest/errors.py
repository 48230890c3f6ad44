"""What can go wrong, told to people: every message says what was wrong, with which input, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KltestError(Exception):
    """The root of all errors that kltest raises on purpose; `exit_code` is the command line's."""

    exit_code = 3


class UsageError(KltestError, ValueError):
    """The question was put wrongly: an unknown name, an option out of range, a parameter that cannot be filled."""

    exit_code = 2


class KltestWarning(UserWarning):
    """What does not fail a test but should be seen: a check that only warns, an excuse that excuses nothing."""


class WorldError(UsageError):
    """A world that cannot be built or enumerated as asked."""


class TargetError(KltestError):
    """The loss under test failed: it raised, returned something unusable, left the process or never came back."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """`did you mean a or b? ` (with the blank, to stand before more text), empty where nothing is near."""
    names = list(known)
    folded = {name.casefold(): name for name in reversed(names)}
    near = difflib.get_close_matches(wrong.casefold(), folded, n=3, cutoff=0.55)
    return f"did you mean {' or '.join(folded[name] for name in near)}? " if near else ""
