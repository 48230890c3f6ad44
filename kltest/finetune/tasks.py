"""Tasks: prompts, answers, and a verifier that turns a rollout into a reward; `task_named` finds one by name."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

from kltest.errors import KltestError, UsageError, did_you_mean
from kltest.finetune.lines import Lines
from kltest.finetune.problems import Problem, Split, Task, is_held_out
from kltest.loss.frames import failure
from kltest.loss.importing import ImportFailedError, import_file

STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")


def drawn(make: Callable[[], Problem], split: Split, count: int) -> list[Problem]:
    """Return the first `count` problems made that belong to the split; those out of distribution all do."""
    everything, held_out = split == "out-of-distribution", split == "held-out"
    made = iter(make, None)
    return list(islice((one for one in made if everything or is_held_out(one.prompt) == held_out), count))


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
            return _sum_of(*(int(number) for number in generator.integers(low, 10**digits, 2)))

        return drawn(make, split, count)

    def reward(self, problem: Problem, completion: str) -> float:
        found = re.fullmatch(r".*;(\d+)", completion, re.DOTALL)
        return float(found is not None and found[1] == problem.answer)


def _sum_of(first: int, second: int) -> Problem:
    columns, carry = [], 0
    for one, other in zip(reversed(str(first)), reversed(str(second)), strict=True):
        total = int(one) + int(other) + carry
        columns.append(f"{total:02d}")
        carry = total // 10
    answer = str(first + second)
    return Problem(f"{first}+{second}=", f"{','.join(columns)};{answer}", answer)


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
        return drawn(lambda: _countdown_of(numbers, generator), split, count)

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


def _countdown_of(numbers: int, generator: np.random.Generator) -> Problem:
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


def task_named(text: str, keys: str = "") -> Task:
    """Return the task `NAME[:OPTION]`, or that of a file of Python, `FILE.py:NAME`.

    `keys` renames those of a file's problems: "prompt=question,answer=solution".

    Raises:
        UsageError: There is no such task or option.
        TargetError: The file fails.
    """
    name, colon, option = text.partition(":")
    if name == "jsonl":
        return Lines.read(option, keys)
    if name == "hub":
        raise UsageError(
            "data sets of the hub are no tasks any more: save one with its to_json(PATH), and name it jsonl:PATH"
        )
    if name.endswith(".py"):
        return _of_a_file(Path(name), option)
    kinds: dict[str, tuple[Callable[..., Task], int, int]] = {
        "addition": (Addition, 1, 12),
        "countdown": (Countdown, 2, 6),
    }
    if name not in kinds:
        raise UsageError(
            f"there is no task {name!r}; {did_you_mean(name, (*kinds, 'jsonl'))}tasks are addition[:DIGITS], "
            "countdown[:NUMBERS], jsonl:PATH and FILE.py:NAME"
        )
    kind, low, high = kinds[name]
    if not colon:
        return kind()
    if not option.isdecimal() or not low <= int(option) <= high:
        raise UsageError(f"task {text!r}: its option is a whole number from {low} to {high}, such as 3")
    return kind(int(option))


def _of_a_file(path: Path, name: str) -> Task:
    """The task `name` of a file: a class or function that makes one, or a task itself."""
    where = f"task {path}:{name}"
    if not path.is_file():
        raise UsageError(f"{where}: there is no such file")
    try:
        made = getattr(import_file(path.resolve()), name, None)
        task: Task = made() if callable(made) else made  # type: ignore[assignment]
    except KltestError:
        raise
    except ImportFailedError as error:
        raise failure(f"importing {path}", error.__cause__ or error, str(path)) from error
    except Exception as error:
        raise failure(where, error, str(path)) from error
    lacking = [one for one in ("name", "characters", "max_tokens", "draw", "reward") if not hasattr(task, one)]
    if lacking:
        raise UsageError(f"{where} is no task, which has {', '.join(lacking)} (see kltest.finetune.problems.Task)")
    return task
