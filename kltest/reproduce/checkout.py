"""Find the checkout of kltest that has the experiments, figures and the paper, from any directory inside it."""

import sys
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import Self

from kltest.errors import UsageError


@dataclass(frozen=True)
class Checkout:
    """A copy of the repository: what is in its folders is what can be run."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None) -> Self:
        """Return the checkout around a directory (default: the current one); UsageError if there is none."""
        start = (start or Path.cwd()).resolve()
        for folder in (start, *start.parents):
            project = folder / "pyproject.toml"
            if (folder / "experiments").is_dir() and project.is_file() and 'name = "kltest"\n' in project.read_text():
                return cls(folder)
        raise UsageError(
            f"{start} is not inside a checkout of kltest. The experiments, figures and the paper are not part of the "
            "installed package: clone the repository and run the command in its folder"
        )

    def experiments(self) -> list[str]:
        """The names of all experiments: the folders of experiments/ with an `experiment.py`."""
        return sorted(path.parent.name for path in (self.root / "experiments").glob("*/experiment.py"))

    def figures(self) -> list[str]:
        """The names of all figures: the scripts of figures/ that are not helpers of others (they have a `draw`)."""
        scripts = sorted((self.root / "figures").glob("*.py"))
        return [path.stem for path in scripts if not path.stem.startswith("_") and path.stem != "style"]

    def load(self, *path: str) -> ModuleType:
        """Import a module of the checkout by its path, as ("experiments", "atlas", "claims").

        Checkouts are kept apart by a root package of their own, so that neither a module elsewhere that is called
        `figures` nor a second checkout gets in the way.
        """
        file = self.root.joinpath(*path).with_suffix(".py")
        if not file.is_file():
            raise UsageError(f"{file} is missing")
        root = f"_kltest_checkout_{sha256(str(self.root).encode()).hexdigest()[:8]}"
        if root not in sys.modules:
            sys.modules[root] = package = ModuleType(root)
            package.__path__ = [str(self.root)]
        invalidate_caches()  # the file may have just been written
        return import_module(".".join((root, *path)))
