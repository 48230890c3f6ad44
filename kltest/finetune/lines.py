"""Problems in a file of JSON lines."""

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np

from kltest.errors import UsageError
from kltest.finetune.problems import SPLITS, Problem, Split, is_held_out

KEYS = ("prompt", "answer", "completion", "split")
FINAL = re.compile(r"(?:####|\\boxed\{|[Aa]nswer\s*(?:is)?\s*:)\s*([^\n}]*)")


class Lines:
    """`{"prompt": "2+3=", "answer": "5"}` on each line.

    Optional keys are `completion`, a whole right text for supervised learning, and `split`: train, held-out or
    out-of-distribution, by default from a hash of the prompt.

    The reward is 1 if the answer equals the text after the last `####`, `\\boxed{` or `Answer:` of a completion, or its
    last line if there is none of these. An answer may have such a mark, too. Surrounding blanks, a final full stop and
    commas between digits are ignored.
    """

    max_tokens = 256

    def __init__(self, name: str, problems: dict[Split, list[Problem]]) -> None:
        self.name, self._problems = name, problems
        everything = [one for part in problems.values() for one in part]
        self.prompts = [one.prompt for one in everything]
        self.characters = "".join(sorted(set("".join(one.prompt + one.completion for one in everything))))

    @classmethod
    def read(cls, path: str, keys: str = "") -> Self:
        """Return the problems of a file; UsageError with the number of the first wrong line."""
        if not path:
            raise UsageError("task jsonl: name a file, jsonl:PATH")
        names = dict(pair.split("=", 1) for pair in keys.split(",") if "=" in pair)
        if len(names) != len([pair for pair in keys.split(",") if pair]) or not names.keys() <= set(KEYS):
            raise UsageError(f"keys: write prompt=NAME,answer=NAME,… with names of {', '.join(KEYS)}, not {keys!r}")
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"task jsonl: {path} cannot be read: {error.strerror}") from None
        problems: dict[Split, list[Problem]] = {split: [] for split in SPLITS}
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                split, problem = _problem_of(line, f"{path}, line {number}", names)
                problems[split].append(problem)
        name = f"jsonl:{blake2b(content, digest_size=8).hexdigest()}"
        if not problems["train"]:
            raise UsageError(f"{name}: there is no problem in it to train on")
        return cls(name, problems)

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


def _problem_of(line: bytes, where: str, names: Mapping[str, str]) -> tuple[Split, Problem]:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f'{where}: write an object with "prompt" and "answer", not {type(value).__name__}')
    if names:  # the others are of no interest
        value = {name: value.get(theirs) for name, theirs in names.items()}
    for name in value:
        if name not in KEYS:
            raise UsageError(f"{where}: {name!r} is none of {', '.join(KEYS)}; give its key by keys")
    for name in ("prompt", "answer"):
        if not isinstance(value.get(name), str) or not value[name]:
            raise UsageError(
                f'{where}: "{names.get(name, name)}" must be a text that is not empty; it is {value.get(name)!r}'
            )
    if not isinstance(value.get("completion", ""), str):
        raise UsageError(f'{where}: "completion" must be a text; it is {value["completion"]!r}')
    split = value.get("split", "held-out" if is_held_out(value["prompt"]) else "train")
    if split not in SPLITS:
        raise UsageError(f'{where}: "split" is one of {", ".join(SPLITS)}; it is {split!r}')
    return split, Problem(value["prompt"], value.get("completion") or value["answer"], value["answer"])


def _plain(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d)", "", text.strip().removesuffix(".").strip())
