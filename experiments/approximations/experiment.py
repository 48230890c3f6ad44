"""Each part of the experiment has a file of its own; here a configuration finds its part."""

from collections.abc import Mapping, Sequence
from typing import Any

from kltest.sweeps.run import Batching

from . import clamps, heads, lengths, precision
from .settings import PARTS
from .settings import SETTINGS as SETTINGS

BATCHING = Batching(tuple(dict.fromkeys(name for names in PARTS.values() for name in names)), size=32)

Row = dict[str, Any]


def compute_batch(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Rows of each configuration, in which its own settings stand first."""
    compute = {
        "head": heads.bias,
        "prefixes": heads.on_prefixes,
        "drift": heads.drift,
        "clamp": clamps.zones,
        "lead": clamps.at_a_lead,
        "return": clamps.way_back,
        "precision": precision.error,
        "batch": lengths.of_a_batch,
        "lengths": lengths.of_one_rollout,
    }
    if configurations[0]["part"] == "optimum":
        found = lengths.ends(configurations)
    else:
        found = [compute[one["part"]](one) for one in configurations]
    return [[{**one, **row} for row in rows] for one, rows in zip(configurations, found, strict=True)]
