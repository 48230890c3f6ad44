"""Find the checkout of kltest that has the experiments, figures and the paper, from any directory inside it."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from kltest.errors import UsageError


@dataclass(frozen=True)
class Checkout:
    """A copy of the repository: what is in its folders is what can be run."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Checkout:
        """Return the checkout around a directory (default: the current one); UsageError if there is none."""
        start = (start or Path.cwd()).resolve()
        for folder in (start, *start.parents):
            if (folder / "experiments").is_dir() and _project_name(folder / "pyproject.toml") == "kltest":
                return cls(folder)
        raise UsageError(
            f"{start} is not inside a checkout of kltest. The experiments, figures and the paper are not part of the "
            "installed package: clone the repository and run the command in its folder"
        )

    def experiments(self) -> list[str]:
        """The names of all experiments: the folders of experiments/ that have settings."""
        return sorted(path.parent.name for path in (self.root / "experiments").glob("*/settings.py"))

    def figures(self) -> list[str]:
        """The names of all figures: the scripts of figures/ that are not helpers of others (they have a `draw`)."""
        scripts = sorted((self.root / "figures").glob("*.py"))
        return [path.stem for path in scripts if not path.stem.startswith("_") and path.stem != "style"]

    def load(self, *path: str) -> ModuleType:
        """Import a module of the checkout by its path, as ("experiments", "atlas", "settings").

        Checkouts are kept apart by a root package of their own, so that neither a module elsewhere that is called
        `figures` nor a second checkout gets in the way.
        """
        root = f"_kltest_checkout_{sha256(str(self.root).encode()).hexdigest()[:8]}"
        folder = self.root
        _namespace(root, folder)
        for depth, part in enumerate(path[:-1], start=1):
            folder = folder / part
            _namespace(".".join((root, *path[:depth])), folder)
        name, file = ".".join((root, *path)), folder / f"{path[-1]}.py"
        if name in sys.modules:
            return sys.modules[name]
        if not file.is_file():
            raise UsageError(f"{file} is missing")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module


def _project_name(pyproject: Path) -> str | None:
    try:
        return tomllib.loads(pyproject.read_text()).get("project", {}).get("name")
    except (OSError, ValueError):
        return None


def _namespace(name: str, folder: Path) -> None:
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
