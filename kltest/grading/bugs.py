"""When kltest itself fails: the traceback goes into a file, and people are told what to do with it."""

from __future__ import annotations

import os
import tempfile


def note_bug(what: str, trace: str) -> str:
    """A message for people; the traceback is kept in a file where one can be written."""
    message = f"kltest itself failed: {what}. This is a bug in kltest, not in the loss: please report it"
    try:
        handle, path = tempfile.mkstemp(prefix="kltest-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
    except OSError:
        return f"{message} with this traceback:\n{trace}"
    return f"{message} with the traceback in {path}"
