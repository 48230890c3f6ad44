"""Errors that kltest raises on purpose. Every message says what was wrong, with which input, and what to do."""

import difflib
import warnings
from collections.abc import Iterable
from typing import Any

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C or SIGTERM ended."""


class KltestError(Exception):
    """Base of all errors that kltest raises on purpose; `exit_code` is that of the command line."""

    exit_code = 3


class UsageError(KltestError, ValueError):
    """Wrong usage: an unknown name, an option out of range, a parameter that cannot be filled."""

    exit_code = 2


class KltestWarning(UserWarning):
    """Warning for what should be seen though it fails no test: a check that warns, an expected failure that passes."""


class InvalidEnvironmentError(UsageError):
    """An environment that cannot be built or enumerated as asked."""


class TargetError(KltestError):
    """Failure of the loss under test: it raised, returned something unusable, left the process or did not return."""


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return `did you mean a or b? `, with a blank at its end, or an empty text if no known name is near."""
    folded = {name.casefold(): name for name in reversed(list(known))}
    near = difflib.get_close_matches(wrong.casefold(), folded, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(folded[name] for name in near)}? " if near else ""


def __getattr__(name: str) -> Any:
    if name == "WorldError":
        warnings.warn("WorldError is called InvalidEnvironmentError now", DeprecationWarning, stacklevel=2)
        return InvalidEnvironmentError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
