"""Pins of KL functions of public libraries over their histories, against labels that were written before.

`python -m benchmarks.pins FOLDER…`, with clones (bare ones too) that are named OWNER+NAME in the folders.
Each function is pinned in the tree before a commit, and the file runs in the tree of the commit; on the page `months` a
file stays until it is red. Labels and answers: `same` (green), `moved` (red), `far` (red only far from the reference),
`call` (red, as the function, a parameter or a setting is gone), `new` (the setting did not work before: not pinned).
"""

import csv
import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.trainers import checkout
from kltest.files import as_csv, write

LABELS, RESULTS = (Path(__file__).with_name(f"pins{name}.csv") for name in ("_labels", ""))
FIELDS = ("repository", "name", "arguments", "commit", "date", "page", "label", "answer", "says")
TEST = "test_pins.py"
# Settings in one file: long paths of lifted functions leave room for two.
TOGETHER = 2
Standing = dict[tuple[str, str, tuple[str, ...]], str]
SENTENCE = re.compile(r"\((?P<place>[^()]*)\) followed (?P<before>.*?); now it follows (?P<now>.*?)\. It is off")
CALL = re.compile(r"it can no longer be called as it was: |it returned a ")
MEANING = re.compile(r" \([^()]*\)")


def main(folders: Sequence[str]) -> None:
    rows, standing = [], Standing()
    for label in csv.DictReader(LABELS.open(encoding="utf-8")):
        clone = checkout(folders, label["repository"])
        clone = next(path for path in (clone / ".git", clone / "repo", clone) if path.is_dir())
        stands = standing if label["page"] == "months" else Standing()
        told = list(answers(clone, label, label["arguments"].split(), stands))
        answer = " ".join(dict.fromkeys(answer for answer, _ in told if answer != "same")) or "same"
        says = "; ".join(dict.fromkeys(says for _, says in told if says))
        rows.append({name: {**label, "answer": answer, "says": says}[name] for name in FIELDS})
        agrees = "agrees" if answer == label["label"] else f"IS NOT {label['label']}"
        print(f"{agrees}: {label['repository']} {label['commit']} {label['arguments']}: {answer} {says}", flush=True)
    write(RESULTS, as_csv(rows))


def answers(
    clone: Path, label: Mapping[str, str], values: Sequence[str], standing: Standing
) -> Iterator[tuple[str, str]]:
    """Yield the answer of the pins of one function to one commit, and what they say, for each file that they need."""
    where = clone, label["commit"], label["file"], label["name"]
    for start in range(0, max(len(values), 1), TOGETHER):
        some = tuple(values[start : start + TOGETHER])
        found = answered(*where, some, standing)
        if "write several files" in found[1]:
            yield from (answered(*where, (one,), standing) for one in some)
        else:
            yield found


def answered(
    clone: Path, commit: str, file: str, name: str, values: tuple[str, ...], standing: Standing
) -> tuple[str, str]:
    """Return the answer of one file of pins to one commit, and what it says."""
    text = standing.pop((file, name, values), "")
    with TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        unpack(clone, commit, file, after)
        if not text:
            unpack(clone, f"{commit}^", file, before)
            pinned = pin(before, file, name, values)
            if pinned.returncode:
                return "new" if " raised " in pinned.stderr else "not pinned", last(pinned)
            text = (before / TEST).read_text(encoding="utf-8")
        (after / TEST).write_text(text, encoding="utf-8")
        done = run([TEST], after, "")
    if not done.returncode:
        standing[file, name, values] = text
        return "same", ""
    moves = [match.groupdict() for match in SENTENCE.finditer(done.stderr)]
    if not moves:
        return "call" if CALL.search(done.stderr) else "failed", last(done)
    near = [each for each in moves if not each["place"].startswith("far")]
    return ("moved" if near else "far"), "; ".join(dict.fromkeys(map(words, near or moves)))


def pin(folder: Path, file: str, name: str, values: Sequence[str]) -> subprocess.CompletedProcess[str]:
    arguments = [word for value in values for word in ("--arg", value)]
    command = ["-m", "kltest", "pin", f"{file}:{name}", *arguments, "--output", TEST]
    return run(command, folder, str(Path(__file__).parents[1]))


def words(move: dict[str, str]) -> str:
    before, now = (MEANING.sub("", move[each]) for each in ("before", "now"))
    return f"{move['place']}: {before} to {now}"


def unpack(clone: Path, commit: str, file: str, folder: Path) -> None:
    """Write the Python files of the file's package, as they are in a commit."""
    package = f":(glob){file.partition('/')[0]}/**/*.py"
    command = ["git", "--git-dir", str(clone), "archive", commit, package]
    packed = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def run(command: Sequence[str], folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)


def last(done: subprocess.CompletedProcess[str]) -> str:
    return next(iter(reversed(done.stderr.strip().splitlines())), "")[:200]


if __name__ == "__main__":
    main(sys.argv[1:])
