"""`kltest finetune`: one run of the language-model runner, with a table of its evaluations at the end.

With `--exact` estimators are graded instead, at the weights of a transformer whose completions are all enumerated.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kltest import __version__
from kltest.errors import KltestError, UsageError, did_you_mean
from kltest.truth import render

if TYPE_CHECKING:
    from kltest.finetune.exact import Request, Row

FOLDER = "results/finetune"
INTERRUPTED = 130
SCHEMA = "kltest.finetune-exact/1"
DISAGREES = 1
# Smaller relative biases are rounding; every real one is above a hundredth.
NO_BIAS = 1e-9


def listing() -> int:
    """Every setting with its default and meaning, and every metric with what it is."""
    from kltest.finetune.metrics import METRICS
    from kltest.finetune.settings import CHOICES, Settings

    print("Settings (--set NAME=VALUE):")
    for one in fields(Settings):
        default = "{}" if one.name == "kl_options" else one.default
        choices = f" ({'|'.join(CHOICES[one.name])})" if one.name in CHOICES else ""
        print(f"  {one.name} = {default}{choices}: {one.metadata['meaning']}")
    print("\nMetrics (metrics.jsonl):")
    for name, meaning in METRICS.items():
        print(f"  {name}: {meaning}")
    return 0


def _said(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """The evaluations as a table."""
    lines = [f"{'step':>6}  {'held-out reward':>22}  {'KL(π‖ref), nats':>22}  {'cosine of the KL gradient':>26}"]
    for record in records:
        if "kl" in record or "kl_gradient_cosine" in record:
            first, second, third = (_cell(record, name) for name in ("reward_held_out", "kl", "kl_gradient_cosine"))
            lines.append(f"{record['step']:6d}  {first:>22}  {second:>22}  {third:>26}")
    return lines


def _cell(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        return "–"
    return f"{record[name]:.3f} [{record[f'{name}_low']:.3f}, {record[f'{name}_high']:.3f}]"


def command(
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="tiny, tiny:SIZE (as tiny:1M), a folder, or a hub id [default: tiny]"),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="addition[:DIGITS], countdown[:NUMBERS] or jsonl:PATH [default: addition]"),
    ] = None,
    kl: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The KL term: a name of `kltest list`, or none [default: k1 in the reward, unbiased]",
        ),
    ] = None,
    beta: Annotated[float | None, typer.Option(metavar="β", help="Coefficient of the KL term [default: 0.05]")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="How often rollouts are drawn [default: 100]")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Chooses prompts and samples [default: 0]")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; repeatable.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(metavar="FILE", help="Settings from a .toml or .json file; options win over it.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", metavar="DIR", help="Where it is kept [default: results/finetune/KEY]"),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Start anew instead of going on.")] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Instead of training: every estimator's exact gradient at all weights of a transformer whose "
            "completions are all counted (--set vocabulary=8, length=3, device=cuda).",
        ),
    ] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Say all settings and metrics.")] = False,
) -> int:
    if list_only:
        return listing()
    given: dict[str, Any] = {"model": model, "task": task, "kl": kl, "beta": beta, "steps": steps, "seed": seed}
    if exact:
        given |= {"settings": settings, "again": again or None}
        return _exact(given, changes=changes or [], output=output)
    from kltest.finetune.settings import changes_of, read, settings_of

    # Options win over the file, and changes over both.
    values: dict[str, Any] = {} if settings is None else read(Path(settings))
    values |= {name: value for name, value in given.items() if value is not None}
    changed = changes_of(changes or [])
    if isinstance(changed.get("kl_options"), dict) and isinstance(values.get("kl_options"), dict):
        # A single argument on the command line leaves the file's others as they are.
        changed["kl_options"] = {**values["kl_options"], **changed["kl_options"]}
    chosen = settings_of(values | changed, settings or "--set")
    from kltest.language_models.models import needs_transformers

    needs_transformers()
    from kltest.finetune.run import run

    folder = Path(output) if output else Path(FOLDER) / chosen.key
    try:
        history = run(chosen, folder, again=again)
    except KeyboardInterrupt:
        print(f"kltest: interrupted; everything is kept in {folder}: the same command goes on", file=sys.stderr)
        return INTERRUPTED
    if history.records:  # another process keeps them otherwise
        print(*_said(history.records), f"Metrics, checkpoint and model are in {folder}.", sep="\n")
    return 0


def _exact(options: Mapping[str, Any], *, changes: Sequence[str] = (), output: str | None = None) -> int:
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
    from kltest.finetune.settings import changes_of

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
