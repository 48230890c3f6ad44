"""The folder of a run: settings, a line of metrics for every step, checkpoints, and the trained model.

`metrics.jsonl` holds nothing that depends on the clock: on one machine's CPU the same settings give the same bytes,
however often the run was stopped. The first rollouts of each step are in `samples.jsonl`. A checkpoint records the
length of these files; later lines are cut off when the run continues from it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kltest.errors import UsageError
from kltest.files import as_json, writable, write
from kltest.finetune.settings import WITHOUT_EFFECT, Settings, read

FILES = ("metrics.jsonl", "samples.jsonl")
CHECKPOINT = "checkpoint.pt"
Record = dict[str, Any]


def recorded(folder: Path) -> list[Record]:
    """Return what the run in a folder measured; UsageError if there is no run, or a line is damaged."""
    path, found = folder / FILES[0], list[Record]()
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            found.append(dict(json.loads(line)))
    except OSError as error:
        raise UsageError(f"{folder} holds no run of kltest finetune: {path.name}: {error.strerror}") from None
    except (ValueError, TypeError):
        raise UsageError(f"{path}, line {len(found) + 1}, is damaged; --again begins the run anew") from None
    return found


class RunFolder:
    """The files of a run, and the `records` in them.

    Raises:
        UsageError: The folder cannot be written, or holds a run with other settings.
    """

    def __init__(self, folder: Path, settings: Settings, *, again: bool = False) -> None:
        self.folder, self.records = writable(folder), list[Record]()
        written, now = folder / "settings.json", asdict(settings.resolved)
        if again:
            for name in (*FILES, CHECKPOINT, written.name):
                (folder / name).unlink(missing_ok=True)
        before = read(written) if written.exists() else now
        names = (before | now).keys() - WITHOUT_EFFECT
        if different := sorted(name for name in names if before.get(name) != now.get(name)):
            raise UsageError(
                f"{folder} holds a run with other settings ({', '.join(different)}): give another --output, or "
                "--again to replace it"
            )
        write(written, as_json(now))

    def restore(self) -> dict[str, Any] | None:
        """Return the last checkpoint, if there is one, and cut the files to their length at that time.

        Raises:
            UsageError: The checkpoint or the records are damaged.
        """
        path = self.folder / CHECKPOINT
        try:
            state = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True)) if path.exists() else None
            sizes = state["files"] if state else dict.fromkeys(FILES, 0)
        except Exception as error:  # whatever it is that the bytes of a damaged file lead to
            raise UsageError(f"{path} is damaged; --again begins the run anew") from error
        for name in FILES:
            with (self.folder / name).open("ab") as file:
                if file.tell() < sizes[name]:
                    raise UsageError(f"{file.name} is damaged, since it was longer; --again begins the run anew")
                file.truncate(sizes[name])
        self.records = recorded(self.folder)
        return state

    def add(self, record: Record, samples: Sequence[Record]) -> None:
        """Append to the files."""
        self.records.append(record)
        for name, lines in zip(FILES, ([record], samples), strict=True):
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint in one step, so that there is always a whole one."""
        state |= {"files": {name: (self.folder / name).stat().st_size for name in FILES}}
        write(self.folder / CHECKPOINT, lambda file: torch.save(state, file))
