"""Mutation testing of kltest's own grading and moments with cosmic-ray: `python tests/mutation/run.py`.

A seeded sample of places in the code, one mutant each, in clones of the last commit. The suites run once under
coverage, so that on each mutant those tests run, until one fails, that execute the mutated line. Writes report.jsonl
and report.md. Needs `pip install cosmic-ray pytest-cov` and takes an hour or two; with `--folder` it can be stopped at
any moment and goes on from where it was.
"""

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import covering
import report
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkItem, WorkResult

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# Rooms and their shares of the sample.
ROOMS = {
    "kltest/moments": 0.3,
    "kltest/samples": 0.1,
    "kltest/identify": 0.3,
    "kltest/checks": 0.2,
    "kltest/grading": 0.1,
}
SUITES = [
    *("tests/unit", "tests/cases", "tests/properties"),
    *(f"tests/entry_points/test_{name}.py" for name in ("explain", "expected_failures", "pytest", "python")),
]
# Longer than any of these suites takes unmutated, several times over: a mutant that loops is killed.
TIMEOUT = 900.0


def places(module: Path) -> set[tuple[int, int]]:
    """Starts of what is never evaluated: annotations, under `from __future__ import annotations`."""
    found = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        for field in ("annotation", "returns"):
            annotation = getattr(node, field, None)
            for part in ast.walk(annotation) if annotation is not None else ():
                if hasattr(part, "lineno"):
                    found |= {(part.lineno, column) for column in range(part.col_offset, part.end_col_offset + 1)}
    return found


def sample(items: list[WorkItem], clone: Path, size: int, seed: int) -> set[str]:
    """The jobs to do: `size` random places of the code, one random mutant at each."""
    generator = random.Random(seed)
    at: dict[tuple[str, tuple[int, int]], list[str]] = {}
    skipped: dict[str, set[tuple[int, int]]] = {}
    for item in sorted(items, key=lambda item: (str(item.mutations[0].module_path), item.mutations[0].start_pos)):
        mutation = item.mutations[0]
        module = str(mutation.module_path)
        if module not in skipped:
            skipped[module] = places(clone / module)
        if tuple(mutation.start_pos) not in skipped[module]:
            at.setdefault((module, tuple(mutation.start_pos)), []).append(
                f"{mutation.operator_name} {mutation.occurrence} {item.job_id}"
            )
    chosen = generator.sample(sorted(at), min(size, len(at)))
    return {generator.choice(sorted(at[place])).split()[-1] for place in chosen}


def work(number: int, jobs: int, arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """One worker: a clone, a session a room, every `jobs`-th of the sampled mutants."""
    clone = folder / f"clone-{number}"
    # Stopped in the middle of a mutant.
    subprocess.run(["git", "checkout", "--quiet", "."], check=True, cwd=clone)
    done = []
    for room, share in ROOMS.items():
        config, session = folder / f"{number}.toml", folder / f"{number}-{Path(room).name}.sqlite"
        command = f"{sys.executable} {HERE / 'covering.py'} {folder / 'covering.json'}"
        config.write_text(
            f'[cosmic-ray]\nmodule-path = "{room}"\ntimeout = {TIMEOUT}\nexcluded-modules = []\n'
            f'test-command = "{command}"\n[cosmic-ray.distributor]\nname = "local"\n',
            encoding="utf-8",
        )
        tool = str(Path(sys.executable).with_name("cosmic-ray"))
        if not session.exists():
            subprocess.run([tool, "init", str(config), str(session)], check=True, cwd=clone)
        with use_db(str(session), WorkDB.Mode.open) as database:
            items = list(database.work_items)
            size = round(arguments.sample * share)
            # Job names are random, so every worker samples by place and takes its own part of the same places.
            wanted = sorted(sample(items, clone, size, arguments.seed), key=_key(items))[number::jobs]
            if not database.num_results:
                for item in items:
                    if item.job_id not in wanted:
                        database.set_result(item.job_id, WorkResult(worker_outcome=WorkerOutcome.SKIPPED))
        subprocess.run([tool, "exec", str(config), str(session)], check=True, cwd=clone)
        with use_db(str(session), WorkDB.Mode.open) as database:
            results = dict(database.results)
            for item in items:
                if item.job_id in wanted:
                    mutation, result = item.mutations[0], results[item.job_id]
                    done.append(
                        {
                            "module": str(mutation.module_path),
                            "line": mutation.start_pos[0],
                            "operator": mutation.operator_name.removeprefix("core/"),
                            "outcome": str(result.test_outcome and result.test_outcome.value),
                            "worker": result.worker_outcome.value,
                            "diff": neighbourhood(result.diff),
                        }
                    )
    return done


def neighbourhood(diff: str) -> str:
    """The changed lines of a diff with one line before and after."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++", "@@"))]
    changed = [number for number, line in enumerate(lines) if line[:1] in ("-", "+")]
    return "\n".join(lines[max(0, changed[0] - 1) : changed[-1] + 2])


def _key(items: list[WorkItem]):
    order = {item.job_id: (str(item.mutations[0].module_path), tuple(item.mutations[0].start_pos)) for item in items}
    return order.__getitem__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to work and to go on from; kept")
    parser.add_argument("--output", type=Path, default=HERE / "report.jsonl")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="mutants-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for number in range(arguments.jobs):
            if not (folder / f"clone-{number}").exists():
                subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / f"clone-{number}")], check=True)
        if not (folder / "covering.json").exists():
            covering.measure(folder / "clone-0", ROOMS, SUITES, folder / "covering.json")
        with ThreadPoolExecutor(arguments.jobs) as pool:
            parts = pool.map(lambda number: work(number, arguments.jobs, arguments, folder), range(arguments.jobs))
            rows = sorted((row for part in parts for row in part), key=lambda row: (row["module"], row["line"]))
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    report.write(rows, arguments.output)


if __name__ == "__main__":
    main()
