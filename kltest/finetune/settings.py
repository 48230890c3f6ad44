"""Settings of a run: plain data with defaults and help texts, checked, read from files, hashed into a key."""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self, get_args

import torch

from kltest.errors import UsageError, did_you_mean
from kltest.estimators.spec import Credit, Placement
from kltest.language_models.models import is_tiny
from kltest.sweeps.settings import literal
from kltest.sweeps.store import digest

AUTO = "auto"
NONE = "none"
CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm": ("reinforce", "grpo"),
    "baseline": (AUTO, "leave-one-out", "mean", NONE),
    "scale": (AUTO, NONE, "group-std"),
    "normalise": (AUTO, NONE, "sequence", "tokens", "constant"),
    "ratio": (AUTO, NONE, "token", "sequence"),
    "optimiser": ("adam", "sgd"),
    "schedule": ("constant", "linear", "cosine"),
    "truncated": ("keep", "zero", "mask"),
    "dtype": (AUTO, "float32", "bfloat16", "float64"),
    "placement": (AUTO, *get_args(Placement)),
    "credit": (AUTO, *get_args(Credit)),
}


def _setting(default: Any, meaning: str, low: float = -math.inf, high: float = math.inf) -> Any:
    return field(default=default, metadata={"meaning": meaning, "low": low, "high": high})


@dataclass(frozen=True)
class Settings:
    """Settings of a run; on one machine's CPU equal settings give the same run, bit by bit.

    "auto" is the unbiased choice under `algorithm` reinforce, and the GRPO paper's under grpo; `resolved` replaces it.

    Raises:
        UsageError: A value is out of range or of another type.
    """

    model: str = _setting(
        "tiny", "tiny or tiny:SIZE (0.2M to 100M parameters, trained first), a folder with a model, or a hub id"
    )
    task: str = _setting(
        "addition",
        "addition[:DIGITS], countdown[:NUMBERS], jsonl:PATH, hub:ID or hub:ID,CONFIGURATION:SPLIT for a data set, or "
        "FILE.py:NAME for a class or function of yours that makes a task",
    )
    keys: str = _setting("", "names of a file's or data set's keys, such as prompt=question,answer=solution")
    chat: bool = _setting(False, "send each prompt as a user message through the tokenizer's chat template")
    seed: int = _setting(0, "seed of prompts, of samples and of the weights of a tiny model", 0, 2**31)
    steps: int = _setting(100, "training steps; each one draws new rollouts", 0)
    prompts: int = _setting(32, "prompts in a step, over all processes", 1)
    group_size: int = _setting(4, "rollouts of each prompt", 1)
    max_tokens: int = _setting(0, "longest rollout in tokens; 0: as the task needs, 256 for jsonl", 0)
    temperature: float = _setting(1.0, "policy, reference and sampler are softmax(logits/temperature)", 1e-3, 1e3)
    algorithm: str = _setting("reinforce", "meaning of auto: reinforce is unbiased, grpo follows the GRPO paper")
    baseline: str = _setting(AUTO, "baseline subtracted from rewards; auto: leave-one-out, grpo: mean")
    scale: str = _setting(AUTO, "divisor of advantages; auto: none, grpo: group-std")
    normalise: str = _setting(
        AUTO,
        "divisor of a rollout's loss: its length (sequence), the batch's mean length (tokens) or max_tokens "
        "(constant); auto: none, grpo: sequence",
    )
    ratio: str = _setting(
        AUTO, "importance ratio of the reward part; auto: none for one inner epoch, sequence for several, grpo: token"
    )
    clip: float = _setting(-1.0, "PPO's ε for clipping the ratio; 0: no clipping; -1: 0, grpo: 0.2", -1.0, 1e6)
    inner_epochs: int = _setting(
        1, "updates with the rollouts of one step; at the last one the sampler is inner_epochs − 1 updates old", 1
    )
    minibatches: int = _setting(
        1, "equal parts of a step's prompts; each has an update of its own in every inner epoch, in the same order", 1
    )
    truncated: str = _setting(
        "keep", "rollouts that max_tokens cuts off: rewarded as they are (keep), with 0, or without a gradient (mask)"
    )
    kl: str = _setting(
        AUTO,
        "a KL term: a name of `kltest list`, module:function, FILE.py:function, or none; auto: "
        "leave-one-out, k1-reward-sequence-ratio for several inner epochs, grpo: k3-loss",
    )
    beta: float = _setting(0.05, "coefficient of the KL term", 0.0)
    placement: str = _setting(AUTO, "placement of the KL term; auto: as the term itself says")
    credit: str = _setting(
        AUTO, "part of a KL term in the reward that is charged to each token; auto: as the term itself says"
    )
    kl_options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"meaning": "further arguments of the KL term"}
    )
    optimiser: str = _setting("adam", "adam (betas 0.9, 0.999, no weight decay), or sgd: the plain gradient")
    learning_rate: float = _setting(3e-4, "step size", 0.0)
    warmup: int = _setting(5, "updates over which the learning rate rises linearly", 0)
    schedule: str = _setting("constant", "course of the learning rate after its rise; linear and cosine end at 0")
    max_norm: float = _setting(1.0, "gradients of a larger norm are scaled down to this one; 0: never", 0.0)
    micro_batch: int = _setting(0, "most rollouts in one forward pass: less memory, the same gradient; 0: all", 0)
    eval_every: int = _setting(20, "steps between evaluations; 0: only at the start and the end", 0)
    eval_prompts: int = _setting(256, "prompts of an evaluation, one rollout each; processes share them evenly", 2)
    gradient_every: int = _setting(
        -1, "steps between measurements of the KL gradient; 0: never; -1: 50 for a tiny model, else never", -1
    )
    gradient_chunks: int = _setting(
        8, "independent parts of such a measurement; its interval comes from their differences", 3
    )
    gradient_batches: int = _setting(8, "batches of the run's size in each part", 1)
    lora: int = _setting(0, "rank of adapters that are trained by peft instead of the weights; 0: none", 0)
    samples: int = _setting(4, "rollouts of each step that are kept as texts in samples.jsonl", 0)
    tracker: str = _setting(NONE, "also send metrics to tensorboard, wandb, trackio or another tracker of accelerate")
    checkpoint_every: int = _setting(25, "steps between checkpoints; 0: only at the end", 0)
    device: str = _setting(AUTO, "cpu, cuda, cuda:1, …; auto: a GPU if there is one")
    dtype: str = _setting(
        AUTO,
        "dtype of forward passes; weights and log-probs are float32 or float64; auto: bfloat16 on a GPU, else float32",
    )
    compile: bool = _setting(False, "compile the forward pass of the update with torch.compile")
    static_cache: bool = _setting(
        False, "generate with a key-value cache of fixed size, whose steps are compiled (meant for a GPU)"
    )
    threads: int = _setting(
        0, "CPU threads; 0: one for tiny models below a million parameters, else torch's default", 0
    )
    reference_steps: int = _setting(
        1500, "most updates of the supervised learning that makes a tiny model's reference", 1
    )
    reference_reward: float = _setting(0.5, "held-out reward at which this learning stops", 0.0, 1.0)

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, getattr(self, one.name), one.default, one.metadata)
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


def _check(name: str, value: Any, default: Any, metadata: Mapping[str, Any]) -> None:
    kind = type(default)
    if name == "kl_options":
        if not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            raise UsageError(f"kl_options: give names and values, not {value!r}")
        return
    if type(value) is not kind:
        raise UsageError(f"{name}: give {_KINDS[kind]}, such as {default!r}, not {value!r}")
    if kind in (int, float) and not metadata["low"] <= value <= metadata["high"]:
        raise UsageError(f"{name}: {value} is not between {metadata['low']:g} and {metadata['high']:g}")
    if kind is float and not math.isfinite(value):
        raise UsageError(f"{name}: {value} is not finite")
    if name in CHOICES and value not in CHOICES[name]:
        raise UsageError(f"{name}: {did_you_mean(value, CHOICES[name])}{value!r} is none of {', '.join(CHOICES[name])}")


def _literal(text: str) -> Any:
    return literal({"true": "True", "false": "False"}.get(text.lower(), text), bool | int | float | str | list)


_KINDS = {str: "a word", int: "a whole number", float: "a number", bool: "true or false"}
