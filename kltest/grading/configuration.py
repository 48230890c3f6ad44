"""`[tool.kltest]` of the nearest pyproject.toml: defaults of the options of `kltest grade`, and its targets."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kltest.errors import UsageError, did_you_mean
from kltest.grading.forms import outputs, switch
from kltest.grading.options import KEYS, RENAMED, checked, merged

OWN = ("targets", "output", "verbose", "quiet", "cache", "scan")
"""Keys of `[tool.kltest]` that are no options of a grading."""
NO_CACHE = "is deprecated and has no effect: reports are not kept between runs"


@dataclass(frozen=True)
class Target:
    """A target as written, with checked options of its own by their Python names."""

    text: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Configuration:
    """Contents of `[tool.kltest]`: checked defaults by their Python names, targets and outputs.

    Files that it names are relative to the folder of pyproject.toml, wherever `kltest` is called from. `verbosity` says
    how much is printed (`verbose`, `quiet` or neither), `deprecated` has a sentence for each old name, and `scan` is
    the table of `kltest scan` as it stands.
    """

    path: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    outputs: tuple[str, ...] = ()
    verbosity: Mapping[str, bool] = field(default_factory=dict)
    deprecated: tuple[str, ...] = ()
    scan: Mapping[str, Any] = field(default_factory=dict)


def nearest(start: Path) -> Configuration:
    """Return the configuration in `start` or the nearest folder above that has a pyproject.toml.

    Raises UsageError, naming file and line, for a file that cannot be read, an unknown key or a wrong value.
    """
    start = start.resolve()
    found = next((folder / "pyproject.toml" for folder in (start, *start.parents) if _there(folder)), None)
    return Configuration() if found is None else read(found)


def configured(start: str | Path = ".") -> dict[str, dict[str, Any]]:
    """Return the targets of `[tool.kltest]` with their options, as `kltest.grade` takes them.

    Args:
        start: A file or folder; pyproject.toml is looked for there and in the folders above it.

    Raises:
        UsageError: The file cannot be read, or has an unknown key or a wrong value.
    """
    found = nearest(Path(start))
    return {target.text: merged(found.options, target.options) for target in found.targets}


def read(path: Path) -> Configuration:
    """Return the configuration in this file; raises like `nearest`."""
    try:
        text = path.read_text(encoding="utf-8")
        tool = tomllib.loads(text).get("tool", {})
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    if not isinstance(tool, dict) or "kltest" not in tool:
        return Configuration(path)
    return _Reader(path, text).configuration(tool["kltest"])


class _Reader:
    def __init__(self, path: Path, text: str) -> None:
        self.path, self.lines = path, text.splitlines()
        self.old_names: dict[str, str] = {}

    def configuration(self, table: object) -> Configuration:
        if not isinstance(table, dict):
            raise UsageError(f"{self.place('kltest')} must be a table [tool.kltest], not {table!r}")
        settings = self.dashed(table)
        own = {name: settings.pop(name) for name in OWN if name in settings}
        targets, scan = own.get("targets", []), own.get("scan", {})
        if not isinstance(scan, dict):
            raise UsageError(f"{self.place('scan')} must be a table [tool.kltest.scan], not {scan!r}")
        if not isinstance(targets, list):
            raise UsageError(f"{self.place('targets')}: give a list of targets; it is {targets!r}")
        switches: dict[str, bool] = {
            name: switch(own[name], self.place(name)) for name in ("verbose", "quiet", "cache") if name in own
        }
        if switches.get("verbose") and switches.get("quiet"):
            raise UsageError(f"{self.place('quiet')} and verbose exclude each other; set one of them")
        entries = tuple(self.target(entry) for entry in targets)
        deprecated = [f"{self.place(new)} is deprecated; write {new}" for new in self.old_names]
        if switches.pop("cache", None) is not None:
            deprecated.append(f"{self.place('cache')} {NO_CACHE}")
        return Configuration(
            path=self.path,
            options=self.options(settings, also=OWN),
            targets=entries,
            outputs=tuple(map(self.output, outputs(own["output"], self.place("output")))) if "output" in own else (),
            verbosity=switches,
            deprecated=tuple(deprecated),
            scan=scan,
        )

    def dashed(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """The settings under their present names."""
        found = {name.replace("_", "-"): value for name, value in table.items()}
        for names in RENAMED.items():
            old, new = (name.replace("_", "-") for name in names)
            if old in found:
                self.old_names[new] = old
                found.setdefault(new, found.pop(old))
        return found

    def options(self, settings: Mapping[str, Any], also: tuple[str, ...] = ()) -> dict[str, Any]:
        """Check `settings` as options; UsageError for a key that is not one."""
        for key in settings:
            if key not in KEYS:
                known = [*KEYS, *also]
                hint = did_you_mean(key, known)
                raise UsageError(f"{self.place(key)} is not a setting of kltest; {hint}there are: {', '.join(known)}")
        given = {KEYS[key].name: value for key, value in settings.items()}
        return checked(given, lambda option: self.place(option.key or option.name))

    def target(self, entry: object) -> Target:
        if isinstance(entry, str):
            return Target(self.target_text(entry))
        if not isinstance(entry, dict):
            raise UsageError(f"{self.place('targets')}: a target is a text or a table; one is {entry!r}")
        settings = self.dashed(entry)
        text = settings.pop("target", None)
        if not isinstance(text, str):
            raise UsageError(f"{self.place('targets')}: a table needs `target`, a text; one has {text!r}")
        return Target(self.target_text(text), self.options(settings, also=("target",)))

    def target_text(self, text: str) -> str:
        """The target; a file in it becomes relative to the present folder."""
        file, colon, name = text.rpartition(":")
        return f"{self.relative(file)}:{name}" if colon and file.endswith(".py") else text

    def output(self, text: str) -> str:
        form, colon, path = text.partition(":")
        return f"{form}:{self.relative(path)}" if colon and path not in ("", "-") else text

    def relative(self, path: str) -> str:
        """The path, unchanged if `kltest` is called from the folder of pyproject.toml."""
        folder = self.path.parent
        return path if folder == Path.cwd().resolve() else str(folder / path)

    def place(self, name: str) -> str:
        """`file, line n: name`; the line is the first that looks like the key."""
        name = self.old_names.get(name, name)
        key = re.escape(name).replace(r"\-", "[-_]")
        section = next((i for i, line in enumerate(self.lines) if re.match(r"\s*\[\[?tool\.kltest\b", line)), 0)
        wanted = re.compile(rf"""(^|[{{,\s])["']?{key}["']?\s*=|\[\[?tool\.kltest\.{key}\b|\[tool\.{key}\]""")
        line = next((i for i, line in enumerate(self.lines[section:], section) if wanted.search(line)), section)
        return f"{self.path}, line {line + 1}: {name}"


def _there(folder: Path) -> bool:
    try:
        return (folder / "pyproject.toml").is_file()
    except OSError:
        return False
