"""Grading terms that were found: each variant in a process of its own, several at once."""

import re
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kltest.grading.isolated import Child, Children, Step
from kltest.grading.jobs import Job, in_child
from kltest.grading.options import checked
from kltest.render.words import VALUES, cosine
from kltest.scanning.rows import NAME, UNMASKED, Row
from kltest.scanning.store import Store
from kltest.truth import render

TIMEOUT = 60.0
PASSING = ({"reverse_kl"}, {"local_reverse_kl"})
NOT_ASKED = ("KL106", "KL201", "KL601")
"""Checks that a term of unknown claim cannot fail: its scale, a next-token part, a value that nobody logs."""
EXACT = 1e-9
"""Residual above which a sum of three gradients is no name: in float32, another one may be as near as that."""
ON_FRESH = ("KL301", "KL303", "KL305")
"""Checks of a missing ratio, and of the sampler's numbers in a reward: right while rollouts are fresh."""
KIN = ("reverse_kl", "local_reverse_kl", "forward_kl", "local_forward_kl")
"""Gradients of which the least cosine with an unnamed one is told."""
MOVING = ("KL203", "KL204", "KL207")
"""Checks of a size that moves with lengths, batches or widths."""
ANOTHER = "The gradient is another one than a positive multiple of ∇KL(π‖ref) or of its next-token part."
Report = dict[str, Any]
"""Verdict, gradients and checks of a report, its error, and whether grading once more would only repeat it; also the
directions of an unnamed gradient."""


class Judge:
    """Grades terms in children, which all end with it, at once.

    `asked` gradings are begun, and `done` of them ended: what is in the store is not graded.

    Args:
        jobs: how many terms are graded at once.
        timeout: seconds that one grading may take.
        store: where results are kept.
    """

    def __init__(self, jobs: int, timeout: float, store: Store) -> None:
        self.timeout, self.store = timeout, store
        self.asked = self.done = 0
        self._children = Children(jobs)
        self._waiting: dict[str, list[Row]] = {}

    def __enter__(self) -> "Judge":
        self._folder = tempfile.TemporaryDirectory(prefix="kltest-scan-")
        return self

    def __exit__(self, *_: object) -> None:
        self._children.__exit__()
        self._folder.cleanup()

    def judged(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Fill in what is known of each row, and yield it as soon as it is; rows are taken while others are graded."""
        answers: dict[str, Report] = {}
        for row in rows:
            key = self._key(row)
            if row.why:
                row.state = "not run"
                yield row
            elif known := self.store.read(key):
                yield filled(row, known)
            elif key in answers:
                self.asked += 1
                self.done += 1
                yield filled(row, answers[key])
            elif key in self._waiting:
                self._waiting[key].append(row)
            else:
                self.asked += 1
                self._waiting[key] = [row]
                self._children.add(key, self._graded(row, Path(self._folder.name, f"term_{self.asked}.py")))
            yield from self._finished(answers, block=False)
        yield from self._finished(answers, block=True)

    def _key(self, row: Row) -> str:
        return self.store.key("term", row.source, row.place, row.declared, self.timeout)

    def _graded(self, row: Row, file: Path) -> Generator[Child, Step, Report]:
        import kltest.grading.grader  # noqa: F401  before children are forked, so that each has torch already

        return (yield from grade(file, row, self.timeout))

    def _finished(self, answers: dict[str, Report], *, block: bool) -> Iterator[Row]:
        for key, report in self._children.finished(block=block):
            rows = self._waiting.pop(key)
            self.done += 1
            answers[key] = report
            if report["lasts"]:
                self.store.write(key, report)
            yield from (filled(row, report) for row in rows)


# What a lifted function is given as logits stands for log π(·), normalised or not in the tree.
NORMALISED = {"ignore": ["KL512"]}


def options(place: str) -> dict[str, str]:
    """Return where a variant is graded: what enters a token's own advantage has immediate credit."""
    if place == "advantage":
        return {"placement": "reward", "credit": "immediate"}
    return {"placement": "reward" if place == "reward" else "loss"}


def grade(file: Path, row: Row, timeout: float) -> Generator[Child, Step, Report]:
    """Grade one lifted function; a term that declares nothing and follows next-token parts is graded as such.

    What nothing says to be stale is judged on-policy, and what it follows with stale rollouts is told.
    """
    file.write_text(row.source, encoding="utf-8")

    def ask(expected: str, sampler: str = "current" if row.fresh else "both", **more: Any) -> Any:
        given = {"expect": expected, **options(row.place), "sampler": sampler, "timeout": timeout, **NORMALISED, **more}
        report, kind = yield from in_child(Job(NAME, f"{file}:{NAME}", checked(given, lambda option: option.name)))
        found = report.to_dict()
        kept = {name: found[name] for name in ("verdict", "gradients", "checks", "value")}
        error = (found.get("error") or "").replace(f"{file}:{NAME}", "the term").replace(f"{file}:", "line ")
        kept["error"] = " ".join(error.split())
        return {**kept, "lasts": kind in ("value", "usage", "failed") or "(--timeout)" in kept["error"]}

    wanted = "zero" if row.place == "logged" else row.declared or "reverse_kl"
    first: Report = yield from ask(wanted)
    names = {name for each in first["gradients"] for name in each["identified"] or {}}
    if not row.declared and "local_reverse_kl" in names and names <= {"reverse_kl", "local_reverse_kl"}:
        first = yield from ask(wanted := "local_reverse_kl")
    if row.fresh and first["verdict"] != "error":
        stale = yield from ask(wanted, "stale", select=["KL3"])
        first |= {part: [*first[part], *stale[part]] for part in ("gradients", "checks")}
        first["lasts"] = first["lasts"] and stale["lasts"]
    if filled(replace(row), first).state == "unnamed":
        first["directions"] = {}
        for name in KIN:
            near = first if name == wanted else (yield from ask(name, "current", ignore=["KL"]))
            cosines = [each["cosine"] or 0.0 for each in near["gradients"] if each["sampler"] == "current"]
            first["directions"][name] = min(cosines, default=0.0)
    return first


def filled(row: Row, report: Report) -> Row:
    """Write into a row what a report says of it: design's rule for terms that declare nothing."""
    if report["verdict"] == "error":
        row.state, row.why = "failed", str(report["error"])
        return row
    graded = report["gradients"]
    deciding = [each for each in graded if each["sampler"] == "current"] if row.fresh else graded
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    if row.place == "logged":
        failed = [check for check in failed if check["code"].startswith("KL6")]
    padded = [check for check in failed if check["code"] in ("KL501", "KL502")] if UNMASKED in row.notes else []
    failed = [check for check in failed if check not in padded]
    row.noted = [check["code"] for check in failed if row.fresh and check["code"] in ON_FRESH]
    codes = [check["code"] for check in failed if check["level"] == "error" and check["code"] not in row.noted]
    moving = [code for code in codes if code in MOVING]
    samplers = dict.fromkeys(each["sampler"] for each in graded)
    gradients = {name: _followed([each for each in graded if each["sampler"] == name], moving) for name in samplers}
    row.warnings = [check["code"] for check in failed if check["level"] == "warning"]
    row.directions, row.fits = report.get("directions", {}), [_fit(each) for each in graded]
    row.messages = {check["code"]: check["message"] for check in failed}
    if row.place == "logged":
        named = {VALUES[each["matches"]]: None for each in report["value"] if each["sampler"] == "current"}
        asked = [check["status"] for check in report["checks"] if check["code"] == "KL601"]
        row.state = "finding" if codes else "passed" if asked == ["pass"] else "inconclusive"
        row.logs, row.found = f"logs {list(named)[-1]}" if named else "", codes
        return row
    if row.declared:
        row.state = {"confirmed": "passed", "refuted": "finding"}.get(report["verdict"], "inconclusive")
        if padded and not codes:
            row.state = "passed"
    elif "unnamed" in (gradients[each["sampler"]] for each in deciding):
        row.state = "unnamed"
    else:
        codes = [code for code in codes if code not in NOT_ASKED]
        right = all(_passes(each["identified"]) for each in deciding)
        row.state = "passed" if right and not codes else "finding"
    if row.state == "finding" and not codes:
        codes, row.messages = ["KL105"], {**row.messages, "KL105": ANOTHER}
    row.gradients, row.found = gradients, codes if row.state in ("passed", "finding") else []
    return row


def _passes(identified: Mapping[str, float] | None) -> bool:
    return set(identified or {}) in PASSING and min((identified or {}).values()) > 0


def _fit(row: Mapping[str, Any]) -> str:
    """Return what was found in one environment under one sampler, beside what was asked."""
    found = render(row["identified"]) if row["identified"] else f"no name, off by {row.get('residual') or 0.0:.2g}"
    near = "" if row.get("cosine") is None else f", cosine {cosine(row['cosine'])} with {render(row['expected'])}"
    return f"{row['environment']}, {row['sampler']}: {found}{near}"


def _followed(rows: Sequence[Mapping[str, Any]], moving: Sequence[str]) -> str:
    """Return the combination of named gradients of the rows of one sampler: that of the longest rollouts, or that at
    fixed length, said so, if its size moves with lengths or batches."""
    last, suffix = rows[-1]["identified"], ""
    if last is None and moving:
        fixed = [row["identified"] for row in rows if row["environment"] in ("bandit", "sequence")]
        last, suffix = fixed[-1] if fixed and all(fixed) else None, f" (its size moves: {', '.join(moving)})"
    if last is None or (len(last) > 2 and rows[-1].get("residual", 0.0) > EXACT):
        return "unnamed"
    parts: list[str] = []
    for name, number in last.items():
        size = 1.0 if suffix and number > 0 and len(last) == 1 else number
        parts.append(re.sub(r"^(-?)1\*", r"\1", f"{size:.4g}*{name}"))
    return " + ".join(parts).replace("+ -", "- ") + suffix
