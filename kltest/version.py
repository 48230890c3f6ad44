"""The version of the package, read by its build as well, and those that a report notes."""

import platform
from types import ModuleType

VERSION = "0.1.0"


def versions(*modules: ModuleType) -> dict[str, str]:
    """Return the versions of kltest, of Python and of some packages, by name."""
    others = {module.__name__: str(module.__version__) for module in modules}
    return {"kltest": VERSION, "python": platform.python_version(), **others}
