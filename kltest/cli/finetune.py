"""`kltest finetune`: one run of the language-model runner, said in words when it ends."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kltest.finetune.settings import Settings, changes_of, read, settings_of

FOLDER = "results/finetune"
INTERRUPTED = 130


def finetune(
    given: Mapping[str, Any],
    *,
    changes: Sequence[str] = (),
    file: str | None = None,
    output: str | None = None,
    again: bool = False,
) -> int:
    """Run with the settings of a file, then those `given` by options of their own, then changes such as "beta=0.1"."""
    values: dict[str, Any] = {} if file is None else read(Path(file))
    values |= {name: value for name, value in given.items() if value is not None}
    values |= changes_of(changes)
    settings = settings_of(values, file or "--set")
    from kltest.language_models.models import needs_transformers

    needs_transformers()
    from kltest.finetune.run import run

    folder = Path(output) if output else Path(FOLDER) / settings.key
    try:
        history = run(settings, folder, again=again)
    except KeyboardInterrupt:
        print(f"kltest: interrupted; everything is kept in {folder}: the same command goes on", file=sys.stderr)
        return INTERRUPTED
    if not history.records:  # another process keeps them
        return 0
    for line in _said(history.records):
        print(line)
    print(f"Metrics, checkpoint and model are in {folder}.")
    return 0


def listing() -> int:
    """Every setting with its default and meaning, and every metric with what it is."""
    from dataclasses import fields

    from kltest.finetune.metrics import METRICS
    from kltest.finetune.settings import CHOICES

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
            cells = (_cell(record, name) for name in ("reward_held_out", "kl", "kl_gradient_cosine"))
            first, second, third = cells
            lines.append(f"{record['step']:6d}  {first:>22}  {second:>22}  {third:>26}")
    return lines


def _cell(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        return "–"
    return f"{record[name]:.3f} [{record[f'{name}_low']:.3f}, {record[f'{name}_high']:.3f}]"
