"""Addition of two numbers; the completion writes down the sum of every column first."""

from __future__ import annotations

import re

import numpy as np

from kltest.finetune.tasks.task import Problem, Split, drawn


class Addition:
    """`47+85=` → `12,13;132`: the sums of the columns from the right, carries included, then the sum.

    Both numbers have the same number of digits, uniform from 1 to `digits`; out of distribution it is `digits` + 1.
    The reward is 1 for the right sum after the last `;`, whatever the columns say, else 0.
    """

    characters = "0123456789+=,;"

    def __init__(self, digits: int = 3) -> None:
        self.digits, self.name = digits, f"addition:{digits}"
        longest = digits + 1
        self.max_tokens = 3 * longest + longest + 1 + 1  # columns with separators, sum, end

    def draw(self, split: Split, count: int, generator: np.random.Generator) -> list[Problem]:
        def make() -> Problem:
            digits = self.digits + 1 if split == "out-of-distribution" else int(generator.integers(1, self.digits + 1))
            low = 10 ** (digits - 1) if digits > 1 else 0
            return _problem(*(int(number) for number in generator.integers(low, 10**digits, 2)))

        return drawn(make, split, count)

    def reward(self, problem: Problem, completion: str) -> float:
        found = re.fullmatch(r".*;(\d+)", completion, re.DOTALL)
        return float(found is not None and found[1] == problem.answer)


def _problem(first: int, second: int) -> Problem:
    columns, carry = [], 0
    for one, other in zip(reversed(str(first)), reversed(str(second)), strict=True):
        total = int(one) + int(other) + carry
        columns.append(f"{total:02d}")
        carry = total // 10
    answer = str(first + second)
    return Problem(f"{first}+{second}=", f"{','.join(columns)};{answer}", answer)
