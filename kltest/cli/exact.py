"""`kltest finetune --exact`: estimators graded at the weights of a transformer whose completions are all enumerated."""

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
    from kltest.finetune.exact import Request, Row

SCHEMA = "kltest.finetune-exact/1"
DISAGREES = 1
# Smaller relative biases are rounding; every real one is above a hundredth.
NO_BIAS = 1e-9


def exact(options: Mapping[str, Any], *, changes: Sequence[str] = (), output: str | None = None) -> int:
    """Print the table and return 1 if a row differs from the tabular case, else 0.

    Args:
        options: Values of the command line's options; model, seed and kl (one estimator, else all) may be given.
        changes: "vocabulary=…", "length=…" or "device=…".
        output: The folder for exact.json, if the table is to be kept.
    """
    from kltest.finetune.exact import rows
    from kltest.language_models.models import needs_transformers

    needs_transformers()
    request, started = request_of(options, changes), time.perf_counter()
    found = list(rows(request, shown=True))
    for line in table(found):
        print(line)
    wrong = [row for row in found if not row.agrees]
    for row in wrong:
        print(
            f"{row.estimator}, {row.environment}, {row.sampler}: {_named(row.expected)} in the tabular case, see above"
        )
    seconds = time.perf_counter() - started
    completions = {row.environment: row.completions for row in found}
    print(
        f"\n{len(found) - len(wrong)} of {len(found)} as in the tabular case, at all {found[0].parameters:,} weights, "
        f"over {' and '.join(f'{n} completions ({name})' for name, n in completions.items())}; {seconds:.0f} s."
    )
    if output is not None:
        _keep(Path(output), request, found)
    return DISAGREES if wrong else 0


def request_of(options: Mapping[str, Any], changes: Sequence[str]) -> "Request":
    """Return the request; UsageError for an option that has no meaning here, or a value of another type."""
    from kltest.finetune.exact import Request

    known = [one.name for one in fields(Request) if one.name != "estimators"]
    values = {name: value for name, value in options.items() if value is not None} | changes_of(changes)
    kl = values.pop("kl", None)
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"--exact takes no {name}; {did_you_mean(name, known)}there are: {', '.join(known)}, kl")
        kind = type(getattr(Request(), name))
        if type(value) is not kind:
            raise UsageError(f"{name}: give {'a whole number' if kind is int else 'a word'}, not {value!r}")
    return Request(**values, estimators=() if kl is None else (kl,))


def table(rows: "Sequence[Row]") -> list[str]:
    """Return a line for each row, by environment and sampler."""
    lines: list[str] = []
    for place in dict.fromkeys((row.environment, row.sampler) for row in rows):
        here = [row for row in rows if (row.environment, row.sampler) == place]
        width = max(14, *(len(_named(row.identified)) for row in here))
        rank = max((row.names, row.rank, row.rank_in_tables) for row in here)
        lines += [
            "",
            f"{place[0]}, {place[1]} sampler ({rank[1]} of {rank[0]} named gradients independent at the weights, "
            f"{rank[2]} in a table)",
            f"  {'estimator':28} {'named gradient':{width}} {'relative bias':>13} {'cosine':>7}  as in tables",
        ]
        for row in here:
            bias = "0" if row.bias < NO_BIAS else f"{row.bias:.3g}"
            cosine = "–" if row.cosine is None else f"{row.cosine:.3f}"
            cells = f"{_named(row.identified):{width}} {bias:>13} {cosine:>7}  {'yes' if row.agrees else 'NO'}"
            lines.append(f"  {row.estimator:28} {cells}")
    return lines


def _named(combination: Mapping[str, float] | None) -> str:
    return "no named gradient" if combination is None else render(dict(combination))


def _keep(folder: Path, request: "Request", rows: "Sequence[Row]") -> None:
    written = {"schema": SCHEMA, "kltest": __version__, "asked": asdict(request), "rows": [asdict(row) for row in rows]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "exact.json"
        path.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise KltestError(f"{folder} cannot be written: {error.strerror}") from error
    print(f"The table is in {path}.")
