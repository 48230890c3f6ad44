"""Numbers that trainers pass beside the fields of a rollout, made of these in each call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kltest.names import BATCH_SIZES


@dataclass(frozen=True)
class Derived:
    """A number that is made of the fields in each call; `name` is its key in DERIVED."""

    name: str

    def at(self, view: Any) -> Any:
        """Return it for one batch."""
        return DERIVED[self.name][1](view)


def _prompts(view: Any) -> list[str]:
    return [f"prompt-{int(one)}" for one in view.group]


# Names of parameters without a default, and what they get: words for the report, and the value for one batch.
_PROMPTS = ("a name of each row's prompt", _prompts)
DERIVED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "lengths": ("live tokens of each row", lambda view: (view.mask != 0).sum(-1)),
    "log_ratio": ("logp − ref_logp", lambda view: view.logp - view.ref_logp),
    "num_items_in_batch": ("live tokens of the batch", lambda view: (view.mask != 0).sum()),
    "device": ("the CPU", lambda view: torch.device("cpu")),
    "index": _PROMPTS,
    "uid": _PROMPTS,
    **dict.fromkeys(BATCH_SIZES, ("rows of the batch", lambda view: len(view.mask))),
}
