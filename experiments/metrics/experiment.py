"""Each part of the experiment has a file of its own; here a configuration finds its part."""

from collections.abc import Mapping, Sequence
from typing import Any

from kltest.sweeps.run import Batching

from . import runs, snapshots
from .settings import PARTS

BATCHING = Batching(tuple(dict.fromkeys(name for names in PARTS.values() for name in names)), size=16)

Row = dict[str, Any]


def compute_batch(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Rows of each configuration, in which its own settings stand first."""
    compute = {
        "mutation": runs.mutation,
        "controller": runs.controller,
        "logged": runs.logged,
        "reweighted": snapshots.reweighted,
        "masked": snapshots.masked,
        "padding": snapshots.padding,
    }
    return [[{**one, **row} for row in compute[one["part"]](one)] for one in configurations]
