"""What a run leaves in its folder: settings, a line of metrics for every step, checkpoints, and the trained model.

`metrics.jsonl` holds nothing that depends on the clock: on one machine's CPU the same settings give the same bytes,
however often the run was stopped. Times are in `timings.jsonl`. A checkpoint says how long both files were when it was
made, and what is behind that is cut off when the run goes on from there.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from kltest.errors import KltestError, UsageError
from kltest.files import as_json, writable, write
from kltest.finetune.settings import HOW, Settings

FILES = ("metrics.jsonl", "timings.jsonl")
Record = dict[str, Any]


class Journal:
    """The folder of a run, or nothing at all for None: then only `records` are kept.

    Raises UsageError for a folder that cannot be written, or that holds a run with other settings.
    """

    def __init__(self, folder: Path | None, settings: Settings, *, again: bool = False) -> None:
        self.folder, self.settings = folder, settings
        self.records: list[Record] = []
        if folder is None:
            return
        writable(folder)
        told = folder / "settings.json"
        if again:
            for name in (*FILES, "checkpoint.pt", "settings.json", "failed.pt"):
                (folder / name).unlink(missing_ok=True)
        elif told.exists():
            self._check_same(told)
        write(told, as_json(settings.plain()))

    def _check_same(self, told: Path) -> None:
        try:
            before = json.loads(told.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{told} cannot be read: {error}; give another --output, or --again") from None
        now = self.settings.plain()
        different = [name for name in now if name not in HOW and before.get(name) != now[name]]
        if different:
            raise UsageError(
                f"{self.folder} holds a run with other settings ({', '.join(different)}): give another --output, or "
                "--again to replace it"
            )

    def restored(self) -> dict[str, Any] | None:
        """The last checkpoint, if there is one, with the files as they were then."""
        path = None if self.folder is None else self.folder / "checkpoint.pt"
        if path is None or not path.exists():
            self._cut({})
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise KltestError(f"{path} cannot be read: {error}; start anew with --again") from None
        self._cut(state["files"])
        return dict(state)

    def _cut(self, sizes: dict[str, int]) -> None:
        """The files as long as they were; what was written after the checkpoint is written again."""
        if self.folder is None:
            return
        for name in FILES:
            with (self.folder / name).open("ab") as file:
                file.truncate(sizes.get(name, 0))
        lines = (self.folder / FILES[0]).read_text(encoding="utf-8").splitlines()
        self.records = [json.loads(line) for line in lines]

    def add(self, record: Record, timings: Record) -> None:
        """One line more, on its way to the disk before the next step begins."""
        self.records.append(record)
        if self.folder is None:
            return
        for name, content in zip(FILES, (record, timings), strict=True):
            try:
                with (self.folder / name).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(content, allow_nan=False) + "\n")
            except OSError as error:
                raise KltestError(
                    f"cannot write {self.folder / name}: {error.strerror}; make room, the same command goes on"
                ) from error

    def keep(self, state: dict[str, Any], name: str = "checkpoint.pt") -> Path | None:
        """Write a state that replaces the one before in one step."""
        if self.folder is None:
            return None
        sizes = {one: os.path.getsize(self.folder / one) for one in FILES if (self.folder / one).exists()}
        buffer = io.BytesIO()
        torch.save({**state, "files": sizes}, buffer)
        return write(self.folder / name, buffer.getvalue())
