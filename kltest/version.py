"""The version of the package, read by its build as well, and those that a report notes."""

import platform
from types import ModuleType

VERSION = "0.1.0"


def version_of(distribution: str) -> str:
    """Return the version of a distribution, "" if it is not installed."""
    from importlib import metadata  # it takes three times as long as `import kltest`

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def versions(*modules: ModuleType) -> dict[str, str]:
    """Return the versions of kltest, of Python and of some packages, by name."""
    others = {module.__name__: str(module.__version__) for module in modules}
    return {"kltest": VERSION, "python": platform.python_version(), **others}
