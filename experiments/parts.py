"""Settings of an experiment in several parts, each of which varies some settings and takes no notice of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from kltest.sweeps.settings import Configuration, Settings, Value


@dataclass(frozen=True)
class InParts(Settings):
    """`parts`: each part's name, and the settings that it varies; `seed` among them where it is random."""

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def configurations(self, grid: Mapping[str, Sequence[Value]]) -> list[Configuration]:
        """For each part of the grid, every combination of the settings that it varies."""
        found: list[dict[str, Any]] = []
        for part in grid["part"]:
            names = self.parts[str(part)]
            combinations = product(*(grid[name] for name in names))
            found += [{"part": part, **dict(zip(names, chosen, strict=True))} for chosen in combinations]
        return [configuration for configuration in found if self.applies(configuration)]
