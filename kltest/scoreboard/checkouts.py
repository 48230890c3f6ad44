"""Libraries that no package index has: a commit of a git repository, checked out into the library's environment."""

import re
from pathlib import Path

from kltest.adapters import Adapter
from kltest.errors import UsageError
from kltest.scoreboard.releases import InstallError, output_of

COMMIT = re.compile(r"[0-9a-f]{7,40}")
# Digits of a commit that is written.
DIGITS = 10


def commit_of(library: Adapter, wanted: str | None, newest: str) -> str:
    """Return the commit to check out: the one that is wanted, the one of the adapter if None, or that of the branch."""
    if wanted is None:
        return library.version
    if wanted == newest:
        return _git("ls-remote", library.repository, "HEAD").split()[0][:DIGITS]
    if not COMMIT.fullmatch(wanted):
        raise UsageError(
            f"{library.name}=={wanted}: {wanted!r} is no commit; give at least 7 digits of one, or {newest}"
        )
    return wanted[:DIGITS]


def check_out(library: Adapter, commit: str, home: Path, packages: Path) -> Path:
    """Check the library's package out below `home`, as it is in a commit, and return the folder to import it from.

    It is found among the installed packages with the commit as its version.

    Raises:
        InstallError: git failed; the message ends with what it said.
    """
    there = home / "checkout"
    _git("clone", "--quiet", "--no-checkout", "--filter=blob:none", library.repository, str(there))
    package = Path(library.folder, library.module.partition(".")[0])
    _git("-C", str(there), "checkout", "--quiet", commit, "--", package.as_posix())
    name = library.distribution.replace("-", "_")
    information = packages / f"{name}-{commit}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {library.distribution}\nVersion: {commit}\n", encoding="utf-8"
    )
    return there / library.folder


def _git(*arguments: str) -> str:
    try:
        return output_of(["git", *arguments], " ".join(["git", *arguments]))
    except FileNotFoundError:
        raise InstallError("git is not installed, and no package index has this library") from None
    except InstallError as error:
        raise type(error)(f"{error}; --checkout takes another address, or a folder with a clone") from None
