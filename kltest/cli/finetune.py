"""`kltest finetune`: one run of the language-model runner, with a table of its evaluations at the end.

With `--exact` estimators are graded instead, as by `kltest grade --environment transformer`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kltest.errors import INTERRUPTED, UsageError
from kltest.files import as_json, writable, write
from kltest.render.tables import Terminal, table
from kltest.truth import render
from kltest.version import VERSION

if TYPE_CHECKING:
    from kltest.finetune.exact import ExactRow

FOLDER = "results/finetune"
SCHEMA = "kltest.finetune-exact/2"
DISAGREES = 1
# Smaller relative biases are rounding; every real one is above a hundredth.
NO_BIAS = 1e-9


def listing() -> int:
    """Every setting with its default and meaning, and every metric with what it is."""
    from kltest.finetune.settings import DESCRIBED, METRICS, Settings

    print("Settings (--set NAME=VALUE):")
    for name, default in asdict(Settings()).items():
        choices = "|".join(DESCRIBED[name].get("choices", ()))
        print(f"  {name} = {default}{choices and f' ({choices})'}: {DESCRIBED[name]['meaning']}")
    print("\nMetrics (metrics.jsonl):", *(f"  {name}: {meaning}" for name, meaning in METRICS.items()), sep="\n")
    return 0


def _evaluations(records: Sequence[Mapping[str, Any]]) -> str:
    """The evaluations as a table."""
    columns = {
        "held-out reward": "reward_held_out",
        "KL(π‖ref), nats": "kl",
        "cosine of the KL gradient": "kl_gradient_cosine",
    }
    heads = ["step", *columns]
    rows = [
        [str(record["step"]), *(_interval(record, name) for name in columns.values())]
        for record in records
        if record.keys() & set(columns.values())
    ]
    return table(heads, rows, right=heads, whole=heads)


def _interval(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        return "–"
    return f"{record[name]:.3f} [{record[f'{name}_low']:.3f}, {record[f'{name}_high']:.3f}]"


def command(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="tiny, tiny:SIZE (as tiny:1M), a folder, or a hub id [default: tiny]"
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", metavar="TASK", help="addition, jsonl:PATH, FILE.py:NAME [default: addition]"),
    ] = None,
    kl: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The KL term: a name of `kltest list`, or none [default: k1 in the reward, unbiased]"
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
        typer.Option("--output", metavar="DIR", help="Where the run is stored [default: results/finetune/KEY]"),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Start again instead of continuing.")] = False,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Instead of training: every estimator's exact gradient at all weights of a transformer whose "
            "completions are all counted (--kl: of this one).",
        ),
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Instead of training: draw the runs in two folders, reward against KL."),
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List all settings and metrics.")] = False,
) -> int:
    if list_only:
        return listing()
    if compare:
        return _compare(compare, output)
    given = {"model": model, "task": task, "kl": kl, "beta": beta, "steps": steps, "seed": seed}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if exact:
        others = {"settings": settings, "again": again, "set": changes}
        return _exact(values | {name: value for name, value in others.items() if value}, output)
    from kltest.finetune.picture import PICTURE, draw, stored
    from kltest.finetune.run import run
    from kltest.finetune.settings import changed, read, settings_of
    from kltest.grading.isolated import terminated_as_interrupted

    # Options win over the file, and changes over both.
    of_file = {} if settings is None else read(Path(settings))
    chosen = settings_of(changed(of_file | values, changes or []), settings or "--set")
    folder = Path(output) if output else Path(FOLDER) / chosen.key
    try:
        with terminated_as_interrupted():
            records = run(chosen, folder, again=again)
    except KeyboardInterrupt:
        print(f"kltest: interrupted; {_left(folder)}; run the same command to continue", file=sys.stderr)
        return INTERRUPTED
    picture = draw([stored(folder)], folder / PICTURE)
    print(_evaluations(records), f"Metrics, checkpoint and model are in {folder}, a picture is {picture}.", sep="\n")
    return 0


def _left(folder: Path) -> str:
    """Return what is left of a run that was interrupted."""
    from kltest.finetune.checkpoints import CHECKPOINT

    if (folder / CHECKPOINT).exists():
        return f"all is stored in {folder}"
    return "no step is stored, and training of the reference starts again if it had not ended"


def _compare(folders: Sequence[Path], output: str | None) -> int:
    """Draw two runs in one picture, and print the evaluations of each."""
    from kltest.finetune.picture import PICTURE, draw, stored

    runs = [(f"{folder.name}: {words}", records) for folder in folders for words, records in [stored(folder)]]
    picture = draw(runs, writable(Path(output or FOLDER)) / PICTURE)
    for label, records in runs:
        print(label, _evaluations(records), "", sep="\n")
    print(f"The picture is {picture}.")
    return 0


def _exact(options: Mapping[str, Any], output: str | None) -> int:
    """Print a table and return 1 if an estimator follows something else than its SPEC names, else 0.

    Args:
        options: Those given on the command line, of which seed and kl (one estimator, else all) are taken.
        output: The folder for exact.json, if the table is to be kept.
    """
    from kltest.finetune.exact import rows

    if excess := sorted(options.keys() - {"seed", "kl"}):
        raise UsageError(f"--exact takes no {excess[0]}; there are: seed, kl")
    seed = options.get("seed", 0)
    found = list(rows((options["kl"],) if "kl" in options else (), seed))
    heads = ["estimator", "sampler", "named gradient", "relative bias", "cosine", "as its SPEC says"]
    print(table(heads, map(_cells, found), right=heads[3:5], whole=heads, terminal=Terminal(width=140)))
    wrong = [row for row in found if not row.agrees]
    for row in wrong:
        print(f"{row.estimator}, {row.sampler}: its SPEC says {_named(row.expected)}")
    print(f"\n{len(found) - len(wrong)} of {len(found)} as their SPECs say.")
    if output is not None:
        kept = {"schema": SCHEMA, "kltest": VERSION, "seed": seed, "rows": [asdict(row) for row in found]}
        print(f"The table is in {write(writable(Path(output)) / 'exact.json', as_json(kept))}.")
    return DISAGREES if wrong else 0


def _cells(row: "ExactRow") -> list[str]:
    bias = "0" if row.bias < NO_BIAS else f"{row.bias:.3g}"
    cosine = "–" if row.cosine is None else f"{row.cosine:.3f}"
    return [row.estimator, row.sampler, _named(row.identified), bias, cosine, "yes" if row.agrees else "NO"]


def _named(combination: Mapping[str, float] | None) -> str:
    return "no named gradient" if combination is None else render(dict(combination))
