"""A task as the runner sees it: problems by split, and the rewards of their completions."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol, get_args

import numpy as np

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

    A task whose reward is a proxy may also have `gold(problem, completion)`, the score that is really meant: it is
    measured on held-out problems and never trained on.

    Attributes:
        name: Unique among tasks and their options.
        characters: All characters of prompts and completions, for a tokenizer of one token a character.
        max_tokens: Length of the longest right completion of any split in characters, plus its end.
    """

    name: str
    characters: str
    max_tokens: int

    def draw(self, split: Split, count: int, generator: np.random.Generator) -> list[Problem]:
        """Return `count` problems; no problem is in two splits. UsageError if there are none in this split."""
        ...

    def reward(self, problem: Problem, completion: str) -> float:
        """Return a reward, best between 0 and 1; a completion is the text of a rollout without its end token."""
        ...


def is_held_out(prompt: str) -> bool:
    """True for one prompt in eight, by a hash of its text: the same on every machine and for every seed."""
    return blake2b(prompt.encode(), digest_size=8).digest()[0] % 8 == 0
