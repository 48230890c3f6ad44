"""Tasks: prompts, answers, and a verifier that turns a rollout into a reward; `task_named` finds one by name."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol, Self, get_args

import numpy as np

from kltest.errors import KltestError, UsageError, did_you_mean
from kltest.loss.frames import failure
from kltest.loss.importing import import_file

Split = Literal["train", "held-out", "out-of-distribution"]
SPLITS = get_args(Split)
MOST_DIGITS = 12
KEYS = ("prompt", "answer", "completion", "split")
FINAL = re.compile(r"(?:####|\\boxed\{|[Aa]nswer\s*(?:is)?\s*:)\s*([^\n}]*)")

GONE = {
    "hub": "save the data set with its to_json(PATH), and name it jsonl:PATH",
    "countdown": "write it as a function of your own, FILE.py:NAME; the guide of kltest finetune has an example",
}
"""Tasks of earlier versions, with what to do instead."""


@dataclass(frozen=True)
class Problem:
    """A prompt and one right completion; `answer` is what the verifier compares with."""

    prompt: str
    completion: str
    answer: str


class Task(Protocol):
    """Problems by split, and their rewards.

    A task whose reward is a proxy may also have `gold(problem, completion)`, the score that is really meant: it is
    measured on held-out problems and never trained on. With `fixed_length = True` each completion has exactly
    `max_tokens` tokens: no token ends it.

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


def drawn(make: Callable[[], Problem], split: Split, count: int) -> list[Problem]:
    """Return the first `count` problems made that belong to the split; those out of distribution all do."""
    everything, held_out = split == "out-of-distribution", split == "held-out"
    return list(islice((one for one in iter(make, None) if everything or is_held_out(one.prompt) == held_out), count))


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
        """Draw sums of numbers of up to so many digits; of one more for out-of-distribution problems."""

        def make() -> Problem:
            digits = self.digits + 1 if split == "out-of-distribution" else int(generator.integers(1, self.digits + 1))
            low = 10 ** (digits - 1) if digits > 1 else 0
            return _sum_of(*(int(number) for number in generator.integers(low, 10**digits, 2)))

        return drawn(make, split, count)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1 if the number behind the last semicolon is the sum, else 0."""
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


class Lines:
    """`{"prompt": "2+3=", "answer": "5"}` on each line.

    Optional keys are `completion`, a whole right text for supervised learning, and `split`: train, held-out or
    out-of-distribution, by default from a hash of the prompt. `told` says how they were split.

    The reward is 1 if the answer equals the text after the last `####`, `\\boxed{` or `Answer:` of a completion, or its
    last line if there is none of these. An answer may have such a mark, too. Surrounding blanks, a final full stop and
    commas between digits are ignored.
    """

    max_tokens = 256

    def __init__(self, name: str, problems: dict[Split, list[Problem]]) -> None:
        self.name, self._problems = name, problems
        everything = [one for part in problems.values() for one in part]
        self.prompts = [one.prompt for one in everything]
        counts = ", ".join(f"{len(part)} {split}" for split, part in problems.items() if part)
        self.told = f"{len(everything)} problems: {counts}; those without a split by a hash of the prompt"
        self.characters = "".join(sorted(set("".join(one.prompt + one.completion for one in everything))))

    @classmethod
    def read(cls, path: str, keys: str = "") -> Self:
        """Return the problems of a file; UsageError with the number of the first wrong line."""
        pairs = re.findall(r"([^=,]+)=?([^,]*)", keys)
        if not all(ours in KEYS and theirs for ours, theirs in pairs):
            raise UsageError(f"keys: write prompt=NAME,answer=NAME,… with names of {', '.join(KEYS)}, not {keys!r}")
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"task jsonl:{path}: it cannot be read: {error.strerror}") from None
        problems: dict[Split, list[Problem]] = {split: [] for split in SPLITS}
        said = False
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                split, problem = _problem_of(line, f"{path}, line {number}", dict(pairs))
                said |= split is not None
                problems[split or ("held-out" if is_held_out(problem.prompt) else "train")].append(problem)
        if not said:  # few lines may all fall into one of them
            _fill(problems["held-out"], problems["train"])
            _fill(problems["train"], problems["held-out"])
        if not problems["train"]:
            raise UsageError(f"task jsonl:{path}: there is no problem in it to train on")
        return cls(f"jsonl:{blake2b(content, digest_size=8).hexdigest()}", problems)

    def draw(self, split: Split, count: int, generator: np.random.Generator) -> list[Problem]:
        """Draw problems of a split with replacement; UsageError if the file has none."""
        there = self._problems[split]
        if not there:
            raise UsageError(f'the task\'s file has no problem whose split is {split}: give some "split": "{split}"')
        return [there[int(index)] for index in generator.integers(len(there), size=count)]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the marked answer, or else the last line, is the right one up to how numbers are written."""
        marked = FINAL.findall(completion)
        lines = completion.strip().splitlines() or [""]
        wanted = (FINAL.findall(problem.answer) or [problem.answer])[-1]
        return float(_plain(marked[-1] if marked else lines[-1]) == _plain(wanted))


def _fill(empty: list[Problem], full: list[Problem]) -> None:
    """Move the problems of one prompt, chosen by its hash, into a split that has none; not the last prompt of all."""
    if empty or len({one.prompt for one in full}) < 2:
        return
    moved = max(full, key=lambda one: blake2b(one.prompt.encode()).digest()).prompt
    empty += [one for one in full if one.prompt == moved]
    full[:] = [one for one in full if one.prompt != moved]


def _problem_of(line: bytes, where: str, names: Mapping[str, str]) -> tuple[Split | None, Problem]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f'{where}: write an object with "prompt" and "answer", not {type(value).__name__}')
    if names:
        value = {name: value.get(theirs) for name, theirs in names.items()}
    for name in value.keys() - set(KEYS):
        raise UsageError(
            f"{where}: {name!r} is none of {', '.join(KEYS)}; say which keys are meant, as "
            "--set keys=prompt=question,answer=solution"
        )
    chosen: Split | None = value.pop("split", None)
    problem = {"completion": value.get("answer"), **value}
    for name in ("prompt", "answer", "completion"):
        text = problem.get(name)
        if not (isinstance(text, str) and text):
            raise UsageError(f'{where}: "{names.get(name, name)}" must be a text that is not empty; it is {text!r}')
    if chosen not in (None, *SPLITS):
        raise UsageError(f'{where}: "split" is one of {", ".join(SPLITS)}; it is {chosen!r}')
    return chosen, Problem(**problem)


def _plain(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d)", "", text.strip().removesuffix(".").strip())


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
    if name in GONE:
        raise UsageError(f"{name} is no task any more; {GONE[name]}")
    if name.endswith(".py"):
        return _of_a_file(Path(name), option)
    if name != "addition":
        raise UsageError(
            f"there is no task {name!r}; {did_you_mean(name, ('addition', 'jsonl'))}tasks are addition[:DIGITS], "
            "jsonl:PATH and FILE.py:NAME"
        )
    if colon and not (option.isdecimal() and 1 <= int(option) <= MOST_DIGITS):
        raise UsageError(f"task {text!r}: its option is a whole number from 1 to {MOST_DIGITS}, such as 3")
    return Addition(int(option or 3))


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
    except Exception as error:
        raise failure(where, error.__cause__ or error, str(path)) from error
    lacking = [one for one in ("name", "characters", "max_tokens", "draw", "reward") if not hasattr(task, one)]
    if lacking:
        raise UsageError(f"{where} is no task, which has {', '.join(lacking)} (see kltest.finetune.tasks.Task)")
    return task
