"""Settings of a run: plain data with defaults, checked, read from files, hashed into a key.

`settings.toml` says what each one means, its limits and its choices; `metrics.toml` what a run measures.
"""

import json
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import torch

from kltest.errors import UsageError, did_you_mean
from kltest.files import literal
from kltest.language_models.models import is_tiny
from kltest.sweeps.store import digest

AUTO = "auto"
NONE = "none"
HERE = files("kltest.finetune")
DESCRIBED: dict[str, dict[str, Any]] = tomllib.loads((HERE / "settings.toml").read_text(encoding="utf-8"))
"""The meaning of each setting, and perhaps `low`, `high` and `choices`."""
METRICS: dict[str, str] = tomllib.loads((HERE / "metrics.toml").read_text(encoding="utf-8"))
"""The metrics that a run writes, with their meaning."""
ALGORITHM = "algorithm=reinforce subtracts the mean reward of the other rollouts, algorithm=grpo follows the GRPO paper"
GONE = {
    "static_cache": "generation uses a cache that grows; lower prompts or max_tokens if memory is short",
    "baseline": ALGORITHM,
    "scale": ALGORITHM,
    "normalise": f"{ALGORITHM} and divides by lengths",
    "ratio": f"{ALGORITHM}, with ratios of tokens instead of sequences",
    "truncated": "rollouts are rewarded as they are; raise max_tokens if many are cut off",
    "schedule": "the learning rate is constant after warmup; lower learning_rate",
    "compile": "set dtype=bfloat16 for speed on a GPU",
    "chat": "write prompts in the model's template: tokenizer.apply_chat_template(messages, tokenize=False, "
    "add_generation_prompt=True)",
}
"""Settings of earlier versions, with what to do instead."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run; on one machine's CPU equal settings give the same run, bit by bit.

    `resolved` replaces "auto".

    Raises:
        UsageError: A value is out of range or of another type.
    """

    model: str = "tiny"
    task: str = "addition"
    keys: str = ""
    seed: int = 0
    steps: int = 100
    prompts: int = 32
    group_size: int = 4
    max_tokens: int = 0
    temperature: float = 1.0
    algorithm: str = "reinforce"
    clip: float = 0.2
    inner_epochs: int = 1
    minibatches: int = 1
    kl: str = "auto"
    beta: float = 0.05
    placement: str = "auto"
    credit: str = "auto"
    kl_options: dict[str, Any] = field(default_factory=dict)
    optimiser: str = "adam"
    learning_rate: float = 0.0003
    warmup: int = 5
    max_norm: float = 1.0
    micro_batch: int = 0
    eval_every: int = 20
    eval_prompts: int = 256
    gradient_every: int = -1
    gradient_chunks: int = 8
    gradient_batches: int = 8
    lora: int = 0
    samples: int = 4
    tracker: str = "none"
    checkpoint_every: int = 25
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    reference_steps: int = 1500
    reference_reward: float = 0.5

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            _check(name, getattr(self, name), kind)
        if self.prompts % self.minibatches:
            raise UsageError(
                f"minibatches: {self.prompts} prompts cannot be divided into {self.minibatches} equal parts"
            )

    @property
    def resolved(self) -> Self:
        """These settings with every "auto" but the device's and the KL term's own replaced by its meaning."""
        gpu = self.device.startswith("cuda") or (self.device == AUTO and torch.cuda.is_available())
        unbiased = "k1-reward-sequence-ratio" if self.updates > 1 else "leave-one-out"
        chosen = {"dtype": "bfloat16" if gpu else "float32", "kl": "k3-loss" if self.algorithm == "grpo" else unbiased}
        every = self.gradient_every if self.gradient_every >= 0 else 50 * is_tiny(self.model)
        named = {name: value for name, value in chosen.items() if getattr(self, name) == AUTO}
        return replace(self, gradient_every=every, **named)  # type: ignore[arg-type]

    @property
    def key(self) -> str:
        """A short name for these settings; those without effect on the numbers do not count."""
        return digest({name: value for name, value in asdict(self).items() if name not in WITHOUT_EFFECT})

    @property
    def updates(self) -> int:
        """Updates in a step."""
        return self.inner_epochs * self.minibatches

    @property
    def rollouts(self) -> int:
        """Rollouts in a step."""
        return self.prompts * self.group_size


KINDS: dict[str, type] = {one.name: dict if one.default is MISSING else type(one.default) for one in fields(Settings)}
_WORDS = {str: "a word", int: "a whole number", float: "a number", dict: "names and values"}
# Settings that do not change the numbers.
WITHOUT_EFFECT = {"threads", "checkpoint_every", "samples", "tracker"}


def settings_of(values: Mapping[str, Any], where: str = "settings") -> Settings:
    """Return settings from plain data; UsageError for an unknown name, mentioning `where` it stands."""
    for name in values:
        if name in GONE:
            raise UsageError(f"{where}: {name} was removed: {GONE[name]}")
        if name not in KINDS:
            hint = f"{did_you_mean(name, KINDS)}there are: {', '.join(sorted(KINDS))}"
            raise UsageError(f"{where}: there is no setting {name!r}; {hint}")
    whole = {name: float(value) for name, value in values.items() if KINDS[name] is float and type(value) is int}
    return Settings(**{**values, **whole})


def _check(name: str, value: Any, kind: type) -> None:
    limits = DESCRIBED[name]
    if type(value) is not kind:
        raise UsageError(f"{name}: give {_WORDS[kind]}, not {value!r}")
    choices = limits.get("choices", ())
    if choices and value not in choices:
        raise UsageError(f"{name}: {did_you_mean(str(value), choices)}{value!r} is none of {', '.join(choices)}")
    low, high = limits.get("low", -math.inf), limits.get("high", sys.float_info.max)
    if kind in (int, float) and not low <= value <= high:
        raise UsageError(f"{name}: {value} is not between {low:g} and {high:g}")


def read(path: Path) -> dict[str, Any]:
    """Return the names and values in a .toml or .json file; UsageError if it cannot be read."""
    kind, load = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        values = load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as {kind}: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: settings are names and values, not {type(values).__name__}")
    return values


def changed(values: Mapping[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Return values with changes such as "beta=0.1"; `kl_options.NAME=value` sets one argument of the KL term."""
    found = dict(values)
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        name, _, argument = name.replace("-", "_").partition(".")
        if not equals or not name:
            raise UsageError(f"--set {text}: write it as name=value")
        new = literal({"true": "True", "false": "False"}.get(value, value), bool | int | float | str | list)
        found[name] = {**found.get(name, {}), argument: new} if argument else new
    return found
