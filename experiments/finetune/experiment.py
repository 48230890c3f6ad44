"""One run of the language-model runner, a row an evaluation; or the rows of the sweep that is kept in this folder."""

import ast
import csv
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kltest.finetune.run import run

from .optimum import chances_of, optimal
from .settings import BETA_OF_GRADIENTS, OPTIMUM, RUN, SAME, VARIANTS
from .spread import interval

# What rows depend on beside what those of every experiment do.
ROOMS = ("finetune", "language_models")
LIBRARIES = ("transformers", "tokenizers")
COMMITTED = Path(__file__).parent / "sweep.csv"
# Metrics of the runner that rows keep: what claims, tables, figures and the paper read.
KEPT = (
    *("reward_held_out", "reward_held_out_low", "reward_held_out_high", "kl", "kl_low", "kl_high"),
    *("kl_out_of_distribution", "kl_gradient_noise", "kl_gradient_cosine", "kl_gradient_size", "kl_gradient_size_low"),
    *("stale_gradient_cosine", "stale_gradient_size", "stale_gradient_size_low"),
)
FIGURES = 7
"""Significant figures that rows keep: float32 has no more."""

Row = dict[str, Any]


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """All of them; without transformers no runs. What the committed rows are is part of the configuration."""
    able = find_spec("transformers") is not None
    for one in configurations:
        if one["part"] == "committed":
            code = hashlib.sha256(COMMITTED.read_bytes()).hexdigest()[:8] if COMMITTED.exists() else "absent"
            yield {**one, "_content": code}
        elif able:
            yield dict(one)


def compute(configuration: Mapping[str, Any]) -> list[Row]:
    """Rows in which the configuration stands first."""
    one = {name: value for name, value in configuration.items() if not name.startswith("_")}
    if one["part"] == "committed":
        return committed()
    if one["variant"] == OPTIMUM:
        return optimum(one)

    settings, rows = settings_of(one), []
    for record in run(settings, None, quiet=True):
        if "kl" not in record and "kl_gradient_size" not in record:
            continue
        found = _rounded({name: record[name] for name in KEPT if name in record})
        rows.append({**one, "update": record["step"] * settings.inner_epochs, **found})
    return rows


def optimum(one: Mapping[str, Any]) -> list[Row]:
    """The reference and π* as the first and the last row of a run; intervals are over prompts."""
    names = ("seed", "model", "task", "reference_reward", "eval_prompts", "device", "dtype")
    chances = chances_of(*(one[name] for name in names))
    reward, kl = optimal(chances, one["beta"])
    rows = []
    for update, found in ((0, {"reward_held_out": chances}), (one["updates"], {"reward_held_out": reward, "kl": kl})):
        intervals = {
            f"{name}{end}": value
            for name, values in found.items()
            for end, value in zip(("", "_low", "_high"), vars(interval(list(values))).values(), strict=True)
        }
        rows.append({**one, "update": update, **_rounded(intervals)})
    return rows


def _rounded(found: Mapping[str, float]) -> Row:
    return {name: float(f"{value:.{FIGURES}g}") for name, value in found.items()}


def settings_of(one: Mapping[str, Any]) -> Any:
    """The runner's settings: measured at the start, half-way and at the end, gradients every quarter."""
    from kltest.finetune.settings import settings_of

    variant = VARIANTS[one["variant"]]
    steps = one["updates"] // variant.get("inner_epochs", 1)
    given = ("seed", "beta", *(name for name in SAME if name != "updates"))
    measured = variant["kl"] != "none" and one["beta"] == BETA_OF_GRADIENTS
    return settings_of(
        {
            **RUN,
            **{name: one[name] for name in given},
            "steps": steps,
            "eval_every": max(1, steps // 2),
            "gradient_every": max(1, steps // 4) if measured else 0,
            **variant,
        }
    )


def committed() -> list[Row]:
    """The rows of sweep.csv, of the part `committed`; none where there is no such file."""
    if not COMMITTED.exists():
        return []
    with COMMITTED.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    found = [{name: _value(text) for name, text in line.items() if text} for line in lines]
    return [{"part": "committed", **SAME, **row} for row in found]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
