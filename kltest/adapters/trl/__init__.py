"""TRL: `GRPOTrainer` and `RLOOTrainer`, whole trainers, with a table as the language model."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kltest.adapters import Adapter, Setting, label
from kltest.adapters.standalone import program

CALLS = "kltest.adapters.trl.calls"
DOCS = "https://huggingface.co/docs/trl/grpo_trainer"
DOCS_OF_RLOO = "https://huggingface.co/docs/trl/rloo_trainer"
# Of TRL 1.16, its default first, and the releases that brought what an earlier one lacks.
LOSS_TYPES = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
SINCE = {
    **{"dapo": "0.22", "cispo": "0.26", "sapo": "0.26", "luspo": "0.28", "vespo": "1.0"},
    **{"use_bias_correction_kl": "0.26", "importance_sampling_level": "0.20"},
    **dict.fromkeys(("RLOO", "SequenceKLGRPOTrainer"), "0.22"),
}
# Registered policy losses with the advantages of these.
ASCENDS = {**dict.fromkeys(("dapo", "bnpo"), "dapo"), **dict.fromkeys(("grpo", "dr_grpo", "luspo", "sapo"), "grpo")}
ASCENDS |= {"cispo": "cispo", "vespo": "", "group": "grpo", "batch": "grpo", "none": "dr-grpo"}
BETA = (
    "The documented default of beta is 0, which leaves the term out: what is graded is what beta multiplies "
    "once it is not 0."
)
# A sum over tokens and a mean over rollouts: no length changes the term.
ADDS_UP: dict[str, Any] = {"loss_type": "luspo"}

# The padding cannot be NaN (KL502): a trainer computes what stands there with the model itself. KL701 and KL703 are
# checked with one loss type only: they take a vocabulary of thousands, and all loss types share that code.
OPTIONS = {"ignore": ("KL502", "KL701", "KL703"), "timeout": 900}
WIDE = {"ignore": ("KL502",)}
# Whole groups are called one by one; there are a third as many of three as of four.
GROUPS = {**OPTIONS, "group_size": 3}
ON_POLICY, BOTH = {"sampler": "current"}, {"sampler": "both"}
STALE = "Completions serve two steps: they are stale."
NOISY = "The variance grows with the length of completions, and off-policy with the distance from the sampler."
EVALUATED = "Evaluation mode, of which only the logged value matters."
SCORED = f"{BETA} Rewards and advantages are the trainer's own, in groups that tie and in groups that do not."

# The loss of GRPOTrainer on given rollouts.
GRPO = Setting.of(
    f"{CALLS}:grpo",
    options=OPTIONS,
    depth="trainer",
    source=DOCS,
    note=BETA,
    brought=SINCE,
    policy=(f"{CALLS}:grouped", {"trainer": "GRPO"}),
)
# The same from log-probs in float64, which give coefficients to ten digits.
LOGPROBS = Setting.of(
    f"{CALLS}:grpo_from_logprobs",
    options=BOTH,
    depth="loss",
    source=DOCS,
    note=f"{BETA} Its forward pass is replaced by log-probs.",
    brought=SINCE,
)
# From a teacher, which is the reference.
TEACHER = "The reference is the teacher, and rollouts are the policy's own, at the temperature of the loss."
JSD = {"distillation_objective": "jsd"}
DOCUMENTED = {"iw_opd": "iw_opd_trainer"}
FEW = f"{TEACHER} A support has two tokens of four, where its default is 100 of a model's."


# RLOOTrainer has the KL in its reward, and scores and centres whole groups itself.
RLOO = Setting.of(
    f"{CALLS}:grouped",
    {"trainer": "RLOO"},
    name="rloo",
    options=GROUPS,
    depth="trainer",
    source=DOCS_OF_RLOO,
    since=SINCE["RLOO"],
    policy=(f"{CALLS}:grouped", {"trainer": "RLOO"}),
)


def of(base: Setting, more: str = "", options: Mapping[str, Any] = MappingProxyType({}), **settings: Any) -> Setting:
    """A setting that is named by its arguments, as JSON writes them, with a further sentence."""
    return base.variant(settings, label(**settings).lower(), options=options, note=f"{base.note} {more}".strip())


def distils(trainer: str, *others: Mapping[str, Any], since: str, **default: Any) -> tuple[Setting, ...]:
    """A trainer that distils, with nothing set but the size of a support, and with others' arguments."""
    base = Setting.of(
        "kltest.adapters.trl.distillation:distilled",
        {"trainer": trainer},
        name=trainer,
        options=OPTIONS,
        depth="trainer",
        source=f"https://huggingface.co/docs/trl/{DOCUMENTED.get(trainer, trainer)}_trainer",
        note=FEW if default else TEACHER,
        since=since,
    )

    def of_mixture(one: Mapping[str, Any]) -> Setting:
        words = {
            ("alpha" if trainer.startswith("sd") else "beta") if name == "mixture" else name: one[name] for name in one
        }
        words = {name: f"{value:g}" if isinstance(value, float) else value for name, value in words.items()}
        return base.variant({**default, **one}, label(**words), note=FEW if "topk" in {**default, **one} else TEACHER)

    return (base.by_default("the loss itself", default, name="defaults"), *map(of_mixture, others))


def corrected(use_bias_correction_kl: bool) -> tuple[Setting, ...]:
    """The loss alone, and by token and by sequence, each on fresh and on stale completions."""
    switch: dict[str, Any] = {"use_bias_correction_kl": use_bias_correction_kl}
    by_token, by_sequence = {**ADDS_UP, **switch}, {**ADDS_UP, **switch, "importance_sampling_level": "sequence"}
    why = "Completions are used twice: they are stale."
    both = [(of(GRPO, **each), of(GRPO, why, BOTH, **each, num_iterations=2)) for each in (by_token, by_sequence)]
    return (of(GRPO, **switch), *both[0], *both[1])


def standalone(setting: Setting, **others: Any) -> str:
    """A program with TRL, transformers and torch alone; completions are stale if that gradient has a name."""
    own = setting.arguments
    if "trainer" in own and setting.target.endswith(":distilled"):
        modules = ["installed.py", "tabular.py", "trainers.py", "trl/distillation.py"]
        return program(setting, modules=modules, **others)
    by_token = own.get("importance_sampling_level", "token") == "token"
    weighted = own.get("use_bias_correction_kl") is True and by_token and "num_iterations" in own
    recipes = ["trl/recipes.py"] if "recipe" in own else []
    modules = ["tabular.py", *recipes, "trl/trainers.py", "trl/calls.py"]
    return program(setting, modules=modules, stale="recipe" in own or weighted, **others)


ADAPTER = Adapter(
    name="trl",
    distribution="trl",
    version="1.16.0",
    installs=(("trl=={version}",),),
    module="trl",
    since="0.18",
    changed={
        "1.10": (
            "GRPOConfig: use_bias_correction_kl is on by default",
            "https://github.com/huggingface/trl/pull/6503",
        ),
        "1.9": (
            "DistillationTrainer compares all tokens, where it took the sampled one and a tail",
            "https://github.com/huggingface/trl/pull/6455",
        ),
    },
    # Normalisers differ once a generation serves several steps.
    history=(
        *(of(GRPO, loss_type=name) for name in ("dapo", "bnpo", "grpo", "dr_grpo")),
        *(of(GRPO, STALE, BOTH, loss_type=name, steps_per_generation=2) for name in ("dapo", "bnpo")),
        of(GRPO, loss_type="dr_grpo", temperature=0.7),
    ),
    imports=("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "datasets", "tokenizers"),
    homepage="https://github.com/huggingface/trl",
    settings=(
        GRPO.by_default("trl:GRPOConfig.beta", ascends="dapo"),
        RLOO.by_default("trl:RLOOConfig.beta", ascends="reinforce-leave-one-out"),
        *distils("distillation", {"mixture": 0.0}, {"mixture": 0.5}, since="1.1"),
        *distils("gkd", {"mixture": 0.0}, {"mixture": 1.0}, since="1.16"),
        *distils("gold", since="1.16"),
        *distils("server_distillation", {"mixture": 0.0, "topk": 2}, since="1.10"),
        *distils(
            "iw_opd",
            {**JSD, "mixture": 1.0, "topk": 2},
            {**JSD, "mixture": 1.0, "topk": 2, "loss_add_tail": False},
            since="1.9",
        ),
        *distils("sdft", {"mixture": 1.0}, {"mixture": 1.0, "distillation_add_tail": True}, since="1.10", topk=2),
        *distils("sdpo", since="1.10"),
        # One of them is checked with a vocabulary of thousands as well.
        *(
            replace(of(GRPO, options=WIDE if name == "grpo" else {}, loss_type=name), ascends=ASCENDS[name])
            for name in LOSS_TYPES
        ),
        *corrected(False),
        *corrected(True),
        of(GRPO, STALE, BOTH, **ADDS_UP, steps_per_generation=2),
        of(GRPO, **ADDS_UP, temperature=0.7),
        GRPO.variant(
            {**ADDS_UP, "temperature": 0.7, "generation_kwargs": {"temperature": 1.0}},
            "loss_type=luspo,temperature=0.7,generation_kwargs.temperature=1",
            options=ON_POLICY,
            note=f"{BETA} generation_kwargs overrule the temperature of generation, not that of the loss.",
        ),
        replace(of(GRPO, **ADDS_UP, evaluation=True), note=EVALUATED),
        *(
            GRPO.variant(
                {"trainer": "GRPO", **ADDS_UP, "scale_rewards": scaled},
                f"groups,loss_type=luspo,scale_rewards={scaled}",
                target=RLOO.target,
                options={**GROUPS, **ON_POLICY},
                note=SCORED,
                ascends=ASCENDS[scaled],
            )
            for scaled in ("group", "batch", "none")
        ),
        *(of(LOGPROBS, **ADDS_UP, use_bias_correction_kl=each, num_iterations=2) for each in (False, True)),
        of(RLOO, normalize_advantages=True),
        of(RLOO, "Completions are used twice, so that they are stale.", num_iterations=2),
        RLOO.variant(
            {"epsilon": 1000.0},
            "epsilon=1000",
            # Groups of two come in environments that are large enough to tell two names apart.
            options={"group_size": 2},
            note="The clip of the policy loss is put out of reach.",
        ),
        of(RLOO, EVALUATED, evaluation=True),
        GRPO.variant(
            {"recipe": "SequenceKLGRPOTrainer", "num_iterations": 2},
            "recipe=sequence_kl",
            recipe=True,
            note=f"A subclass of 30 lines, kltest/adapters/trl/recipes.py. {NOISY}",
        ),
        RLOO.variant(
            name="recipe=defaults,on-policy",
            recipe=True,
            options=ON_POLICY,
            note=f"Nothing to be changed while completions are fresh: one update a batch of completions. {NOISY}",
        ),
        RLOO.variant(
            {"recipe": "SequenceKLRLOOTrainer"},
            "recipe=sequence_kl",
            recipe=True,
            note=f"A subclass of 30 lines, kltest/adapters/trl/recipes.py, for stale completions too. {NOISY}",
        ),
    ),
    standalone=standalone,
)
