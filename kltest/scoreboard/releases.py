"""Releases of a distribution and when they were uploaded, from the package index that pip is configured for."""

import json
import re
import ssl
import subprocess
import sys
import urllib.request
from datetime import datetime, timedelta
from urllib.error import HTTPError, URLError

from packaging.utils import canonicalize_name
from packaging.version import Version

from kltest.errors import KltestError

JSON = "application/vnd.pypi.simple.v1+json"
# Seconds for an answer of the index, and for a call of pip.
PATIENCE, LONGEST = 60.0, 1800.0
# Files of a release are uploaded within a day.
AFTER = timedelta(days=1)
# The index that pip asks if nothing is configured.
INDEX = "https://pypi.org/simple"
# Of several places that pip reads an option from, the last one wins.
ORDER = ("global", "install", ":env:")


class InstallError(KltestError):
    """A library could not be installed; the message ends with what the installer said."""


class UnreachableError(InstallError):
    """No package index answered."""


def run_pip(*arguments: str) -> str:
    """Return what pip prints.

    Raises:
        InstallError: it failed; the message ends with its last lines.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return output_of(command, " ".join(["pip", *arguments]))


def output_of(command: list[str], shown: str, environment: dict[str, str] | None = None) -> str:
    """Return what an installer prints; `shown` is the command in the message of a failure."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            stdin=subprocess.DEVNULL,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"`{shown}` did not end within {LONGEST / 60:g} minutes") from None
    if done.returncode:
        unanswered = re.search(r"connection broken by|error sending request|[Cc]ould not connect", done.stderr)
        words = [line.strip() for line in done.stderr.splitlines() if line.strip() and "[notice]" not in line]
        raise (UnreachableError if unanswered else InstallError)(f"`{shown}` failed: " + " / ".join(words[-6:]))
    return done.stdout


def configured() -> dict[str, str]:
    """Return pip's options by name, from its files and variables."""
    lines = re.findall(r"^([\w:]+)\.([\w-]+)='(.*)'$", run_pip("config", "list"), re.MULTILINE)
    return {"index-url": INDEX} | {name: value for part in ORDER for section, name, value in lines if section == part}


def uploads(distribution: str) -> dict[str, datetime]:
    """Return when each release was uploaded, oldest version first; none if the index does not tell.

    Releases that were withdrawn are left out.

    Raises:
        UnreachableError: the index did not answer.
    """
    options = configured()
    url = f"{options.get('index-url', '').rstrip('/')}/{canonicalize_name(distribution)}/"
    if "no-index" in options or not url.startswith("http"):
        return {}
    trusted = ssl.create_default_context(cafile=options.get("cert"))
    try:
        question = urllib.request.Request(url, headers={"Accept": JSON})
        with urllib.request.urlopen(question, timeout=PATIENCE, context=trusted) as answer:
            files = json.load(answer)["files"] if JSON in answer.headers["content-type"] else []
    except HTTPError:
        return {}
    except URLError as error:
        raise UnreachableError(f"the package index was asked for {distribution} and did not answer: {error}") from error
    found: dict[Version, datetime] = {}
    for file in files:
        version = re.match(r".+?-(\d[^-]*?)(?:-.+\.whl|\.tar\.gz|\.zip)$", file["filename"])
        if version and "upload-time" in file and not file.get("yanked"):
            uploaded = datetime.fromisoformat(file["upload-time"])
            one = Version(version[1])
            found[one] = min(found.get(one, uploaded), uploaded)
    return {str(version): found[version] for version in sorted(found)}


def minors(distribution: str, since: str, *, first: bool = False) -> dict[str, datetime]:
    """Return the last release of each minor version from `since` on, and when it was uploaded, oldest first.

    Args:
        distribution: its name on the index.
        since: the oldest release.
        first: the first release of each minor version as well.
    """
    there = {Version(text): uploaded for text, uploaded in uploads(distribution).items()}
    there = {each: there[each] for each in there if each >= Version(since) and not each.is_prerelease}
    last = {each.release[:2]: each for each in there}
    kept = {*last.values(), *({each.release[:2]: each for each in reversed(there)}.values() if first else ())}
    return {str(each): there[each] for each in there if each in kept}
