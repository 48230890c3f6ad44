"""Tasks: prompts, answers, and a verifier that turns a rollout into a reward; `task_named` finds one by name."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np

from kltest.errors import UsageError, did_you_mean

Split = Literal["train", "held-out", "out-of-distribution"]
SPLITS = get_args(Split)
STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")
KEYS = ("prompt", "answer", "completion", "split")
FINAL = re.compile(r"(?:####|\\boxed\{|[Aa]nswer\s*(?:is)?\s*:)\s*([^\n}]*)")


@dataclass(frozen=True)
class Problem:
    """A prompt and one right completion; `answer` is what the verifier compares with."""

    prompt: str
    completion: str
    answer: str


class Task(Protocol):
    """Problems by split, and their rewards.

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
        """Return a reward between 0 and 1; a completion is the text of a rollout without its end token."""
        ...


def is_held_out(prompt: str) -> bool:
    """True for one prompt in eight, by a hash of its text: the same on every machine and for every seed."""
    return blake2b(prompt.encode(), digest_size=8).digest()[0] % 8 == 0


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


class Lines:
    """`{"prompt": "2+3=", "answer": "5"}` on each line.

    Optional keys are `completion`, a whole right text for supervised learning, and `split`: train, held-out or
    out-of-distribution, by default from a hash of the prompt.

    The reward is 1 if the answer equals the text after the last `####`, `\\boxed{` or `Answer:` of a completion, or its
    last line if there is none of these. Surrounding blanks, a final full stop and commas between digits are ignored.
    """

    max_tokens = 256

    def __init__(self, name: str, problems: dict[Split, list[Problem]]) -> None:
        self.name, self._problems = name, problems
        everything = [one for part in problems.values() for one in part]
        self.prompts = [one.prompt for one in everything]
        self.characters = "".join(sorted(set("".join(one.prompt + one.completion for one in everything))))

    @classmethod
    def read(cls, path: str) -> Self:
        """Return the problems of a file; UsageError with the number of the first wrong line."""
        if not path:
            raise UsageError("task jsonl: name a file, jsonl:PATH")
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"task jsonl: {path} cannot be read: {error.strerror}") from None
        problems: dict[Split, list[Problem]] = {split: [] for split in SPLITS}
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                split, problem = _problem_of(line, f"{path}, line {number}")
                problems[split].append(problem)
        if not problems["train"]:
            raise UsageError(f"{path}: there is no problem in it to train on")
        return cls(f"jsonl:{blake2b(content, digest_size=8).hexdigest()}", problems)

    def draw(self, split: Split, count: int, generator: np.random.Generator) -> list[Problem]:
        there: Sequence[Problem] = self._problems[split]
        if not there:
            raise UsageError(f'the task\'s file has no problem whose split is {split}: give some "split": "{split}"')
        return [there[int(index)] for index in generator.integers(len(there), size=count)]

    def reward(self, problem: Problem, completion: str) -> float:
        marked = FINAL.findall(completion)
        lines = completion.strip().splitlines() or [""]
        return float(_plain(marked[-1] if marked else lines[-1]) == _plain(problem.answer))


def _problem_of(line: bytes, where: str) -> tuple[Split, Problem]:
    try:
        value: Any = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f'{where}: write an object with "prompt" and "answer", not {type(value).__name__}')
    for name in value:
        if name not in KEYS:
            raise UsageError(f"{where}: {name!r} is none of {', '.join(KEYS)}")
    for name in ("prompt", "answer"):
        if not isinstance(value.get(name), str) or not value[name]:
            raise UsageError(f'{where}: "{name}" must be a text that is not empty; it is {value.get(name)!r}')
    if not isinstance(value.get("completion", ""), str):
        raise UsageError(f'{where}: "completion" must be a text; it is {value["completion"]!r}')
    split = value.get("split", "held-out" if is_held_out(value["prompt"]) else "train")
    if split not in SPLITS:
        raise UsageError(f'{where}: "split" is one of {", ".join(SPLITS)}; it is {split!r}')
    return split, Problem(value["prompt"], value.get("completion") or value["answer"], value["answer"])


def _plain(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d)", "", text.strip().removesuffix(".").strip())


def task_named(text: str) -> Task:
    """Return the task `NAME[:OPTION]`; UsageError for an unknown task or option."""
    name, colon, option = text.partition(":")
    if name == "jsonl":
        return Lines.read(option)
    kinds: dict[str, tuple[Callable[..., Task], int, int]] = {
        "addition": (Addition, 1, 12),
        "countdown": (Countdown, 2, 6),
    }
    if name not in kinds:
        raise UsageError(
            f"there is no task {name!r}; {did_you_mean(name, (*kinds, 'jsonl'))}tasks are addition[:DIGITS], "
            "countdown[:NUMBERS] and jsonl:PATH"
        )
    kind, low, high = kinds[name]
    if not colon:
        return kind()
    if not option.isdecimal() or not low <= int(option) <= high:
        raise UsageError(f"task {text!r}: its option is a whole number from {low} to {high}, such as 3")
    return kind(int(option))
