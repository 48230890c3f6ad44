"""Grading lifted terms: each variant in a process of its own, in parallel, with a store of results by content."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kltest import __version__
from kltest.scanning.arithmetic import imports
from kltest.scanning.lift import NAME, Lifted

TIMEOUT = 60.0
PASSING = ({"reverse_kl"}, {"local_reverse_kl"})
NOT_ASKED = ("KL106", "KL201", "KL601")
"""Checks that a term of unknown claim cannot fail: its scale, a next-token part, a value that nobody logs."""


MOVING = ("KL203", "KL204", "KL207")
"""Checks of a size that moves with lengths, batches or widths."""


Question = tuple[str, dict[str, str], str | None]


@dataclass
class Result:
    """What is known of one variant: passed, finding, unnamed, inconclusive, failed, not run or ignored.

    `gradients` are the names followed by sampler, `codes` the errors and `warnings` the warnings that apply.
    """

    lifted: Lifted
    status: str
    gradients: Mapping[str, str] = field(default_factory=dict)
    codes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    messages: Mapping[str, str] = field(default_factory=dict)
    why: str = ""


def judged(
    variants: Sequence[Lifted],
    *,
    declared: Callable[[Lifted], str | None],
    jobs: int,
    timeout: float = TIMEOUT,
    cache: Path | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[tuple[int, Result]]:
    """Yield the number and the result of each variant as it is finished; those that were not lifted first.

    Args:
        variants: the lifted terms.
        declared: the gradient that a term declares, None if it declares none.
        jobs: how many are graded at once.
        timeout: seconds that one grading may take.
        cache: a folder of results by content.
        told: called with how many are finished of how many.
    """
    waiting: dict[str, list[int]] = {}
    asked: dict[str, Question] = {}
    for number, variant in enumerate(variants):
        if variant.refused:
            yield number, Result(variant, "not run", why=variant.refused)
            continue
        question = (variant.source, _options(variant), declared(variant))
        key = hashlib.sha256(json.dumps([__version__, *question]).encode()).hexdigest()
        if (known := _stored(cache, key)) is not None:
            yield number, _result(variant, known, question[2])
            continue
        waiting.setdefault(key, []).append(number)
        asked[key] = question
    for done, (key, report) in enumerate(_graded(asked, jobs, timeout), 1):
        _store(cache, key, report)
        for number in waiting[key]:
            yield number, _result(variants[number], report, asked[key][2])
        told(done, len(asked))


def _options(variant: Lifted) -> dict[str, str]:
    """Return where a variant is graded: what enters a token's own advantage has immediate credit."""
    if variant.place == "advantage":
        return {"placement": "reward", "credit": "immediate"}
    return {"placement": "reward" if variant.place == "reward" else "loss"}


def _graded(asked: Mapping[str, Question], jobs: int, timeout: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the report of each question, as JSON."""
    if not asked:
        return
    with _one_thread(), tempfile.TemporaryDirectory(prefix="kltest-scan-") as folder:
        import kltest.grading.grader  # noqa: F401  before processes are forked, so that each has torch already

        with ProcessPoolExecutor(max_workers=min(jobs, len(asked))) as pool:
            futures = {pool.submit(_grade, folder, key, *question, timeout): key for key, question in asked.items()}
            for future in as_completed(futures):
                key = futures[future]
                try:
                    yield key, future.result()
                except Exception as error:  # a worker that was killed: its term is told, the others go on
                    yield key, {"verdict": "error", "error": f"{type(error).__name__}: {error}"}


@contextmanager
def _one_thread() -> Iterator[None]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _grade(
    folder: str, key: str, source: str, options: Mapping[str, str], expect: str | None, timeout: float
) -> dict[str, Any]:
    """Grade one lifted function; a term that declares nothing and follows next-token parts is graded as such."""
    from kltest.grading.jobs import Job, graded
    from kltest.grading.options import checked

    file = Path(folder, f"term_{key[:12]}.py")
    file.write_text(f"{imports(source)}\n{source}\n")

    def ask(expected: str) -> dict[str, Any]:
        given = {"expect": expected, **options, "sampler": "both", "timeout": timeout}
        job = Job(f"{file.name}:{NAME}", f"{file}:{NAME}", checked(given, lambda option: option.name))
        report, _ = next(iter(graded([job])))
        return report.to_dict()

    first = ask(expect or "reverse_kl")
    names = {name for row in first["gradients"] for name in row["identified"] or {}}
    if expect is None and "local_reverse_kl" in names and names <= {"reverse_kl", "local_reverse_kl"}:
        return ask("local_reverse_kl")
    return first


def _result(variant: Lifted, report: Mapping[str, Any], expect: str | None) -> Result:
    """Return what a report says of a term: design's rule for terms that declare nothing."""
    if report["verdict"] == "error":
        return Result(variant, "failed", why=str(report.get("error", "")))
    rows = report["gradients"]
    failed = [check for check in report["checks"] if check["status"] == "fail"]
    codes = [check["code"] for check in failed if check["level"] == "error"]
    warnings = [check["code"] for check in failed if check["level"] == "warning"]
    messages = {check["code"]: check["message"] for check in failed}
    moving = [code for code in codes if code in MOVING]
    gradients = {sampler: _followed([row for row in rows if row["sampler"] == sampler], moving) for sampler in
                 dict.fromkeys(row["sampler"] for row in rows)}  # fmt: skip
    if expect is not None:
        status = {"confirmed": "passed", "refuted": "finding"}.get(report["verdict"], "inconclusive")
    elif (
        variant.term.place == "both"
        and variant.place == "loss"
        and all("zero" in (r["identified"] or {}) for r in rows)
    ):
        return Result(variant, "not run", why="only what it is worth reaches the loss, as part of a reward")
    elif "unnamed" in gradients.values():
        status = "unnamed"
    else:
        codes = [code for code in codes if code not in NOT_ASKED]
        right = all(_passes(row["identified"]) for row in rows)
        status = "passed" if right and not codes else "finding"
    return Result(variant, status, gradients, codes, warnings, messages)


def _is_zero(rows: Sequence[Mapping[str, Any]]) -> bool:
    return all(set(row["identified"] or {}) == {"zero"} for row in rows)


def _passes(identified: Mapping[str, float] | None) -> bool:
    return set(identified or {}) in PASSING and min((identified or {}).values()) > 0


def _followed(rows: Sequence[Mapping[str, Any]], moving: Sequence[str]) -> str:
    """Return the combination of named gradients of the rows of one sampler: that of the longest rollouts, or that at a
    fixed length, said so, if its size moves with lengths or batches."""
    last, suffix = rows[-1]["identified"], ""
    if last is None and moving:
        fixed = [row["identified"] for row in rows if row["environment"] == "sequence"]
        last, suffix = fixed[0] if fixed else None, f" (its size moves: {', '.join(moving)})"
    if last is None:
        return "unnamed"
    parts = []
    for name, number in last.items():
        size = 1.0 if suffix and number > 0 and len(last) == 1 else number
        parts.append(name if abs(size - 1) < 1e-6 else f"{size:.4g}*{name}")
    return " + ".join(parts).replace("+ -", "- ") + suffix


def _stored(cache: Path | None, key: str) -> dict[str, Any] | None:
    if cache is None:
        return None
    try:
        return json.loads((cache / f"{key}.json").read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def _store(cache: Path | None, key: str, report: Mapping[str, Any]) -> None:
    if cache is None or report["verdict"] == "error":
        return
    kept = {name: report[name] for name in ("verdict", "gradients", "checks")}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = cache / f"{key}.{os.getpid()}"
        partial.write_text(json.dumps(kept))
        partial.replace(cache / f"{key}.json")
    except OSError:
        return  # a cache that cannot be written saves nothing
