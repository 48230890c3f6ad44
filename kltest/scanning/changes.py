"""Lines of a source tree that differ from a commit of git."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kltest.errors import UsageError

Lines = dict[str, list[range]]
"""Changed lines by the real path of their file."""


def changed_since(reference: str, paths: Iterable[Path]) -> Lines:
    """Return the lines below the paths that differ from where the work left a commit, those of new files included.

    Raises UsageError if a path is in no repository of git, or the commit is not known there.
    """
    found: Lines = {}
    for top in dict.fromkeys(_top(path, reference) for path in paths):
        found |= _changed(top, reference)
    return found


def _top(path: Path, reference: str) -> Path:
    folder = path if path.is_dir() else path.parent
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None:
        raise UsageError(f"--changed-since {reference}: {folder.absolute()} is in no repository of git")
    return Path(top.rstrip("\n"))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None if it fails."""
    command = ["git", "-C", str(folder), "-c", "core.quotePath=off", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape")
    except OSError:
        raise UsageError("--changed-since needs git, which is not installed") from None
    return None if done.returncode else done.stdout


def _changed(top: Path, reference: str) -> Lines:
    commit = _git(top, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")
    if commit is None:
        shallow = (_git(top, "rev-parse", "--is-shallow-repository") or "").strip() == "true"
        hint = "; the clone is shallow: fetch it first (`fetch-depth: 0` of actions/checkout)" if shallow else ""
        raise UsageError(f"--changed-since {reference}: git knows no commit {reference} in {top}{hint}")
    # What was changed there since is nobody's change here; a shallow clone may not know where the two parted.
    base = (_git(top, "merge-base", commit.strip(), "HEAD") or commit).strip()
    arguments = ("--unified=0", "--find-renames", "--no-ext-diff", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    kinds = ("*.py", "*.ipynb")
    found: Lines = {}
    lines = iter((_git(top, "diff", *arguments, base, "--", *kinds) or "").split("\n"))
    for line in lines:
        if line.startswith("+++ "):
            changed = found.setdefault(str((top / line[6:].rstrip("\t")).resolve()), [])
        elif match := re.match(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line):
            gone, start, new = int(match[1] or 1), int(match[2]), int(match[3] or 1)
            changed.append(range(start, start + max(new, 1)))
            for _ in range(gone + new):  # lines of code may look like heads
                next(lines)
    for name in (_git(top, "ls-files", "-z", "--others", "--exclude-standard", "--", *kinds) or "").split("\0"):
        if name:
            found[str((top / name).resolve())] = [range(1, 1 << 31)]
    return found
