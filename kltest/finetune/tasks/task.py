"""What a task is, and how it is found by name."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol, get_args

import numpy as np

from kltest.errors import UsageError, did_you_mean

Split = Literal["train", "held-out", "out-of-distribution"]
SPLITS = get_args(Split)


@dataclass(frozen=True)
class Problem:
    """A prompt and one right completion; `answer` is what the verifier compares with."""

    prompt: str
    completion: str
    answer: str


class Task(Protocol):
    """Problems by split, and their rewards.

    `name` tells it from all other tasks; `characters` are those of all prompts and completions, for a tokenizer of its
    own; `max_tokens` is the longest right completion in characters, its end included, out of distribution as well.
    """

    name: str
    characters: str
    max_tokens: int

    def draw(self, split: Split, count: int, generator: np.random.Generator) -> list[Problem]:
        """That many problems; no problem is in two splits. UsageError if there are none in this split."""
        ...

    def reward(self, problem: Problem, completion: str) -> float:
        """Between 0 and 1; a completion is the text of a rollout without its end token."""
        ...


def task_named(text: str) -> Task:
    """The task `NAME[:OPTION]`; UsageError where there is none, or for an option that it does not take."""
    from kltest.finetune.tasks.addition import Addition
    from kltest.finetune.tasks.countdown import Countdown
    from kltest.finetune.tasks.jsonl import Lines

    name, colon, option = text.partition(":")
    if name == "jsonl":
        return Lines.read(option)
    if name == "addition":
        return Addition(_number(text, option, 3, 1, 12) if colon else 3)
    if name == "countdown":
        return Countdown(_number(text, option, 3, 2, 6) if colon else 3)
    names = ("addition", "countdown", "jsonl")
    raise UsageError(
        f"there is no task {name!r}; {did_you_mean(name, names)}tasks are addition[:DIGITS], countdown[:NUMBERS] and "
        "jsonl:PATH"
    )


def is_held_out(prompt: str) -> bool:
    """One prompt in eight, told by its text alone: the same on every machine and for every seed."""
    return blake2b(prompt.encode(), digest_size=8).digest()[0] % 8 == 0


def _number(text: str, option: str, usual: int, low: int, high: int) -> int:
    if not option.isdecimal() or not low <= int(option) <= high:
        raise UsageError(f"task {text!r}: its option is a whole number from {low} to {high}, such as {usual}")
    return int(option)
