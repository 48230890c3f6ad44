"""Metrics that a run writes, with their meaning; the documentation is made from this table."""

import tomllib
from importlib.resources import files

METRICS: dict[str, str] = tomllib.loads((files("kltest.finetune") / "metrics.toml").read_text(encoding="utf-8"))
