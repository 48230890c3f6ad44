"""Tasks: prompts, answers, and a verifier that turns a rollout into a reward. One task a file, found by name here."""

from __future__ import annotations

from kltest.errors import UsageError, did_you_mean
from kltest.finetune.tasks.addition import Addition
from kltest.finetune.tasks.countdown import Countdown
from kltest.finetune.tasks.jsonl import Lines
from kltest.finetune.tasks.task import SPLITS, Problem, Split, Task

__all__ = ["SPLITS", "Problem", "Split", "Task", "task_named"]


def task_named(text: str) -> Task:
    """Return the task `NAME[:OPTION]`; UsageError for an unknown task or option."""
    name, colon, option = text.partition(":")
    if name == "jsonl":
        return Lines.read(option)
    if name == "addition":
        return Addition(_number(text, option, 1, 12) if colon else 3)
    if name == "countdown":
        return Countdown(_number(text, option, 2, 6) if colon else 3)
    names = ("addition", "countdown", "jsonl")
    raise UsageError(
        f"there is no task {name!r}; {did_you_mean(name, names)}tasks are addition[:DIGITS], countdown[:NUMBERS] and "
        "jsonl:PATH"
    )


def _number(text: str, option: str, low: int, high: int) -> int:
    if not option.isdecimal() or not low <= int(option) <= high:
        raise UsageError(f"task {text!r}: its option is a whole number from {low} to {high}, such as 3")
    return int(option)
