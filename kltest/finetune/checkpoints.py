"""The folder of a run: settings, a line of metrics for every step, checkpoints, and the trained model.

`metrics.jsonl` holds nothing that depends on the clock: on one machine's CPU the same settings give the same bytes,
however often the run was stopped. Times are in `timings.jsonl`, the first rollouts of each step in `samples.jsonl`. A
checkpoint records the length of these files; later lines are cut off when the run continues from it.
"""

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kltest.errors import KltestError, UsageError
from kltest.files import as_json, writable, write
from kltest.finetune.settings import GONE, WITHOUT_EFFECT, Settings, settings_of

FILES = ("metrics.jsonl", "timings.jsonl", "samples.jsonl")
CHECKPOINT = "checkpoint.pt"
Record = dict[str, Any]


class RunFolder:
    """The files of a run; without a folder only `records` are kept, in memory.

    Raises:
        UsageError: The folder cannot be written, or holds a run with other settings.
    """

    def __init__(self, folder: Path | None, settings: Settings, *, again: bool = False) -> None:
        self.folder, self.settings = folder, settings
        self.records: list[Record] = []
        if folder is None:
            return
        writable(folder)
        written = folder / "settings.json"
        if again:
            for name in (*FILES, CHECKPOINT, "settings.json", "failed.pt"):
                (folder / name).unlink(missing_ok=True)
        elif written.exists():
            self._check_same(written)
        write(written, as_json(settings.plain()))

    def _check_same(self, written: Path) -> None:
        try:
            # A run of an earlier version knew other settings.
            stored = json.loads(written.read_text(encoding="utf-8"))
            known = {name: value for name, value in stored.items() if name not in GONE}
            before = settings_of(known, str(written)).resolved.plain()
        except (OSError, ValueError, UsageError) as error:
            raise UsageError(f"{written} cannot be read: {error}; give another --output, or --again") from None
        now = self.settings.resolved.plain()
        different = [name for name in now if name not in WITHOUT_EFFECT and before[name] != now[name]]
        if different:
            raise UsageError(
                f"{self.folder} holds a run with other settings ({', '.join(different)}): give another --output, or "
                "--again to replace it"
            )

    def restore(self) -> dict[str, Any] | None:
        """Return the last checkpoint, if there is one, and cut the files to their length at that time."""
        if self.folder is None:
            return None
        path, state = self.folder / CHECKPOINT, None
        if path.exists():
            try:
                state = dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise KltestError(f"{path} cannot be read: {error}; start anew with --again") from None
        for name in FILES:
            with (self.folder / name).open("ab") as file:
                file.truncate(state["files"].get(name, 0) if state else 0)
        lines = (self.folder / FILES[0]).read_text(encoding="utf-8").splitlines()
        self.records = [json.loads(line) for line in lines]
        return state

    def add(self, record: Record, timings: Record, samples: Sequence[Record] = ()) -> None:
        """Append to the files."""
        self.records.append(record)
        if self.folder is None:
            return
        for name, lines in zip(FILES, ([record], [timings], samples), strict=True):
            try:
                with (self.folder / name).open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(line, allow_nan=False) + "\n" for line in lines)
            except OSError as error:
                raise KltestError(
                    f"cannot write {self.folder / name}: {error.strerror}; make room, the same command goes on"
                ) from error

    def save(self, state: dict[str, Any], name: str = CHECKPOINT) -> Path | None:
        """Write a state in one step, so that there is always a whole one, and return its path."""
        if self.folder is None:
            return None
        sizes = {one: os.path.getsize(self.folder / one) for one in FILES if (self.folder / one).exists()}
        return write(self.folder / name, lambda file: torch.save({**state, "files": sizes}, file))
