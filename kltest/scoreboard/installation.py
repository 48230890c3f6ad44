"""A virtual environment for each library and version, kept in a cache, with this kltest beside the library.

Libraries disagree about their dependencies, so each has an environment of its own. A library that is installed without
dependencies borrows those of the running interpreter (torch above all), which takes seconds. Any other gets all its
dependencies, with the version of torch that is running here.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path

import kltest
from kltest.adapters import Adapter
from kltest.errors import KltestError, UsageError
from kltest.files import cache_folder

# Packages that grading needs beside torch.
NEEDED = ("numpy", "scipy", "typer", "joblib")
# Seconds for a call of pip, and for a process that was asked to end.
LONGEST, PATIENCE = 1800.0, 5.0
ALONE = "--no-deps"
NEWEST = "newest"
VERSION = re.compile(r"[0-9][\w.!+-]*")


class InstallError(KltestError):
    """A library could not be installed; the message ends with what pip said."""


class UnreachableError(InstallError):
    """No package index answered."""


@dataclass(frozen=True)
class Installed:
    """An interpreter that has a library and kltest; it runs in a scratch folder of its own."""

    python: Path
    scratch: Path

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Variables to run it with: its own packages only, one thread, no model hub."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def lines(self, *arguments: str) -> Iterator[bytes]:
        """Yield the lines that the interpreter prints, as it prints them; it ends when they are no longer wanted.

        Raises:
            KltestError: it failed; all its lines have been yielded before. The message ends with its last words.
        """
        log = self.scratch / "errors.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                self.command(*arguments),
                cwd=self.scratch,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            yield from process.stdout
            code = process.wait()
        finally:
            # Together with the processes that it forked. A terminated one ends its children; a killed one cannot.
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(PATIENCE)
        if code:
            words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"]
            raise KltestError(f"measuring ended with exit code {code}: {words[-1]} (all of it: {log})")


def exact_version(library: Adapter, asked: str | None) -> str:
    """Return the version to install: the one asked for, the one of the adapter if None, or the newest there is."""
    if asked is None:
        return library.version
    if asked == NEWEST:
        printed = _run_pip("index", "versions", library.distribution)
        found = re.search(rf"{re.escape(library.distribution)} \(({VERSION.pattern})\)", printed)
        if found is None:
            raise InstallError(f"the newest version of {library.distribution} cannot be read: {printed.strip()[:200]}")
        return found[1]
    if not VERSION.fullmatch(asked):
        raise UsageError(
            f"{library.name}=={asked}: {asked!r} is no version; give one such as {library.version}, or {NEWEST}"
        )
    return asked


def install(library: Adapter, version: str) -> Installed:
    """Return the environment of a library, built if it is not there yet.

    Args:
        library: its adapter.
        version: the version to install.

    Raises:
        InstallError: pip failed; the message ends with its last lines.
        UnreachableError: no package index answered.
    """
    calls = [[part.format(version=version) for part in call] for call in library.installs]
    borrows = all(ALONE in call for call in calls)
    here = sys.prefix if borrows else version_of("torch").partition("+")[0]
    recipe = [calls, here, NEEDED, sys.version, str(Path(kltest.__file__).parent)]
    name = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    home = cache_folder("KLTEST_LIBRARIES", "libraries") / f"{library.name}-{version}-{name}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        try:
            _build(home, python, calls, None if borrows else here)
        except OSError as error:
            raise InstallError(f"{home} cannot be written: {error.strerror}") from error
        (home / "complete").write_text(json.dumps(recipe))
    (home / "scratch").mkdir(exist_ok=True)
    return Installed(python, home / "scratch")


def _build(home: Path, python: Path, calls: Sequence[Sequence[str]], torch: str | None) -> None:
    """Build the environment; without a version of torch it sees the running interpreter's packages behind its own."""
    venv.create(home, symlinks=True)
    beside = home / "kltest"
    beside.mkdir()
    (beside / "kltest").symlink_to(Path(kltest.__file__).parent, target_is_directory=True)
    lines = [str(beside)]
    if torch is None:
        lines += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
        # An environment may itself see the packages of another one.
        lines += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    else:
        calls = [[f"torch=={torch}"], *calls, NEEDED]
    for call in calls:
        # With this interpreter's pip: the other one needs none of its own.
        _run_pip("--python", str(python), "install", "--quiet", "--retries", "2", *call)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))
    (packages / "kltest.pth").write_text("\n".join(dict.fromkeys(lines)) + "\n")


def _run_pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    shown = " ".join(["pip", *arguments])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"`{shown}` did not end within {LONGEST / 60:g} minutes") from None
    if done.returncode:
        kind = UnreachableError if "connection broken by" in done.stderr else InstallError
        words = [line for line in done.stderr.splitlines() if line.strip() and "[notice]" not in line]
        raise kind(f"`{shown}` failed: " + " / ".join(line.strip() for line in words[-4:]))
    return done.stdout
