"""A virtual environment for each library and version, stored in a cache, with this kltest beside the library.

Libraries disagree about their dependencies, so each has an environment of its own. A library that is installed without
dependencies borrows those of the running interpreter (torch above all), which takes seconds. Any other gets all its
dependencies as they were on the day of its release, with the version of torch that is running here. uv installs, from
the indexes that pip is configured for. A library that no package index has is checked out of a git repository.
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
from datetime import datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from packaging.version import Version

from kltest.adapters import Adapter, before
from kltest.errors import KltestError, UsageError
from kltest.files import PACKAGE, cache_folder
from kltest.scoreboard.releases import AFTER, InstallError, configured, output_of, run_pip, uploads

# Packages that grading needs beside torch.
NEEDED = ("numpy", "scipy", "typer", "joblib", "jinja2")
# Seconds that a process has to end after a signal.
PATIENCE = 5.0
# Counts the ways in which environments were built: those of an earlier one are built again.
LAYOUT = 3
NEWEST = "newest"
VERSION, COMMIT = re.compile(r"[0-9][\w.!+-]*"), re.compile(r"[0-9a-f]{7,40}")
# Digits of a commit that is written.
DIGITS = 10


@dataclass(frozen=True)
class Installed:
    """An interpreter that has a library and kltest; it runs in a scratch folder of its own."""

    python: Path
    scratch: Path

    def command(self, *arguments: str) -> list[str]:
        """Return a command line of the interpreter."""
        return [str(self.python), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Variables to run it with: its own packages only, one thread, no model hub, no compiled kernels."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        kept |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return kept | {"TORCHDYNAMO_DISABLE": "1", "VERL_FORCE_DEVICE": "cpu"}

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


def exact_version(library: Adapter, wanted: str | None) -> str:
    """Return the version to install: the one that is wanted, the one of the adapter if None, or the newest there is."""
    if wanted is None:
        return library.version
    if library.repository:
        return _exact_commit(library, wanted)
    if wanted == NEWEST:
        printed = run_pip("index", "versions", library.distribution)
        found = re.search(rf"{re.escape(library.distribution)} \(({VERSION.pattern})\)", printed)
        if found is None:
            raise InstallError(f"the newest version of {library.distribution} cannot be read: {printed.strip()[:200]}")
        return found[1]
    if not VERSION.fullmatch(wanted):
        raise UsageError(
            f"{library.name}=={wanted}: {wanted!r} is no version; give one such as {library.version}, or {NEWEST}"
        )
    if library.since and before(wanted, library.since):
        raise UsageError(
            f"{library.name}=={wanted}: the adapter covers releases since {library.since}; a function of an older one "
            f"is graded from its files: `pip download --no-deps {library.distribution}=={wanted}`, unpack it, "
            "`kltest grade PATH/file.py:function`"
        )
    return wanted


def _exact_commit(library: Adapter, wanted: str) -> str:
    """Return the ten digits of a commit, or of that of the branch."""
    if wanted == NEWEST:
        return _git("ls-remote", library.repository, "HEAD").split()[0][:DIGITS]
    if not COMMIT.fullmatch(wanted):
        raise UsageError(
            f"{library.name}=={wanted}: {wanted!r} is no commit; give at least 7 digits of one, or {NEWEST}"
        )
    return wanted[:DIGITS]


def borrows(library: Adapter) -> bool:
    """Return True if the library is installed without dependencies, and uses those of the running interpreter."""
    return all("--no-deps" in call for call in library.installs)


def install(library: Adapter, version: str, more: Sequence[str] = (), *, within: Path | None = None) -> Installed:
    """Return the environment of a library with the dependencies of the day of its release, built if it is not there.

    Args:
        library: its adapter.
        version: the version to install.
        more: further packages to install.
        within: the folder of environments, the cache if None.

    Raises:
        InstallError: the installer failed; the message ends with its last lines.
        UnreachableError: no package index answered.
    """
    wheels = ["--python-version", library.python] if library.python else []
    calls = [[*wheels, *call] for call in library.installs] + ([list(more)] if more else [])
    calls = [[part.format(version=version) for part in call] for call in calls]
    torch = "" if borrows(library) else version_of("torch").partition("+")[0]
    recipe: list[Any] = [calls, torch or sys.prefix, NEEDED, sys.version, str(PACKAGE), LAYOUT]
    recipe += [library.repository, library.folder]
    name = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:12]
    within = (within or cache_folder("KLTEST_LIBRARIES", "libraries")).resolve()
    home = within / f"{library.name}-{version}-{name}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        try:
            venv.create(home, symlinks=True)
            paths = _linked(home) if torch else [*_linked(home), *_own_packages()]
            _install_all(python, calls, torch, _until(library, version))
            paths += [_check_out(library, version, home)] if library.repository else []
            (_packages(home) / "kltest.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
            (home / "scratch").mkdir()
            (home / "complete").write_text(json.dumps(recipe))
        except OSError as error:
            raise InstallError(f"{home} cannot be written: {error.strerror}") from error
    return Installed(python, home / "scratch")


def _linked(home: Path) -> list[str]:
    """Give an environment this kltest and its command; returns the folder to import it from."""
    beside, command = home / "kltest", home / "bin" / "kltest"
    beside.mkdir()
    (beside / "kltest").symlink_to(PACKAGE, target_is_directory=True)
    command.write_text(f"#!{home}/bin/python\nimport sys\n\nfrom kltest.cli import main\n\nsys.exit(main())\n")
    command.chmod(0o755)
    return [str(beside)]


def _own_packages() -> list[str]:
    """Folders of packages of the running interpreter, whose environment may itself see those of another one."""
    own = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return own + [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def _packages(home: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))


def _until(library: Adapter, version: str) -> datetime | None:
    """The day of a release, at which its dependencies are taken; None if no index has it."""
    if library.repository or any("--no-index" in call for call in library.installs):
        return None
    uploaded = uploads(library.distribution).get(str(Version(version)))
    return uploaded + AFTER if uploaded else None


def _install_all(python: Path, calls: Sequence[Sequence[str]], torch: str, until: datetime | None) -> None:
    """Install packages as they were on a day; with a version of torch, that and what grading needs as well."""
    options = [] if until is None else ["--exclude-newer", until.isoformat()]
    if torch:
        _install(python, "--no-deps", f"torch=={torch}")
        # Releases of the past were made before this version of torch.
        override = python.parents[1] / "torch.txt"
        override.write_text(f"torch=={torch}\n")
        options += ["--override", str(override)]
    for call in [*calls, NEEDED] if torch else calls:
        _install(python, *options, *call)


def _install(python: Path, *words: str) -> None:
    """Install with uv, which is put into the cache if it is not on the path."""
    configuration = configured()
    # All indexes count, as with pip.
    named = ["--index-strategy", "unsafe-best-match"]
    for name in ("index-url", "extra-index-url", "find-links"):
        named += [part for each in configuration.get(name, "").split() for part in (f"--{name}", each)]
    uv = shutil.which("uv")
    if uv is None:
        home = cache_folder("KLTEST_UV", "uv")
        uv = str(home / "bin" / "uv")
        if not Path(uv).exists():
            run_pip("install", "--quiet", "--upgrade", "--target", str(home), "uv")
    command = ["pip", "install", "--python", str(python), "--quiet", *words]
    certificates = {"SSL_CERT_FILE": configuration["cert"]} if "cert" in configuration else {}
    output_of(
        [uv, *command, *([] if "--no-index" in words else named)],
        " ".join(["uv", *command]),
        {**os.environ, **certificates},
    )


def _check_out(library: Adapter, commit: str, home: Path) -> str:
    """Check the library's package out below `home`, as it is in a commit, and return the folder to import it from.

    It is found among the installed packages with the commit as its version.

    Raises:
        InstallError: git failed; the message ends with what it said.
    """
    there = home / "checkout"
    _git("clone", "--quiet", "--no-checkout", "--filter=blob:none", library.repository, str(there))
    package = Path(library.folder, library.module.partition(".")[0])
    _git("-C", str(there), "checkout", "--quiet", commit, "--", package.as_posix())
    information = _packages(home) / f"{library.distribution.replace('-', '_')}-{commit}.dist-info"
    information.mkdir(parents=True)
    about = f"Metadata-Version: 2.1\nName: {library.distribution}\nVersion: {commit}\n"
    (information / "METADATA").write_text(about, encoding="utf-8")
    return str(there / library.folder)


def _git(*arguments: str) -> str:
    try:
        return output_of(["git", *arguments], " ".join(["git", *arguments]))
    except FileNotFoundError:
        raise InstallError("git is not installed, and no package index has this library") from None
    except InstallError as error:
        raise type(error)(f"{error}; --checkout takes another address, or a folder with a clone") from None
