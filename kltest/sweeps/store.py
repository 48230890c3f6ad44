"""Results on disk, one line a configuration, safe against being killed at any moment.

A record is one line of JSON, appended and flushed to the disk before anything else happens. A line without its line
break was torn by a kill or a full disk: it is cut off when the store is opened again and its configuration is run
again. Records are keyed by configuration and version, so that results of other code are never taken for current ones.
A failure is a record too, with its reason; the last record of a configuration counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kltest.errors import KltestError, UsageError

Row = dict[str, Any]


def digest(*parts: object) -> str:
    """A short name for a value that can be written as JSON: the same value, the same name, on every machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Failure:
    """Why a configuration gave no rows, and where (the traceback)."""

    configuration: Mapping[str, Any]
    reason: str
    traceback: str


class Store:
    """The rows of each finished configuration. Use it as a context manager; only one process may hold it open.

    Raises UsageError if another process holds it, KltestError if it cannot be written.
    """

    def __init__(self, path: Path, version: str) -> None:
        self.path, self.version = path, version
        self.foreign_lines: list[int] = []
        self._results: dict[str, list[Row] | Failure] = {}
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
                key, version = record["key"], record["version"]
                failure = record.get("failure")
                result = record["rows"] if failure is None else Failure(record["configuration"], *failure)
            except (ValueError, KeyError, TypeError):
                self.foreign_lines.append(number)
                continue
            if version == self.version:
                self._results[key] = result

    def result(self, configuration: Mapping[str, Any]) -> list[Row] | Failure | None:
        """What came of a configuration, or None if it has not been run with this version."""
        return self._results.get(digest(configuration))

    def all_rows(self) -> list[Row]:
        """The rows of all configurations that did not fail, in the order in which they came."""
        return [row for result in self._results.values() if not isinstance(result, Failure) for row in result]

    def add(self, results: Sequence[tuple[Mapping[str, Any], list[Row] | Failure]]) -> None:
        """Keep what came of some configurations; when this returns it is on the disk."""
        assert self._file is not None
        lines = []
        for configuration, result in results:
            record: dict[str, Any] = {"key": digest(configuration), "version": self.version}
            record["configuration"] = dict(configuration)
            if isinstance(result, Failure):
                record["failure"] = [result.reason, result.traceback]
            else:
                record["rows"] = result
            lines.append(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise KltestError(
                f"cannot write to {self.path}: {error.strerror}. What was finished before is kept; make room and run "
                "the same command again, it goes on from there"
            ) from error
        self._results |= {digest(configuration): result for configuration, result in results}
