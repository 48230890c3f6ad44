"""torchrl: the whole `GRPOLoss` and its variants, and the transform that puts the KL into the reward."""

from importlib import import_module
from inspect import isclass

from kltest.adapters import PAIRS, Adapter, Setting, label
from kltest.adapters.standalone import program

LOSSES = "torchrl.objectives.llm.grpo"
CALLS = "kltest.adapters.torchrl.calls"
DOCUMENTED = "https://docs.pytorch.org/rl/main/reference/generated/torchrl.objectives.llm.GRPOLoss.html"
TRANSFORMED = "https://docs.pytorch.org/rl/main/reference/generated/torchrl.envs.llm.transforms.KLComputation.html"
ACTOR = (
    "An actor that gives the log-probs of the sampled tokens; the KL term is averaged over all positions, padding too."
)
SAMPLED = (
    "The transform alone, with the policy gradient of the whole return: what makes an advantage of it is not called."
)
# What came later than the rest. Up to 0.14.0, DAPO's constructor has the parameters of one of its methods.
LATER = {"aggregation": "0.11", "kl_mask_threshold": "0.11", "CISPOLoss": "0.11", "DAPO": "0.14.1"}
KNOWN = ("GRPOLoss", "DAPO", "CISPOLoss")


LOSS = Setting(
    "loss", f"{CALLS}:grpo", options={"sampler": "both", **PAIRS}, depth="loss", source=DOCUMENTED, note=ACTOR
)


def whole(loss: str = "GRPOLoss", **settings: object) -> Setting:
    """A whole loss, with `kl_to_ref_coeff`."""
    name = label(loss, **settings)
    return LOSS.variant(
        {"loss": loss, **settings},
        name,
        default=name == "GRPOLoss",
        coefficient=f"{LOSSES}:GRPOLoss(kl_to_ref_coeff)" if name == "GRPOLoss" else "",
        since=next((LATER[each] for each in (loss, *settings) if each in LATER), ""),
    )


def discover() -> list[Setting]:
    """Losses that the installed version has beside those above."""
    module = import_module(LOSSES)
    kinds = [name for name, thing in vars(module).items() if isclass(thing) and issubclass(thing, module.GRPOLoss)]
    return [whole(name) for name in kinds if name not in KNOWN]


ADAPTER = Adapter(
    name="torchrl",
    distribution="torchrl",
    version="0.14.1",
    installs=(
        ("--no-deps", "torchrl=={version}", "tensordict", "cloudpickle", "packaging", "orjson", "pyvers"),
        ("--no-deps", "importlib_metadata", "zipp"),
    ),
    module=LOSSES,
    since="0.9",
    imports=(LOSSES,),
    homepage="https://github.com/pytorch/rl",
    settings=(
        whole(),
        *map(whole, KNOWN[1:]),
        whole(aggregation="prompt_mean"),
        whole(aggregation="none"),
        whole(kl_mask_threshold=0.1),
        whole(masking_strategy="rlhf"),
        whole(masking_strategy="generic"),
        whole(entropy_bonus=False),
        Setting(
            "kl_in_reward/KLComputation",
            f"{CALLS}:kl_computation",
            options={"placement": "reward", "sampler": "current"},
            source=TRANSFORMED,
            note=SAMPLED,
        ),
        LOSS.variant(
            {"recipe": True, "entropy_bonus": False},
            "SequenceKLGRPOLoss",
            recipe=True,
            note="A subclass; it costs the variance of k1 over sequences, and off-policy that of the sequence ratio.",
        ),
    ),
    discover=discover,
    standalone=program,
)
