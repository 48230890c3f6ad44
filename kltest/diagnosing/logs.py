"""Logs of rollouts as arrays: read from JSON lines, parquet or torch files, found by the names that trainers use."""

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kltest.errors import KltestError, UsageError, did_you_mean
from kltest.names import LOGGED, listed, logged_field

LOG_PROBS = ("logp", "ref_logp", "old_logp", "rollout_logp", "prox_logp")
OF_TOKENS = (*LOG_PROBS, "mask", "entropy")
"""Columns with a number for each token; others may have one for each rollout."""
SAME, MOST = 1e-6, 0.999
"""Log-probs that differ by less at more than this share of the tokens are copies of each other."""
LOGS = "the logs"
"""What logs are called that are no file."""
FORMATS = "JSON lines (.jsonl, .json), .parquet, or tensors of torch (.pt, .pth)"


class NoRolloutsError(KltestError):
    """Logs without any rollout: there is nothing to diagnose."""

    exit_code = 5


@dataclass(frozen=True)
class Logs:
    """N logged rollouts of at most T tokens.

    Attributes:
        columns: Arrays (N, T), 0 where nothing was written, or (N,), by field; `group` if a prompt has several.
        names: The name that each field has in the file.
        unread: Names that were not read.
        live: (N, T) bool, the tokens that count.
        written: (N, T) bool, the positions that the file has numbers for.
        group: (N,) the unit of each rollout: its prompt, or the rollout alone.
        wrong: Sentences on columns that cannot be what their names say; they are left out.
        notes: Sentences on how the file was read.
        beta: The coefficient of the KL term that was trained with, if it is known.
    """

    columns: dict[str, np.ndarray]
    names: dict[str, str]
    unread: list[str]
    live: np.ndarray
    written: np.ndarray
    group: np.ndarray
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    beta: float | None = None

    def __len__(self) -> int:
        return len(self.live)

    def first(self, *fields: str) -> str | None:
        """Return the first of the fields that is there."""
        return next((name for name in fields if name in self.columns), None)

    def unused(self, name: str) -> str:
        """Return why a field is not used though a column was read for it; empty if it is used or there is none."""
        if name not in self.names or name in self.columns or name == "group":
            return ""
        key = self.names[name]
        if any(one.startswith(f"{key} ") for one in self.wrong):
            return f"{key}, read for {name}, is not used: it holds no log-probs, see columns"
        why = next((one for one in self.notes if one.startswith(f"{key} is a copy")), "")
        return why and f"{key}, read for {name}, is not used: it {why.removeprefix(f'{key} ').partition(':')[0]}"

    def gap(self, one: str, other: str) -> np.ndarray:
        """Return the log-ratio (N, T) of two columns of log-probs, 0 at tokens that do not count."""
        return np.where(self.live, self.columns[one] - self.columns[other], 0.0)

    def are_copies(self, one: str, other: str) -> bool:
        """Return whether two columns of log-probs are there and equal at nearly all tokens."""
        both = one in self.columns and other in self.columns
        return both and bool((np.abs(self.gap(one, other))[self.live] <= SAME).mean() >= MOST)

    def first_tokens(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a column at the first token of each rollout that has one, and the units of these rollouts."""
        rows = np.flatnonzero(self.live.any(axis=1))
        return self.columns[name][rows, self.live[rows].argmax(axis=1)], self.group[rows]

    def whole(self, values: np.ndarray) -> np.ndarray:
        """Return numbers of rollouts (N,), sums over tokens of those of tokens (N, T)."""
        return values if values.ndim == 1 else np.where(self.live, values, 0.0).sum(axis=1)


def read(source: Any, names: Mapping[str, str] | None = None) -> Logs:
    """Read logs of rollouts.

    Args:
        source: A path, or a list of rollouts or of batches (mappings of numbers, lists, arrays or tensors), or one.
        names: Names of columns by field, for those that the usual names do not find; an empty one leaves a field out.

    Raises:
        UsageError: The source cannot be read, or a column is missing, ragged or not of finite numbers.
        NoRolloutsError: It holds no rollout.
    """
    place = str(source) if isinstance(source, str | Path) else LOGS
    records = _of_file(Path(source)) if isinstance(source, str | Path) else source
    records = records if isinstance(records, list | tuple) else [records]
    rows = [row for number, record in enumerate(records, 1) for row in _rollouts(record, f"{place}: record {number}")]
    if not rows:
        raise NoRolloutsError(f"{place}: there is no rollout in it")
    found, unread = _named(rows, names or {}, place)
    for key in found.values():
        lacking = [number for number, row in enumerate(rows, 1) if row.get(key) is None]
        if lacking:
            raise UsageError(f"{place}: only some rollouts have {key}; rollout {lacking[0]} has none")
    return _logs({name: [row[key] for row in rows] for name, key in found.items()}, found, unread, place)


def _of_file(path: Path) -> Any:
    try:
        if path.suffix in (".json", ".jsonl", ".ndjson"):
            text = path.read_text(encoding="utf-8-sig")
            with suppress(ValueError):  # one object or array; else an object a line
                return json.loads(text)
            return [_of_line(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        if path.suffix == ".parquet":
            import pandas

            return pandas.read_parquet(path).to_dict("records")
        if path.suffix in (".pt", ".pth"):
            import torch

            return torch.load(path, map_location="cpu", weights_only=True)
    except ImportError:
        raise UsageError(f"{path} cannot be read: pandas needs pyarrow for parquet; install it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (RuntimeError, EOFError, LookupError, pickle.UnpicklingError):
        raise UsageError(f"{path} holds no tensors as torch.save writes them") from None
    raise UsageError(f"{path}: logs are {FORMATS}")


def _of_line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is no JSON ({error})") from None


def _rollouts(record: Any, place: str) -> Iterator[dict[str, Any]]:
    """Yield the rollouts of a record, which is one, or a batch if a column of it has two dimensions."""
    if not isinstance(record, Mapping):
        raise UsageError(f"{place} is no mapping of columns; it is of type {type(record).__name__}")
    columns = {str(name): _plain(value) for name, value in record.items() if value is not None}
    sizes = {name: len(value) for name, value in columns.items() if _depth(value) > 1}
    if len(set(sizes.values())) > 1:
        told = [f"{name} has {_counted(size, 'rollout')}" for name, size in sizes.items()]
        raise UsageError(f"{place}: {listed(told)}")
    if not sizes:
        yield columns
        return
    size = next(iter(sizes.values()))
    whole = {name: _depth(value) > 0 and len(value) == size for name, value in columns.items()}
    for row in range(size):
        yield {name: value[row] if whole[name] else value for name, value in columns.items()}


def _plain(value: Any) -> Any:
    """Return tensors as arrays, and a row of a table as its list."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return (value.double() if value.is_floating_point() else value).numpy()
    return value


def _depth(value: Any) -> int:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.ndim
    return 1 + (_depth(value[0]) if len(value) else 0) if isinstance(value, list | tuple | np.ndarray) else 0


def _named(rows: list[dict[str, Any]], chosen: Mapping[str, str], place: str) -> tuple[dict[str, str], list[str]]:
    """Return the name of each field, and the names that are not read."""
    present = list(dict.fromkeys(name for row in rows for name in row))
    for name, key in chosen.items():
        for given, known in ((name, [*LOGGED]), (key, present)):
            if given and given not in known:
                raise UsageError(
                    f"--column {name}={key}: there is no {given}; {did_you_mean(given, known)}there are "
                    f"{', '.join(known)}"
                )
    names = {name: key for name, key in chosen.items() if key}
    for name, usual in LOGGED.items():
        means = [key for key in present if key not in chosen.values() and logged_field(key) == name]
        if name in chosen or not means:
            continue
        if len(means) > 1 and name in LOG_PROBS:
            raise UsageError(f"{place}: {listed(means)} may each be {name}; choose with --column {name}=NAME")
        names[name] = min(means, key=lambda key: usual.index(key) if key in usual else len(usual))
    if not set(names) & set(LOG_PROBS):
        raise UsageError(
            f"{place} {'has' if place != LOGS else 'have'} no log-probs of tokens, as logp, ref_logp or old_logp: the "
            f"columns are {', '.join(present)}. If one of them is, name it with --column logp=COLUMN (in Python "
            'names={"logp": "COLUMN"})'
        )
    return names, [key for key in present if key not in names.values()]


def _logs(values: dict[str, list[Any]], names: dict[str, str], unread: list[str], place: str) -> Logs:
    notes, wrong, group = [], [], np.unique([str(one) for one in values.pop("group", [])], return_inverse=True)[1]
    rows = {
        name: [_row(one, f"{place}: {names[name]} of rollout {number}") for number, one in enumerate(each, 1)]
        for name, each in values.items()
    }
    lengths: dict[str, np.ndarray] = {}
    for name, each in rows.items():
        shapes = {row.ndim for row in each}
        if shapes != {1} and (name in OF_TOKENS or shapes != {0}):
            raise UsageError(f"{place}: {names[name]} is not one list of numbers for each rollout")
        if shapes == {1}:
            lengths[name] = np.array([len(row) for row in each])
            (first, size), own = next(iter(lengths.items())), lengths[name]
            if (bad := np.flatnonzero(own != size)).size:
                raise UsageError(
                    f"{place}: {names[name]} of rollout {bad[0] + 1} has {_counted(own[bad[0]], 'token')}, "
                    f"{names[first]} has {size[bad[0]]}"
                )
    tokens: np.ndarray = next(iter(lengths.values()))
    written: np.ndarray = np.arange(max(tokens.max(), 1)) < tokens[:, None]
    columns = {}
    for name, each in rows.items():
        columns[name] = np.zeros(written.shape) if name in lengths else np.array(each)
        if name in lengths:
            columns[name][written] = np.concatenate(each)
    of_policies = [name for name in LOG_PROBS if name in columns]
    if "mask" in columns:
        live = written & (columns.pop("mask") != 0)
    else:
        some = written & np.any([columns[name] != 0 for name in of_policies], axis=0)
        live = written & np.maximum.accumulate(some[:, ::-1], axis=1)[:, ::-1]
        notes.append("There is no mask: every token counts but zeros at the end of a rollout.")
    if not live.any():
        raise NoRolloutsError(f"{place}: no token counts; all lists are empty, or the mask is 0 everywhere")
    for name, column in columns.items():
        places = np.argwhere(~np.isfinite(column) & (live if column.ndim == 2 else True))
        if len(places):
            where = " ".join(f"{word} {at + 1}" for word, at in zip(("rollout", "token"), places[0], strict=False))
            raise UsageError(
                f"{place}: {names[name]} is not finite in {_counted(len(places), 'place')}, first at {where}"
            )
        columns[name] = np.where(np.isfinite(column), column, 0.0)
    for name in of_policies:
        if ((inside := columns[name][live]) > 1e-3).mean() > 1 - MOST:
            kind = "probabilities" if inside.min() >= 0 and inside.max() <= 1 else "negatives of log-probs, or logits"
            wrong.append(f"{names[name]} has positive numbers, up to {inside.max():.3g}: {kind}?")
            del columns[name]
    several = 0 < len(np.unique(group)) < len(live)
    found = Logs(columns, names, unread, live, written, group if several else np.arange(len(live)), wrong, notes)
    if several:
        columns["group"] = group
    if (trainer := found.first("old_logp", "logp")) and found.are_copies("rollout_logp", trainer):
        notes.append(f"{names['rollout_logp']} is a copy of {names[trainer]}: nothing can be said of the engine.")
        del columns["rollout_logp"]
    return found


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _row(value: Any, what: str) -> np.ndarray:
    with suppress(TypeError, ValueError):
        row = np.asarray(value)
        if row.dtype.kind in "biuf" or not row.size:
            return row.astype(float)
    raise UsageError(f"{what} is not a number or a list of numbers")
