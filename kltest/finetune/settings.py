"""Settings of a run: plain data with defaults, checked, read from files, hashed into a key.

`settings.toml` says what each one means, its limits and its choices.
"""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import torch

from kltest.errors import UsageError, did_you_mean
from kltest.language_models.models import is_tiny
from kltest.sweeps.settings import literal
from kltest.sweeps.store import digest

AUTO = "auto"
NONE = "none"
DESCRIBED: dict[str, dict[str, Any]] = tomllib.loads(
    (files("kltest.finetune") / "settings.toml").read_text(encoding="utf-8")
)
"""The meaning of each setting, and perhaps `low`, `high` and `choices`."""
GONE = {
    "static_cache": "generation uses a cache that grows; lower prompts or max_tokens if memory is short",
}
"""Settings of earlier versions, with what to do instead."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run; on one machine's CPU equal settings give the same run, bit by bit.

    "auto" is the unbiased choice under `algorithm` reinforce, and the GRPO paper's under grpo; `resolved` replaces it.

    Raises:
        UsageError: A value is out of range or of another type.
    """

    model: str = "tiny"
    task: str = "addition"
    keys: str = ""
    chat: bool = False
    seed: int = 0
    steps: int = 100
    prompts: int = 32
    group_size: int = 4
    max_tokens: int = 0
    temperature: float = 1.0
    algorithm: str = "reinforce"
    baseline: str = "auto"
    scale: str = "auto"
    normalise: str = "auto"
    ratio: str = "auto"
    clip: float = -1.0
    inner_epochs: int = 1
    minibatches: int = 1
    truncated: str = "keep"
    kl: str = "auto"
    beta: float = 0.05
    placement: str = "auto"
    credit: str = "auto"
    kl_options: Mapping[str, Any] = field(default_factory=dict)
    optimiser: str = "adam"
    learning_rate: float = 0.0003
    warmup: int = 5
    schedule: str = "constant"
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
    compile: bool = False
    threads: int = 0
    reference_steps: int = 1500
    reference_reward: float = 0.5

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, getattr(self, one.name), one.default)
        if self.baseline in (AUTO, "leave-one-out") and self.algorithm == "reinforce" and self.group_size < 2:
            raise UsageError(
                "group_size: a leave-one-out baseline needs 2 rollouts of a prompt; set group_size=2 or baseline=none"
            )
        if self.prompts % self.minibatches:
            raise UsageError(
                f"minibatches: {self.prompts} prompts cannot be divided into {self.minibatches} equal parts"
            )
        if self.chat and is_tiny(self.model):
            raise UsageError("chat: a tiny model has no chat template; set chat=false, or name another model")
        if self.clip > 0 and self.resolved.ratio == NONE:
            raise UsageError("clip: there is no ratio to clip; set ratio=token or ratio=sequence")

    @property
    def resolved(self) -> Self:
        """These settings with every "auto" but the device's and the KL term's own replaced by its meaning."""
        grpo, stale = self.algorithm == "grpo", self.updates > 1
        gpu = self.device.startswith("cuda") or (self.device == AUTO and torch.cuda.is_available())
        chosen = {
            "dtype": "bfloat16" if gpu else "float32",
            "baseline": "mean" if grpo else "leave-one-out",
            "scale": "group-std" if grpo else NONE,
            "normalise": "sequence" if grpo else NONE,
            "ratio": "token" if grpo else "sequence" if stale else NONE,
            "kl": "k3-loss" if grpo else "k1-reward-sequence-ratio" if stale else "leave-one-out",
        }
        changes: dict[str, Any] = {name: value for name, value in chosen.items() if getattr(self, name) == AUTO}
        if self.clip < 0:
            changes["clip"] = 0.2 if grpo and changes.get("ratio", self.ratio) != NONE else 0.0
        if self.gradient_every < 0:
            changes["gradient_every"] = 50 if is_tiny(self.model) else 0
        return replace(self, **changes) if changes else self

    @property
    def key(self) -> str:
        """A short name for these settings; those without effect on the numbers do not count."""
        return digest({name: value for name, value in self.plain().items() if name not in WITHOUT_EFFECT})

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON can hold them."""
        return {**asdict(self), "kl_options": dict(self.kl_options)}

    @property
    def updates(self) -> int:
        """Updates in a step."""
        return self.inner_epochs * self.minibatches

    @property
    def rollouts(self) -> int:
        """Rollouts in a step."""
        return self.prompts * self.group_size


# Settings that do not change the numbers.
WITHOUT_EFFECT = ("threads", "checkpoint_every", "samples", "tracker")


def settings_of(values: Mapping[str, Any], where: str = "settings") -> Settings:
    """Return settings from plain data; UsageError for an unknown name, mentioning `where` it stands."""
    known, chosen = {one.name: type(one.default) for one in fields(Settings)}, dict(values)
    for name, value in values.items():
        if name in GONE:
            raise UsageError(f"{where}: {name} is no setting any more; {GONE[name]}")
        if name not in known:
            hint = f"{did_you_mean(name, known)}there are: {', '.join(sorted(known))}"
            raise UsageError(f"{where}: there is no setting {name!r}; {hint}")
        if known[name] is float and type(value) is int:
            chosen[name] = float(value)
        elif known[name] is str and value is None:  # JSON's null
            chosen[name] = NONE
    return Settings(**chosen)


def read(path: Path) -> dict[str, Any]:
    """Return the names and values in a .toml or .json file; UsageError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: settings are names and values, not {type(values).__name__}")
    return values


def changes_of(texts: Sequence[str]) -> dict[str, Any]:
    """Return {"beta": 0.1} for "beta=0.1"; `kl_options.NAME=value` sets one further argument of the KL term."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise UsageError(f"--set {text}: write it as name=value")
        if name.startswith("kl_options."):
            changes.setdefault("kl_options", {})[name.partition(".")[2]] = _literal(value.strip())
        else:
            changes[name] = _literal(value.strip())
    return changes


def _check(name: str, value: Any, default: Any) -> None:
    kind, limits = type(default), DESCRIBED[name]
    low, high, choices = limits.get("low", -math.inf), limits.get("high", math.inf), limits.get("choices")
    if name == "kl_options":
        if not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            raise UsageError(f"kl_options: give names and values, not {value!r}")
        return
    if type(value) is not kind:
        raise UsageError(f"{name}: give {_KINDS[kind]}, such as {default!r}, not {value!r}")
    if kind in (int, float) and not low <= value <= high:
        raise UsageError(f"{name}: {value} is not between {low:g} and {high:g}")
    if kind is float and not math.isfinite(value):
        raise UsageError(f"{name}: {value} is not finite")
    if choices and value not in choices:
        raise UsageError(f"{name}: {did_you_mean(value, choices)}{value!r} is none of {', '.join(choices)}")


def _literal(text: str) -> Any:
    return literal({"true": "True", "false": "False"}.get(text.lower(), text), bool | int | float | str | list)


_KINDS = {str: "a word", int: "a whole number", float: "a number", bool: "true or false"}
