"""The result of a scan as plain data: a row for each variant of each term."""

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kltest.report import Fix
from kltest.scanning.declarations import Key, key

NAME = "kl_term"
"""What the function of a row's source is called."""
UNMASKED = "no mask is known here: numbers at padded positions are in it unless its caller leaves them out"
"""Said of a term whose function has nothing to do with masks; it is no finding."""
OPEN = frozenset({"not run", "unnamed", "inconclusive", "failed"})
"""States of terms of which nothing is held against anybody."""
ORDER = ("finding", "unnamed", "inconclusive", "failed", "known", "note", "passed", "not run", "not graded")
"""Statuses in the order in which they are counted."""
_SHOWN = (
    *("file", "line", "last", "function", "place", "variant", "formula", "status", "gradients"),
    *("warnings", "ignored", "why", "notes", "source", "form", "used", "called", "noted", "directions"),
)


@dataclass
class Row:
    """One variant of one term: where it stands, what it is, what it follows and what is wrong with it.

    `form` is the name of its estimator, as k1, if it is known. `used` says what puts the variant there, as
    "Trainer.compute_loss, trainer.py:7"; `called` is false of a helper that no loss calls.
    `choices` are the options that it is chosen by, and what it chooses, in words.
    `against` says of each function from which it was found which options have another default there, and of which no
    default is known; `defaults` which options make it the default variant there, in words.
    `state` is passed, finding, unnamed, inconclusive, failed, not run, or not graded until it is known; `why` says why
    it was not run or failed. `gradients` are the names followed by sampler, and `fits` the rows behind them;
    `directions` are the least cosines with named gradients of what has no name itself. `found` are the errors that
    apply, `warnings` the warnings, and `noted` the errors that only stale rollouts would make; `logs` says which KL a
    term is that is only logged. `fixes` are changes of the source with which a finding passes, if they were asked for,
    and `advice` is why there are none. `parts` are the lines of the term by file, and `depends` those of the functions
    that it depends on.
    """

    file: str
    line: int
    last: int
    spot: str
    function: str
    place: str
    variant: str
    formula: str
    source: str = ""
    why: str = ""
    notes: Sequence[str] = ()
    comments: Sequence[tuple[str, str]] = ()
    parts: Sequence[tuple[str, int, int]] = ()
    depends: Sequence[tuple[str, int, int]] = ()
    form: str = ""
    used: Sequence[str] = ()
    called: bool = True
    choices: Mapping[str, str] = field(default_factory=dict)
    against: Mapping[str, tuple[Sequence[str], Sequence[str]]] = field(default_factory=dict)
    defaults: Mapping[str, Sequence[str]] = field(default_factory=dict)
    declared: str = ""
    ignored: Mapping[str, str] = field(default_factory=dict)
    known: bool = False
    state: str = "not graded"
    gradients: Mapping[str, str] = field(default_factory=dict)
    directions: Mapping[str, float] = field(default_factory=dict)
    fits: Sequence[str] = ()
    logs: str = ""
    found: Sequence[str] = ()
    warnings: Sequence[str] = ()
    noted: Sequence[str] = ()
    messages: Mapping[str, str] = field(default_factory=dict)
    fixes: Sequence[Fix] = ()
    advice: str = ""

    @property
    def fresh(self) -> bool:
        """Return True if nothing says that its rollouts are stale.

        A reward is made when rollouts are new, and the loss that it goes to has the ratio. Elsewhere a term that reads
        nothing of the sampler is on-policy as far as it tells.
        """
        taken = [node.arg for node in ast.walk(ast.parse(self.source)) if isinstance(node, ast.arg)]
        reward = self.place in ("reward", "advantage")
        return self.place != "logged" and (reward or not any(name.startswith("old_") for name in taken))

    @property
    def codes(self) -> list[str]:
        """Return the errors that nobody excuses."""
        return [code for code in self.found if code not in self.ignored]

    @property
    def status(self) -> str:
        """Return the state: passed if all errors are excused, known for a finding of the baseline, note for one of a
        helper that no loss calls."""
        if self.state != "finding":
            return self.state
        counts = "finding" if self.called or self.place != "helper" else "note"
        return "passed" if not self.codes else "known" if self.known else counts

    @property
    def key(self) -> Key:
        """Return what a baseline knows the row by."""
        return key(self.to_dict())

    @property
    def title(self) -> str:
        """Return the function, and which configuration of the term it is."""
        return f"{self.function} [{self.variant}]" if self.variant else self.function

    @property
    def follows(self) -> tuple[str, str]:
        """Return what is followed on-policy and off-policy, or the status."""
        return self.gradients.get("current", self.logs or self.status), self.gradients.get("stale", "")

    @property
    def remarks(self) -> str:
        """Return the codes of errors and warnings, and what is said of the term."""
        told = [" ".join(self.codes)] if self.codes else []
        told += [f"warnings {' '.join(self.warnings)}"] if self.warnings else []
        told += [f"{code} ignored: {why}" for code, why in self.ignored.items()]
        told += [f"with stale rollouts {' '.join(self.noted)}"] if self.noted else []
        told += [f"declared: {self.declared}"] if self.declared else []
        told += ["in the baseline"] if self.status == "known" else []
        return ", ".join(told) or "–"

    @property
    def sentence(self) -> str:
        """Return where the term is used, and what it follows."""
        current, stale = (f"an {each} gradient" if each == "unnamed" else each for each in self.follows)
        reason = f": {self.why.splitlines()[0]}" if self.why else ""
        under = f"; under a stale sampler {stale}" if stale else ""
        verb = "follows " if self.gradients else ""
        used = {"helper": "of a helper", "logged": "that is only logged"}.get(self.place, f"in the {self.place}")
        return f"KL term {used}, {self.title}: {verb}{current}{reason}{under}."

    @property
    def uses(self) -> list[str]:
        """Return what the call sites do with the variant, each with its place."""
        target = "reward" if self.place in ("reward", "advantage") else "loss"
        sites = ((*use.rpartition(", ")[::2], " and ".join(self.defaults.get(use, ()))) for use in self.used)
        return [
            f"{who} puts {self.form or 'it'} into the {target}{as_default and f', as {as_default}'}, {where}"
            for who, where, as_default in sites
        ]

    def said(self, code: str) -> tuple[str, str]:
        """Return what fails with a code, and where it was found."""
        fails, found, where = self.messages.get(code, "").partition(" Found ")
        return fails, f"{found}{where}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON has it."""
        return {
            **{name: getattr(self, name) for name in _SHOWN},
            "guessed": bool(self.notes),
            "errors": self.codes,
            "declared": self.declared or None,
            "fixes": [asdict(fix) for fix in self.fixes],
            "advice": self.advice,
        }


@dataclass
class Scan:
    """The rows of a scan in the order of files and lines, how much was read, and a line for each file that was not.

    `notes` are lines on declarations and entries of the baseline that concern nothing, and `unread` functions and
    variables whose names say KL, as "file:line name", in which nothing was recognised. `where` says which lines were
    asked for, as "on line 3 of loss.py", if not all of them were.
    """

    rows: list[Row]
    files: int = 0
    lines: int = 0
    left_out: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    unread: Sequence[str] = ()
    where: str = ""

    @property
    def findings(self) -> list[Row]:
        """Return the rows that count: no term of the baseline, none that is excused."""
        return [row for row in self.rows if row.status == "finding"]

    @property
    def graded(self) -> int:
        """Return how many variants were run, named and decided."""
        return sum(row.status not in (*OPEN, "not graded") for row in self.rows)

    @property
    def summary(self) -> list[str]:
        """Return lines that count: terms and files, the variants if those are more, by status; how many were graded."""
        terms, files = len({(row.file, row.spot) for row in self.rows}), self.files
        where = self.where or f"in {files} file{'s' * (files != 1)}"
        read = f"{terms or 'no'} KL term{'s' * (terms > 1)} {where} ({self.lines:,} lines)"
        read += f", {len(self.rows)} variants" * (len(self.rows) > terms)
        told = counted(self.rows)
        graded = [f"{self.graded} of {len(self.rows)} variants graded"] if told else []
        unread = [f"{len(self.unread)} named KL and not recognised"] if self.unread else []
        return [f"{read}: {told}" if told else read, *filter(None, ["; ".join([*graded, *unread])])]

    def exit_code(self, *, strict: bool = False, changed: bool = False, allow_ungraded: bool = False) -> int:
        """Return 1 for a finding, 4 if no variant was graded or with `strict` not each, 5 if there is no term at all.

        With `changed` it is 0 if there is none, and with `allow_ungraded` if no variant was graded.
        """
        if self.findings:
            return 1
        if not self.rows:
            return 0 if changed else 5
        still_open = any(row.status in OPEN for row in self.rows)
        return 4 if (still_open if strict else not (self.graded or allow_ungraded)) else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the scan as JSON has it, schema kltest.scan/1."""
        return {
            "schema": "kltest.scan/1",
            "files": self.files,
            "lines": self.lines,
            "terms": [row.to_dict() for row in self.rows],
            **{name: getattr(self, name) for name in ("left_out", "notes", "unread", "graded")},
        }


def counted(rows: Iterable[Row]) -> str:
    """Return how many rows have each status, findings first."""
    numbers = Counter(row.status for row in rows)
    several = {
        status: status + "s" * (status in ("finding", "note") and number > 1) for status, number in numbers.items()
    }
    return ", ".join(f"{numbers[one]} {several[one]}" for one in sorted(numbers, key=ORDER.index))
