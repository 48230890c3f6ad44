"""Sizes of the batches, or groups, over which a loss that couples its rows is measured."""

from dataclasses import dataclass

# Sizes to try if none was asked for: the smallest batch that the loss accepts, the largest group up to the usual one.
BATCHES = (2, 4, 8)
GROUPS = (4, 3, 2)
# Batches are called one by one, about half a millisecond each: up to a second an instance, up to a few if that is the
# only size that the loss takes or the one that was asked for.
FEW_BATCHES, MOST_BATCHES = 1_000, 5_000
GROUP_FIELDS = frozenset({"reward", "advantage", "group"})


@dataclass(frozen=True)
class Sizes:
    """Batch sizes to try for a loss that couples rows, in rollouts; `grouped` batches are groups of one prompt."""

    each: tuple[int, ...] = BATCHES
    grouped: bool = False
    requested: bool = False

    @classmethod
    def of(cls, uses: frozenset[str], group_size: int | None = None, batch_size: int | None = None) -> "Sizes":
        """Return sizes for a loss that reads these fields: of groups if it reads rewards and no batch size is given."""
        grouped = bool(uses & GROUP_FIELDS) and batch_size is None
        asked = group_size if grouped else batch_size
        return cls((asked,) if asked else GROUPS if grouped else BATCHES, grouped, bool(asked))

    @property
    def attempts(self) -> list[tuple[int, int]]:
        """(size, most batches to enumerate) in the order in which they are tried."""
        first = [] if self.requested else [(many, FEW_BATCHES) for many in self.each]
        return [*first, (self.each[0], MOST_BATCHES)]
