"""What reads a function that cannot be called: it stands in a layer above, and is set there."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kltest.report import Report

Reader = Callable[[str, str, Mapping[str, Any], str], "Report | None"]
READERS: list[Reader] = []
"""What grades a function from its source: by its target, its name, checked options, and why it is not called (empty
where reading was asked for). None if there is no such function. `kltest`, a layer above, sets it."""
