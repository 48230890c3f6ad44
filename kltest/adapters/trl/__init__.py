"""TRL: `GRPOTrainer` and `RLOOTrainer`, whole trainers, with a table as the language model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kltest.adapters.adapter import Adapter, Setting

CALLS = "kltest.adapters.trl.calls"
DOCS = "https://huggingface.co/docs/trl/grpo_trainer"
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
"""Of TRL 1.16, its default first."""
BETA = (
    "The documented default of beta is 0, which leaves the term out: what is graded is what beta multiplies "
    "once it is not 0."
)
ADDS_UP = {"loss_type": "luspo"}
"""A sum over tokens and a mean over rollouts: no length changes the term."""

GROUPS = {"group_size": 3}
"""Whole groups are called one by one; there are a third as many of three as of four."""

NOT_CHECKED = ("KL502",)
"""The padding cannot be NaN: a trainer computes what stands there with the model itself."""
CHECKED_ONCE = ("KL701", "KL703")
"""Checked with one loss type only: they take a vocabulary of thousands, and all loss types share that code."""


def grpo(settings: dict[str, Any], name: str = "", **others: Any) -> Setting:
    """A setting of the loss of GRPOTrainer on given rollouts."""
    others = {"note": BETA, "source": DOCS, **others}
    return whole(f"grpo/{name or _listed(settings)}", "grpo", settings, **others)


def rloo(settings: dict[str, Any], name: str = "", **others: Any) -> Setting:
    """A setting of RLOOTrainer, which has the KL in its reward and scores and centres whole groups itself."""
    others = {"source": "https://huggingface.co/docs/trl/rloo_trainer", **others}
    others["options"] = {**GROUPS, **others.get("options", {})}
    return whole(f"rloo/{name or _listed(settings)}", "grouped", {"trainer": "RLOO", **settings}, **others)


def whole(name: str, call: str, settings: dict[str, Any], **others: Any) -> Setting:
    """A setting of a whole trainer, with the checks that it skips."""
    checked = settings == {"loss_type": "grpo"}
    ignored = NOT_CHECKED if checked else (*NOT_CHECKED, *CHECKED_ONCE)
    options = {"ignore": ignored, "timeout": 900, **others.pop("options", {})}
    return Setting(name, f"{CALLS}:{call}", settings, options, depth="trainer", **others)


def _settings() -> Iterator[Setting]:
    yield grpo({}, "defaults", default=True)
    yield rloo({}, "defaults", default=True)
    for loss_type in LOSS_TYPES:
        yield grpo({"loss_type": loss_type})
    by_sequence = {"importance_sampling_level": "sequence"}
    for corrected in (False, True):
        with_or_without = {"use_bias_correction_kl": corrected}
        yield grpo(with_or_without)
        for settings in ({**ADDS_UP, **with_or_without}, {**ADDS_UP, **with_or_without, **by_sequence}):
            yield grpo(settings)
            yield grpo({**settings, "num_iterations": 2}, note=f"{BETA} Completions are used twice: they are stale.")
    yield grpo({**ADDS_UP, "steps_per_generation": 2}, note=f"{BETA} Completions serve two steps: they are stale.")
    yield grpo({**ADDS_UP, "temperature": 0.7})
    yield grpo(
        {**ADDS_UP, "temperature": 0.7, "generation_kwargs": {"temperature": 1.0}},
        f"{_listed(ADDS_UP)},temperature=0.7,generation_kwargs.temperature=1",
        options={"sampler": "current"},
        note=f"{BETA} generation_kwargs overrule the temperature of generation, not that of the loss.",
    )
    yield grpo({**ADDS_UP, "evaluation": True}, note="Evaluation mode, of which only the logged value matters.")
    for scaled in ("group", "batch", "none"):
        yield whole(
            f"grpo/groups,{_listed(ADDS_UP)},scale_rewards={scaled}",
            "grouped",
            {"trainer": "GRPO", **ADDS_UP, "scale_rewards": scaled},
            options={**GROUPS, "sampler": "current"},
            source=DOCS,
            note=f"{BETA} Rewards and advantages are the trainer's own, in groups that tie and in groups that do not.",
        )
    yield from _from_logprobs()
    yield rloo({"normalize_advantages": True})
    yield rloo({"num_iterations": 2}, note="Completions are used twice, so that they are stale.")
    yield rloo(
        {"epsilon": 1000.0},
        # Groups of two come in environments that are large enough to tell two names apart.
        options={"group_size": 2},
        note="The clip of the policy loss is put out of reach.",
    )
    yield rloo({"evaluation": True}, note="Evaluation mode, of which only the logged value matters.")
    yield from _recipes()


def _from_logprobs() -> Iterator[Setting]:
    """The same losses from log-probs in float64, which give coefficients to ten digits."""
    for corrected in (False, True):
        settings = {**ADDS_UP, "use_bias_correction_kl": corrected, "num_iterations": 2}
        yield Setting(
            f"grpo_from_logprobs/{_listed(settings)}",
            f"{CALLS}:grpo_from_logprobs",
            settings,
            depth="loss",
            source=DOCS,
            note=f"{BETA} Its forward pass is replaced by log-probs.",
        )


def _recipes() -> Iterator[Setting]:
    noisy = "The variance grows with the length of completions, and off-policy with the distance from the sampler."
    yield grpo(
        {"recipe": "SequenceKLGRPOTrainer", "num_iterations": 2},
        "recipe=sequence_kl",
        recipe=True,
        note=f"A subclass of 30 lines, kltest/adapters/trl/recipes.py. {noisy}",
    )
    yield rloo(
        {},
        "recipe=defaults,on-policy",
        recipe=True,
        options={"sampler": "current"},
        note="Nothing to be changed while completions are fresh: one update a batch of completions. " + noisy,
    )
    yield rloo(
        {"recipe": "SequenceKLRLOOTrainer"},
        "recipe=sequence_kl",
        recipe=True,
        note=f"A subclass of 30 lines, kltest/adapters/trl/recipes.py, for stale completions too. {noisy}",
    )


def _listed(settings: dict[str, Any]) -> str:
    return ",".join(f"{key}={_written(value)}" for key, value in settings.items())


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def standalone(setting: Setting) -> str:
    """A program with TRL, transformers and torch alone; completions are stale if that gradient has a name."""
    own = dict(setting.arguments)
    kind, recipe, evaluation = own.pop("trainer", "GRPO"), own.pop("recipe", None), own.pop("evaluation", False)
    by_token = own.get("importance_sampling_level", "token") == "token"
    corrected = own.get("use_bias_correction_kl") is True and by_token and "num_iterations" in own
    stale = bool(recipe) or corrected
    parts = ["../tabular.py", *(["recipes.py"] if recipe else []), "program.py"]
    texts = [(Path(__file__).parent / part).read_text(encoding="utf-8") for part in parts]
    dropped = ("from __future__", "from kltest")
    lines = [line for text in texts for line in text.splitlines() if not line.startswith(dropped)]
    grouped = "trainer" in setting.arguments
    call = f"show({kind!r}, {own!r}, {recipe}, stale={stale}, evaluation={evaluation}, grouped={grouped})"
    return "\n".join(["from __future__ import annotations", *lines, "", "", call, ""])


ADAPTER = Adapter(
    name="trl",
    distribution="trl",
    version="1.16.0",
    installs=(("trl=={version}",),),
    module="trl",
    imports=("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "datasets", "tokenizers"),
    homepage="https://github.com/huggingface/trl",
    settings=tuple(_settings()),
    standalone=standalone,
)
