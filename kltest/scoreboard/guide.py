"""What a practitioner should set, library by library, for the true reverse-KL gradient, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kltest.scoreboard.table import Line
from kltest.truth import render

INTRODUCTION = (
    "Each row is one setting of one version of a library, called through the library's own code on every rollout "
    "of small worlds. Its gradients were added up with their exact probabilities and the sum was named: one step "
    "is a single choice, sequences are three tokens or up to three with an end token, off-policy means that "
    "another policy drew the rollouts (empty where a setting does not look at that policy's log-probs). A factor "
    "before a name is the coefficient that is really applied where 1 was asked for. A library may follow another "
    "objective than KL(π‖ref) on purpose: a row says which gradient it follows, not that it is wrong."
)
MEANINGS = {
    "reverse_kl": "the gradient of the KL between whole sequences, which the objective of RLHF subtracts",
    "local_reverse_kl": "its next-token part: prefixes are taken as given, no token answers for what follows",
    "forward_kl": "the gradient of the other KL, from the reference to the policy",
    "local_forward_kl": "the next-token part of the other KL",
    "zero": "no gradient in expectation, only noise",
}
KINDS = {
    "reverse": "follows ∇KL(π‖ref)",
    "part": "its next-token part, or another size",
    "other": "another gradient",
    "open": "not to be said",
}


def names() -> dict[str, str]:
    """What the gradients that are met most often mean, by how they are written."""
    return {render({name: 1.0}): meaning for name, meaning in MEANINGS.items()}


@dataclass(frozen=True)
class Advice:
    """For one library and version: settings that follow ∇KL(π‖ref) as they are, and what to add where none does."""

    library: str
    settings: tuple[Line, ...]
    recipes: tuple[Line, ...]
    defaults: tuple[Line, ...]


def advice(lines: Sequence[Line]) -> list[Advice]:
    """What to set, for each library and version, in the order of the lines."""
    titles = dict.fromkeys(line.cells["library"] for line in lines if line.setting)
    found = []
    for title in titles:
        own = [line for line in lines if line.cells["library"] == title]
        right = [line for line in own if line.kind == "reverse"]
        found.append(
            Advice(
                title,
                tuple(line for line in right if not line.recipe),
                tuple(line for line in right if line.recipe),
                tuple(line for line in own if line.default),
            )
        )
    return found
