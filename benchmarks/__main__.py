"""All benchmarks, and their table in Markdown."""

import os
import platform
from importlib import import_module

import torch

from benchmarks.measure import table

SCRIPTS = (
    "start_up",
    "registry",
    "moments",
    "per_rollout",
    "dynamic_programming",
    "sampled",
    "training",
    "sweeps",
    "finetune",
    "corpus",
)


def main() -> None:
    rows = [row for name in SCRIPTS for row in import_module(f"benchmarks.{name}").main()]
    print(
        f"\n{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__} on {torch.get_num_threads()} "
        "threads; median of ratios within one run (min – max)\n"
    )
    print(table(rows))


if __name__ == "__main__":
    main()
