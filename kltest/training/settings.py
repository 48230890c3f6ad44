"""The settings that all runs of one call share, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from kltest.errors import UsageError
from kltest.training.reward import Baseline, Ratio


@dataclass(frozen=True)
class Settings:
    """See `kltest.training.train`. Raises UsageError, with the name of what is out of range."""

    steps: int
    batch_size: int | None
    group_size: int | None
    inner_steps: int
    baseline: Baseline
    ratio: Ratio
    clip: float
    max_norm: float | None
    optima: bool

    def __post_init__(self) -> None:
        least = {"steps": 0, "batch_size": 1, "group_size": 1, "inner_steps": 1}
        for name, smallest in least.items():
            number = getattr(self, name)
            if number is not None and not (isinstance(number, int) and number >= smallest):
                raise UsageError(f"{name} must be a whole number of at least {smallest}, not {number!r}")
        if self.max_norm is not None and not self.max_norm > 0:
            raise UsageError(f"max_norm must be positive, or None, not {self.max_norm}")
        for name, kind in (("baseline", Baseline), ("ratio", Ratio)):
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"the {name} {getattr(self, name)!r} is none of {', '.join(get_args(kind))}")
        if not 0 < self.clip < 1:
            raise UsageError(f"the clip ε lies between 0 and 1, not at {self.clip}")
        if self.batch_size is not None and self.group_size is not None and self.batch_size % self.group_size:
            raise UsageError(f"a batch of {self.batch_size} rollouts cannot be cut into groups of {self.group_size}")

    def recorded(self, record: int | Sequence[int] | None) -> list[int]:
        """After how many updates to measure: every `record`, or those given, the start and the end always."""
        if record is None:
            return sorted({0, self.steps})
        if isinstance(record, int):
            if record < 1:
                raise UsageError(f"records are made every 1 update or more, not every {record}")
            return sorted({*range(0, self.steps + 1, record), self.steps})
        outside = [step for step in record if not 0 <= step <= self.steps]
        if outside:
            raise UsageError(f"there is nothing to record after update {outside[0]}: training has {self.steps}")
        return sorted({0, self.steps, *record})
