"""Logs of rollouts as arrays: read from JSON lines, parquet or torch files, found by the names that trainers use."""

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kltest.errors import KltestError, UsageError, did_you_mean
from kltest.names import LOGGED, listed, logged_field

LOG_PROBS = ("logp", "ref_logp", "old_logp", "rollout_logp", "prox_logp")
TOKENS = (*LOG_PROBS, "mask", "entropy")
"""Columns with a number for each token; others may have one for each rollout."""


class NoRolloutsError(KltestError):
    """Logs without any rollout: there is nothing to diagnose."""

    exit_code = 5


@dataclass(frozen=True)
class Logs:
    """N logged rollouts of at most T tokens.

    Attributes:
        columns: Arrays (N, T), 0 where nothing was written, or (N,), by field.
        names: The name that each field has in the file.
        unread: Names that were not read.
        live: (N, T) bool, the tokens that count.
        written: (N, T) bool, the positions that the file has numbers for.
        group: (N,) which unit: the prompt, or the rollout if prompts are unknown.
        notes: Sentences on how the file was read.
    """

    columns: dict[str, np.ndarray]
    names: dict[str, str]
    unread: list[str]
    live: np.ndarray
    written: np.ndarray
    group: np.ndarray
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.live)

    def get(self, *fields: str) -> np.ndarray | None:
        """Return the first of the columns that is there, as it stands in the file."""
        return next((self.columns[name] for name in fields if name in self.columns), None)

    def first(self, *fields: str) -> str | None:
        """Return the first of the fields that is there."""
        return next((name for name in fields if name in self.columns), None)

    def without(self, fields: Iterable[str]) -> "Logs":
        """Return the logs without some columns."""
        return replace(self, columns={name: one for name, one in self.columns.items() if name not in fields})

    def gap(self, one: str, other: str) -> np.ndarray:
        """Return the log-ratio (N, T) of two columns of log-probs, 0 at tokens that do not count."""
        return np.where(self.live, self.columns[one] - self.columns[other], 0.0)


def read(source: Any, columns: Mapping[str, str] | None = None) -> Logs:
    """Read logs of rollouts.

    Args:
        source: A path, a list of rollouts or of batches (mappings of numbers, lists, arrays or tensors), one such
            mapping, or a DataFrame with a row a rollout.
        columns: Names of columns by field, for those that the usual names do not find.

    Raises:
        UsageError: The source cannot be read, or a column is missing, ragged or not of finite numbers.
        NoRolloutsError: It holds no rollout.
    """
    place = str(source) if isinstance(source, str | Path) else "the logs"
    records = _of_file(Path(source)) if isinstance(source, str | Path) else _of_object(source)
    rows = [rollout for number, record in enumerate(records, 1) for rollout in _exploded(record, place, number)]
    if not rows:
        raise NoRolloutsError(f"{place}: there is no rollout in it")
    names, unread = _names(rows, columns or {}, place)
    found = {name: [row.get(key) for row in rows] for name, key in names.items()}
    return _logs(found, names, unread, place)


def _of_file(path: Path) -> Iterable[Any]:
    try:
        if path.suffix in (".json", ".jsonl", ".ndjson"):
            return _of_json(path.read_text(encoding="utf-8-sig"), path)
        if path.suffix == ".parquet":
            import pandas

            return _of_object(pandas.read_parquet(path))
        if path.suffix in (".pt", ".pth"):
            import torch

            return _of_object(torch.load(path, map_location="cpu", weights_only=True))
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except ImportError:
        raise UsageError(f"{path} cannot be read: pandas needs pyarrow for parquet (pip install pyarrow)") from None
    except (ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        words = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"{path} is not what its ending says: {words}") from None
    raise UsageError(f"{path}: logs are JSON lines (.jsonl, .json), .parquet, or tensors of torch (.pt, .pth)")


def _of_json(text: str, path: Path) -> Iterable[Any]:
    with suppress(ValueError):  # one object or array; else an object a line
        return _of_object(json.loads(text))
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise UsageError(f"{path}: line {number} is no JSON: {error}") from None
    return found


def _of_object(source: Any) -> Iterable[Any]:
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return list(source.to_dict("records"))
    return source if isinstance(source, list | tuple) else [source]


def _exploded(record: Any, place: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield the rollouts of a record, which is one, or a batch if a column of it has two dimensions."""
    if not isinstance(record, Mapping):
        raise UsageError(f"{place}: record {number} is no mapping of columns; it is {type(record).__name__}")
    record = {str(name): _plain(value) for name, value in record.items() if value is not None}
    sizes = {len(value) for value in record.values() if _depth(value) > 1}
    if not sizes:
        yield record
        return
    if len(sizes) > 1:
        raise UsageError(f"{place}: columns of record {number} have {listed([*map(str, sorted(sizes))])} rollouts")
    size = sizes.pop()
    each = {name: value if _depth(value) and len(value) == size else [value] * size for name, value in record.items()}
    for row in range(size):
        yield {name: value[row] for name, value in each.items()}


def _plain(value: Any) -> Any:
    """Return tensors as arrays."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return value.double().numpy() if value.is_floating_point() else value.numpy()
    return value


def _depth(value: Any) -> int:
    """Return the number of dimensions of a column of a record."""
    if isinstance(value, np.ndarray):
        nested = value.dtype == object and value.size and isinstance(value.flat[0], list | np.ndarray)
        return value.ndim + int(bool(nested))
    if isinstance(value, list | tuple):
        return 1 + (_depth(value[0]) if len(value) else 0)
    return 0


def _names(rows: list[dict[str, Any]], chosen: Mapping[str, str], place: str) -> tuple[dict[str, str], list[str]]:
    """Return the name of each field, and the names that are not read."""
    present = list(dict.fromkeys(name for row in rows for name in row))
    for name, key in chosen.items():
        if name not in LOGGED:
            raise UsageError(f"--column {name}={key}: {did_you_mean(name, LOGGED)}columns are {', '.join(LOGGED)}")
        if key not in present:
            raise UsageError(f"--column {name}={key}: {did_you_mean(key, present)}{place} has {', '.join(present)}")
    names = dict(chosen)
    for field_name, known in LOGGED.items():
        if field_name in names:
            continue
        means = [key for key in present if key not in chosen.values() and logged_field(key) == field_name]
        means.sort(key=lambda key: known.index(key) if key in known else len(known))
        if len(means) > 1 and field_name in LOG_PROBS:
            raise UsageError(
                f"{place}: {listed(means)} may each be {field_name}; choose with --column {field_name}=NAME"
            )
        if means:
            names[field_name] = means[0]
    if not set(names) & set(LOG_PROBS):
        raise UsageError(f"{place} has no log-probs of tokens: its columns are {', '.join(present) or 'none'}")
    return names, [key for key in present if key not in names.values()]


def _logs(found: dict[str, list[Any]], names: dict[str, str], unread: list[str], place: str) -> Logs:
    lengths, first = None, ""
    rows: dict[str, list[np.ndarray]] = {}
    group = None
    for name, values in found.items():
        key = names[name]
        missing = [number for number, value in enumerate(values, 1) if value is None]
        if missing:
            raise UsageError(f"{place}: only some rollouts have {key}; rollout {missing[0]} has none")
        if name == "group":
            group = np.unique([str(value) for value in values], return_inverse=True)[1]
            continue
        rows[name] = [_row(value, f"{place}: {key} of rollout {number}") for number, value in enumerate(values, 1)]
        shapes = {row.ndim for row in rows[name]}
        if len(shapes) > 1 or (name in TOKENS and shapes != {1}):
            raise UsageError(f"{place}: {key} is not one list of numbers for each rollout")
        if shapes == {1}:
            own = np.array([len(row) for row in rows[name]])
            lengths, first = (own, key) if lengths is None else (lengths, first)
            if (own != lengths).any():
                bad = int((own != lengths).argmax())
                raise UsageError(
                    f"{place}: {key} of rollout {bad + 1} has {own[bad]} tokens, {first} has {lengths[bad]}"
                )
    assert lengths is not None
    written = np.arange(max(int(lengths.max()), 1)) < lengths[:, None]
    columns = {name: _padded(values, written) for name, values in rows.items()}
    live, notes = _live(columns, written)
    if not live.any():
        raise NoRolloutsError(f"{place}: no token counts; {names.get('mask', 'every list')} is empty")
    for name, column in columns.items():
        bad = np.argwhere(~np.isfinite(column) & (live if column.ndim == 2 else True))
        if len(bad):
            where = f"rollout {bad[0][0] + 1}" + (f", token {bad[0][1] + 1}" if column.ndim == 2 else "")
            raise UsageError(f"{place}: {names[name]} is not finite at {len(bad)} places, first in {where}")
        columns[name] = np.where(np.isfinite(column), column, 0.0)
    columns.pop("mask", None)
    group = np.arange(len(live)) if group is None else group
    return Logs(columns, names, unread, live, written, group, notes)


def _row(value: Any, what: str) -> np.ndarray:
    try:
        row = np.asarray(value)
        if row.dtype.kind not in "biuf":
            raise TypeError
        return row.astype(float)
    except (TypeError, ValueError):
        raise UsageError(f"{what} is not a number or a list of numbers") from None


def _padded(values: list[np.ndarray], written: np.ndarray) -> np.ndarray:
    if values[0].ndim == 0:
        return np.array(values, dtype=float)
    found = np.zeros(written.shape)
    found[written] = np.concatenate(values)
    return found


def _live(columns: dict[str, np.ndarray], written: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Return which tokens count: by the mask, else all but zeros at the end."""
    if "mask" in columns:
        return written & (columns["mask"] != 0), []
    zero = np.all([columns[name] == 0 for name in LOG_PROBS if name in columns], axis=0) | ~written
    padding = np.logical_and.accumulate(zero[:, ::-1], axis=1)[:, ::-1]
    return written & ~padding, ["There is no mask: every token counts but zeros at the end of a rollout."]
