"""`kltest finetune --exact`: the atlas at the weights of a transformer whose completions are all counted."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kltest import __version__
from kltest.errors import KltestError, UsageError, did_you_mean
from kltest.finetune.settings import changes_of
from kltest.truth import render

if TYPE_CHECKING:
    from kltest.finetune.exact import Asked, Row

SCHEMA = "kltest.finetune-exact/1"
DISAGREES = 1
# Relative biases below this are rounding: every bias that there is is above a hundredth.
NO_BIAS = 1e-9


def exact(given: Mapping[str, Any], *, changes: Sequence[str] = (), output: str | None = None) -> int:
    """Print the table, keep it as exact.json in `output` if that is given; 1 if a row is not as in the tabular case.

    Takes model, seed and kl (one estimator, else all), and vocabulary, length and device as changes.
    """
    from kltest.finetune.exact import rows
    from kltest.language_models.models import needs_transformers

    needs_transformers()
    asked, started = asked_of(given, changes), time.perf_counter()
    found = list(rows(asked, shown=True))
    for line in table(found):
        print(line)
    wrong = [row for row in found if not row.agrees]
    for row in wrong:
        print(f"{row.estimator}, {row.world}, {row.sampler}: {_named(row.expected)} in the tabular case, see above")
    seconds = time.perf_counter() - started
    completions = {row.world: row.completions for row in found}
    print(
        f"\n{len(found) - len(wrong)} of {len(found)} as in the tabular case, at all {found[0].parameters:,} weights, "
        f"over {' and '.join(f'{n} completions ({world})' for world, n in completions.items())}; {seconds:.0f} s."
    )
    if output is not None:
        _keep(Path(output), asked, found)
    return DISAGREES if wrong else 0


def asked_of(given: Mapping[str, Any], changes: Sequence[str]) -> Asked:
    """What the options ask for; UsageError for one that says nothing here."""
    from kltest.finetune.exact import Asked

    known = [one.name for one in fields(Asked) if one.name != "estimators"]
    values = {name: value for name, value in given.items() if value is not None} | changes_of(changes)
    kl = values.pop("kl", None)
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"--exact takes no {name}; {did_you_mean(name, known)}there are: {', '.join(known)}, kl")
        kind = type(getattr(Asked(), name))
        if type(value) is not kind:
            raise UsageError(f"{name}: give {'a whole number' if kind is int else 'a word'}, not {value!r}")
    return Asked(**values, estimators=() if kl is None else (kl,))


def table(rows: Sequence[Row]) -> list[str]:
    """A line a row, world by world and sampler by sampler."""
    lines: list[str] = []
    for place in dict.fromkeys((row.world, row.sampler) for row in rows):
        mine = [row for row in rows if (row.world, row.sampler) == place]
        width = max(14, *(len(_named(row.identified)) for row in mine))
        rank = max((row.names, row.rank, row.rank_in_tables) for row in mine)
        lines += [
            "",
            f"{place[0]}, {place[1]} sampler ({rank[1]} of {rank[0]} named gradients independent at the weights, "
            f"{rank[2]} in a table)",
            f"  {'estimator':28} {'named gradient':{width}} {'relative bias':>13} {'cosine':>7}  as in tables",
        ]
        lines += [
            f"  {row.estimator:28} {_named(row.identified):{width}} {_bias(row.bias):>13} {_cosine(row.cosine):>7}  "
            f"{'yes' if row.agrees else 'NO'}"
            for row in mine
        ]
    return lines


def _named(combination: Mapping[str, float] | None) -> str:
    return "no named gradient" if combination is None else render(dict(combination))


def _bias(value: float) -> str:
    return "0" if value < NO_BIAS else f"{value:.3g}"


def _cosine(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _keep(folder: Path, asked: Asked, rows: Sequence[Row]) -> None:
    written = {"schema": SCHEMA, "kltest": __version__, "asked": asdict(asked), "rows": [asdict(row) for row in rows]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "exact.json"
        path.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise KltestError(f"{folder} cannot be written: {error.strerror}") from error
    print(f"The table is in {path}.")
