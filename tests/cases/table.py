"""One table of losses that kltest is held to: what each is, how it is graded, the verdict and the codes that it earns.

Losses of `wrong_*.py` and `right_*.py` (lists CASES) grew up with the checks: exactly the codes of their row may fail.
Those of `unseen_*.py` (rows in `unseen.py`) were written in the style of public trainers by authors who had not read
the checks: one of the true codes must fail and no false one, and `brute_force.py` holds the labels to the truth.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import kltest
from kltest.report import Report

FOLDER = Path(__file__).parent
KL_VALUES = {"kl", "kl_per_token", "mean_of_token_means"}
# Verdicts by the level of what is wrong; a warning leaves a loss confirmed, as it is if nothing is wrong.
VERDICTS = {"error": "refuted", "open": "inconclusive"}


@dataclass(frozen=True)
class Case:
    """A loss and how it is to be graded.

    `codes` are those of its defect; with `exactly` these and no others fail (KL8xx aside), else one of them at least,
    and none of those that would be `forbidden`, since false. `level` is error, or warning where ordinary input shows
    nothing, or open where nobody can tell: then the codes are those that stay inconclusive. `reach` says how far out
    the defect shows: tokens of a rollout, rows of a batch, log-ratio of a token to the reference or to the sampler
    (rollouts of two tokens), columns beyond the longest rollout of three; empty: in small environments. `logs`: it
    logs a number that is a KL. `slow` ones take seconds and are graded weekly; of
    the others `pushed` ones are graded on every push.
    """

    name: str
    target: Callable[..., Any] | str  # a function, a registered name, or file:function of this folder
    right: bool
    expect: str = "reverse_kl"
    placement: str = "loss"
    credit: str = "return"
    sampler: str | None = None  # None: the default
    arguments: dict[str, Any] = field(default_factory=dict)
    group_size: int | None = None
    batch_size: int | None = None
    environment: str | None = None
    beta: float | None = None
    defect: str = ""
    level: str = ""
    codes: frozenset[str] = frozenset()
    exactly: bool = False
    forbidden: frozenset[str] = frozenset()
    reach: dict[str, float] = field(default_factory=dict)
    tolerance: float = 1e-9
    logs: bool = False
    slow: bool = False
    pushed: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of `kltest.grade`."""
        found: dict[str, Any] = {"expect": self.expect, "arguments": self.arguments}
        if self.placement != "loss":
            found |= {"placement": self.placement, "credit": self.credit}
        for name in ("sampler", "group_size", "batch_size", "environment", "beta"):
            if value := getattr(self, name):
                found[name] = value
        return found

    def report(self) -> Report:
        """Grade it as a user would."""
        target = self.target
        if isinstance(target, str) and ".py:" in target:
            target = str(FOLDER / target)
        return kltest.grade(target, **self.options)

    def faults(self, report: Report) -> list[str]:
        """Return in what a report is not as this row says."""
        failed = {check.code for check in report.failed}
        unsure = {check.code for check in report.checks if check.status == "inconclusive"}
        wanted = VERDICTS.get(self.level, "confirmed")
        found = [] if report.verdict == wanted else [f"is to be {wanted}, is {report.verdict} {report.error}"]
        if self.exactly:
            noise = {code for code in failed if code.startswith("KL8")} - self.codes
            # A baseline of the other rows in a batch moves the gradient of a given batch, in noise only: a warning.
            allowed = noise | ({"KL206"} if self.right else set())
            if not self.codes <= failed <= self.codes | allowed:
                found.append(f"fails {sorted(failed - noise)}, not {sorted(self.codes)}")
        elif not self.right and not self.codes & (unsure if self.level == "open" else failed):
            found.append(f"one of {', '.join(sorted(self.codes))} is to fail ({self.defect})")
        if false := sorted(self.forbidden & failed):
            found.append(f"{', '.join(false)} would be false of it")
        if self.logs:
            if {check.status for check in report.checks if check.code.startswith("KL60")} != {"pass"}:
                found.append("a check of the logged value does not pass")
            if not {row.matches for row in report.value if row.sampler == "current"} <= KL_VALUES:
                found.append("what it logs is called no KL")
        return found


def undecided(code: str, loss: Callable[..., Any] | str, *, slow: bool = False) -> Case:
    """A loss of which nothing may be said, since `code` stays inconclusive."""
    return Case(f"{code}-{_name(loss)}", loss, False, defect=code, level="open", codes=frozenset({code}), slow=slow)


def wrong(
    code: str,
    loss: Callable[..., Any] | str,
    also: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
    *,
    warns: bool = False,
    slow: bool = False,
) -> Case:
    """A loss that must fail `code`, and `also` those, and no others; `warns`: it is confirmed all the same."""
    level = "warning" if warns or code.startswith("KL8") else "error"
    codes = frozenset((code, *also))
    name = f"{code}-{_name(loss)}"
    return Case(name, loss, False, **(options or {}), defect=code, level=level, codes=codes, exactly=True, slow=slow)


def right(
    loss: Callable[..., Any] | str, options: Mapping[str, Any] | None = None, *, logs: bool = False, slow: bool = False
) -> Case:
    """A right loss: it must be confirmed, and no check may fail."""
    return Case(_name(loss), loss, True, **(options or {}), exactly=True, logs=logs, slow=slow)


def cases() -> list[Case]:
    """Return all rows, with names that are numbered if a loss stands in several rows with different options.

    A file is a kind of mechanism. On every push the first of its rows that is not slow is graded: a wrong one in
    `wrong_*.py`, a right one in `right_*.py`.
    """
    files = [file.stem for kind in ("wrong", "right") for file in sorted(FOLDER.glob(f"{kind}_*.py"))]
    seen: Counter[str] = Counter()
    found = []
    pushed: set[str] = set()
    for file in (*files, "unseen"):
        for case in import_module(f"cases.{file}").CASES:
            seen[case.name] += 1
            name = case.name if seen[case.name] == 1 else f"{case.name}-{seen[case.name]}"
            now = not case.slow and file != "unseen" and case.right == file.startswith("right") and file not in pushed
            pushed |= {file} if now else set()
            found.append(replace(case, name=name, pushed=now))
    return found


def _name(loss: Callable[..., Any] | str) -> str:
    return loss if isinstance(loss, str) else getattr(loss, "__qualname__", type(loss).__name__).replace("<lambda>", "")
