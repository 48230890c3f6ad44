"""Countdown: reach a goal from some numbers, each used at most once, one written step at a time."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from kltest.finetune.tasks.task import Problem, Split, drawn

STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")


class Countdown:
    """`3,5,8:23=` → `3*5=15,15+8=23`. Numbers are from 1 to 9; steps add, multiply, or subtract the smaller number.

    A prompt has `numbers` numbers; out of distribution it has one more. The reward is 1 if every step is right and uses
    numbers that are left, and the last step gives the goal; else 0. Any correct way counts.
    """

    characters = "0123456789+-*=,:"

    def __init__(self, numbers: int = 3) -> None:
        self.numbers, self.name = numbers, f"countdown:{numbers}"
        width = len(str(9 ** (numbers + 1)))
        self.max_tokens = numbers * (3 * width + 3)

    def draw(self, split: Split, count: int, generator: np.random.Generator) -> list[Problem]:
        numbers = self.numbers + (split == "out-of-distribution")
        return drawn(lambda: _problem(numbers, generator), split, count)

    def reward(self, problem: Problem, completion: str) -> float:
        there = Counter(int(number) for number in problem.prompt.partition(":")[0].split(","))
        result = None
        for step in completion.split(","):
            parts = STEP.fullmatch(step)
            # No right step has longer numbers, and int() refuses thousands of digits.
            if parts is None or max(map(len, parts.groups())) > 12:
                return 0.0
            first, second, result = int(parts[1]), int(parts[3]), int(parts[4])
            there.subtract((first, second))
            if min(there[first], there[second]) < 0 or _calculated(first, parts[2], second) != result:
                return 0.0
            there[result] += 1
        return float(str(result) == problem.answer)


def _calculated(first: int, sign: str, second: int) -> int:
    return first + second if sign == "+" else first - second if sign == "-" else first * second


def _problem(numbers: int, generator: np.random.Generator) -> Problem:
    given = [int(number) for number in generator.integers(1, 10, numbers)]
    left, steps = list(given), []
    while len(left) > 1:
        chosen = sorted(generator.choice(len(left), 2, replace=False), reverse=True)
        second, first = sorted(left.pop(int(index)) for index in chosen)
        sign = "+-*"[generator.integers(3)]
        result = _calculated(first, sign, second)
        steps.append(f"{first}{sign}{second}={result}")
        left.append(result)
    prompt = f"{','.join(map(str, given))}:{left[0]}="
    return Problem(prompt, ",".join(steps), str(left[0]))
