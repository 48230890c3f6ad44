"""What a door into a library is: how it is installed, and which of its settings can be graded and how.

A door is plain data, so that what is known can be listed without torch and without the library. A setting is a target
of `kltest grade` with its arguments and options: a function of the library itself, or a function of the door's module
that calls the library's own loss or trainer and whose parameters are filled from the rollout like those of any loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Depth = Literal["function", "loss", "trainer"]
DEPTHS: dict[Depth, str] = {
    "function": "its KL function alone",
    "loss": "its whole loss, from log-probs",
    "trainer": "its trainer, forward pass included",
}


@dataclass(frozen=True)
class Setting:
    """One way to run a library's KL term.

    `name` is unique in its door and no Python identifier (`kl_penalty/k3`, `grpo/loss_type=dapo`), so that
    `DOOR:NAME` is never mistaken for `module:function`. `target` and `arguments` are what `kltest grade` is given, with
    `options` (expect, placement, credit, sampler, environment, group_size, timeout, …) beside them. `default` marks
    what the library's documentation says happens when nothing is set, `recipe` what kltest proposes instead. `source`
    is a link to what the library says of it; `note` is one neutral sentence on what had to be assumed.
    """

    name: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    depth: Depth = "function"
    default: bool = False
    recipe: bool = False
    source: str = ""
    note: str = ""

    def asked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What `kltest.grade` is asked for this setting: its own options and arguments, and over them those given."""
        arguments = {**self.arguments, **(given.get("arguments") or {})}
        return {**self.options, **given, **({"arguments": arguments} if arguments else {})}


@dataclass(frozen=True)
class Door:
    """A library: `installs` are calls of `pip install`, in order, `{version}` being the one asked for.

    `module` is what must be importable for anything to be graded; `imports` are modules that take long to import and
    that most settings need: they are imported once, before the processes that grade settings are forked, so no JAX
    (its threads do not survive that). `settings` are those that are known, documented
    defaults first; `discover` finds, in the library that is installed, settings that nobody wrote down here (names of a
    later version): it may import the library, and returns only what is not among `settings`.

    `reproduction` writes a program that shows a setting's gradient with the library and torch (or JAX) alone, for
    settings whose target is a function of the door's module, and where the grader writes none; it is empty where the
    door knows none either. Its last line of output is a JSON object: `vocabulary` V and `length` T of a world of
    fixed length, `policy`, `reference` and `sampler` (null where it is the policy) as (C, V) probabilities, and
    `expected` (C, V), the sum over all rollouts of their probability times the gradient with respect to logits,
    contexts in breadth-first order.
    """

    name: str
    distribution: str
    version: str
    installs: tuple[tuple[str, ...], ...]
    module: str
    homepage: str
    settings: tuple[Setting, ...]
    imports: tuple[str, ...] = ()
    discover: Callable[[], Sequence[Setting]] | None = None
    reproduction: Callable[[Setting], str] | None = None

    def setting(self, name: str) -> Setting | None:
        """The known setting of that name."""
        return next((setting for setting in self.settings if setting.name == name), None)
