"""One run of the language-model runner, a row an evaluation; or the runs, audits and measurements recorded here."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kltest.finetune.run import run
from kltest.finetune.settings import Settings, settings_of
from kltest.reproduce.frames import Row

from ..records import content, lines, rounded
from .settings import EVALUATIONS, JOINT, METRICS, RUN, SAME, STALE_EPOCHS, TASKS
from .settings import SETTINGS as SETTINGS

# Packages that rows depend on beside those of every experiment.
ROOMS = ("finetune", "language_models")
LIBRARIES = ("transformers", "tokenizers")
HERE = Path(__file__).parent
COMMITTED = HERE / "sweep.csv"
# Tables whose lines are the rows of a part.
TABLES = {"audits": HERE / "audits.csv", "lacking": HERE / "lacking.csv"}
FIGURES = 6
"""Significant figures that rows keep: float32 has hardly more."""


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """All of them; without transformers no runs. What the committed rows are is part of the configuration."""
    able = find_spec("transformers") is not None
    for one in configurations:
        if path := {"committed": COMMITTED, **TABLES}.get(one["part"]):
            yield {**one, "_content": content(path)}
        elif able:
            yield dict(one)


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """Rows in which the configuration stands first."""
    one = {name: value for name, value in configuration.items() if not name.startswith("_")}
    if one["part"] == "committed":
        return committed()
    if one["part"] in TABLES:
        return [{"part": one["part"], **line} for line in lines(TABLES[one["part"]])]
    settings, rows = settings_for(one), []
    for record in run(settings, None, quiet=True):
        if "kl" in record:
            found = {name: rounded(record[name], FIGURES) for name in METRICS}
            rows.append({**one, "update": record["step"] * settings.inner_epochs, **found})
    return rows


def settings_for(one: Mapping[str, Any]) -> Settings:
    """The runner's settings of a configuration."""
    stale, _, kl = one["variant"].rpartition(":")
    if one["variant"] == JOINT:
        kl = f"{HERE / 'joint.py'}:joint"
    epochs = STALE_EPOCHS if stale else 1
    steps = one["updates"] // epochs
    given = {name: one[name] for name in ("seed", "beta", *(name for name in SAME if name != "updates"))}
    measured = {"steps": steps, "eval_every": max(1, steps // EVALUATIONS)}
    task = f"{HERE / 'task.py'}:{TASKS[one['task']]}"
    return settings_of({**RUN, "task": task, "kl": kl, "inner_epochs": epochs, **given, **measured})


def committed() -> list[Row]:
    """The rows of sweep.csv, of the part `committed`, of the seeds of which it has all runs; perhaps none."""
    every = len(SETTINGS.configurations(SETTINGS.grid("full", ["part=run"], seeds=1)))
    there = lines(COMMITTED)
    whole = {seed for seed, runs in Counter(line["seed"] for line in there).items() if runs == every}
    # A line a run, with a list for what changes along it.
    return [
        {"part": "committed", **SAME, **line, **dict(zip(("update", *METRICS), each, strict=True))}
        for line in there
        if line["seed"] in whole
        for each in zip(*(line[name] for name in ("update", *METRICS)), strict=True)
    ]
