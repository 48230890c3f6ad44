"""Results on disk, one line a configuration, safe against a kill at any moment.

A record is one line of JSON, appended and flushed to the disk before anything else happens. A line without its line
break was torn by a kill or a full disk: the store cuts it off when it is opened, and its configuration is run again.
Records are keyed by configuration and version, so that results of other code are never taken for current ones. A
failure is a record too, with its reason; the last record of a configuration counts. Each line has a checksum: one that
was changed is passed over, and its configuration is run again.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from kltest.errors import KltestError, UsageError
from kltest.files import lock

Row = dict[str, Any]
CHECKSUM = re.compile(rb'^{"checksum": "[0-9a-f]{16}", ')


def digest(*parts: object) -> str:
    """Return a short name for values that JSON can hold: equal on every machine if the values are equal."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_checksum(record: bytes) -> bytes:
    """Return the JSON of an object with the checksum of that JSON as its first member."""
    return b'{"checksum": "%s", %s' % (hashlib.sha256(record).hexdigest()[:16].encode(), record[1:])


def _checked(line: bytes) -> bytes:
    """Return the record that `_with_checksum` made a line of; ValueError if it is another than was written."""
    record = b"{" + CHECKSUM.sub(b"", line)
    if line != _with_checksum(record):
        raise ValueError("the checksum does not fit")
    return record


@dataclass(frozen=True)
class Failure:
    """A configuration without rows, with the reason and the traceback."""

    configuration: Mapping[str, Any]
    reason: str
    traceback: str


Result = list[Row] | Failure


class Store:
    """Results of finished configurations, as a context manager that one process at a time may hold open.

    Raises UsageError if another process holds it, KltestError if it cannot be written.
    """

    def __init__(self, path: Path, version: str) -> None:
        self.path, self.version = path, version
        self.foreign_lines: list[int] = []
        self._results: dict[str, Result] = {}
        self._file: IO[bytes]

    def __enter__(self) -> Self:
        try:
            # Unbuffered: what could not be written is not tried again when the file is closed.
            self._file = self.path.open("a+b", buffering=0)
        except OSError as error:
            raise KltestError(f"cannot open the results in {self.path}: {error.strerror}") from error
        try:
            lock(self._file, self.path.parent)
        except UsageError:
            self._file.close()
            raise
        self._read()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self._file.truncate(whole)
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                record = json.loads(_checked(line))
                key, version = record["key"], record["version"]
                failure = record.get("failure")
                result = record["rows"] if failure is None else Failure(record["configuration"], *failure)
            except (ValueError, KeyError, TypeError):
                self.foreign_lines.append(number)
                continue
            if version == self.version:
                self._results[key] = result

    def result(self, configuration: Mapping[str, Any]) -> Result | None:
        """Return the result of a configuration, or None if it has not been run with this version."""
        return self._results.get(digest(configuration))

    def all_rows(self) -> list[Row]:
        """Return the rows of all configurations that did not fail, in the order of their records."""
        return [row for result in self._results.values() if not isinstance(result, Failure) for row in result]

    def add(self, results: Sequence[tuple[Mapping[str, Any], Result]]) -> None:
        """Write the results of some configurations to the disk."""
        lines = []
        for configuration, result in results:
            record: dict[str, Any] = {"key": digest(configuration), "version": self.version}
            record["configuration"] = dict(configuration)
            if isinstance(result, Failure):
                record["failure"] = [result.reason, result.traceback]
            else:
                record["rows"] = result
            lines.append(_with_checksum(json.dumps(record, ensure_ascii=False, allow_nan=False).encode()) + b"\n")
        whole, left = self._file.seek(0, os.SEEK_END), b"".join(lines)
        try:
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(whole)
            raise KltestError(
                f"cannot write to {self.path}: {error.strerror}. What was finished before is kept; make room and run "
                "the same command again, it goes on from there"
            ) from error
        self._results |= {digest(configuration): result for configuration, result in results}
