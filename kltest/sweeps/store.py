"""Results on disk, one line a configuration, safe against being killed at any moment.

A record is one line of JSON, appended and flushed to the disk before anything else happens. A line without its line
break was torn by a kill or a full disk: it is cut off when the store is opened again and its configuration is run
again. Records are keyed by configuration and version, so that results of other code are never taken for current ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kltest.errors import KltestError, UsageError

Row = dict[str, Any]


def digest(*parts: object) -> str:
    """A short name for a value that can be written as JSON: the same value, the same name, on every machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """The rows of each finished configuration. Use it as a context manager; only one process may hold it open.

    Raises UsageError if another process holds it, KltestError if it cannot be written.
    """

    def __init__(self, path: Path, version: str) -> None:
        self.path, self.version = path, version
        self.foreign_lines: list[int] = []
        self._rows: dict[str, list[Row]] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Store:
        try:
            self._file = self.path.open("a+b")
        except OSError as error:
            raise KltestError(f"cannot open the results in {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UsageError(
                f"another kltest is writing to {self.path.parent}; wait for it to end, or give another --output"
            ) from error
        self._read()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = json.loads(line)
                key, version, rows = record["key"], record["version"], record["rows"]
            except (ValueError, KeyError, TypeError):
                self.foreign_lines.append(number)
                continue
            if version == self.version:
                self._rows[key] = rows

    def rows(self, configuration: Mapping[str, Any]) -> list[Row] | None:
        """What was found for a configuration, or None if it has not been run with this version."""
        return self._rows.get(digest(configuration))

    def add(self, configuration: Mapping[str, Any], rows: list[Row]) -> None:
        """Keep the rows of a configuration; when this returns they are on the disk."""
        assert self._file is not None
        key = digest(configuration)
        record = {"key": key, "version": self.version, "configuration": dict(configuration), "rows": rows}
        try:
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise KltestError(
                f"cannot write to {self.path}: {error.strerror}. What was finished before is kept; make room and run "
                "the same command again, it goes on from there"
            ) from error
        self._rows[key] = rows
