"""torchrl: the whole `GRPOLoss` and its variants, and the transform that puts the KL into the reward."""

import importlib

from kltest.adapters import STEP, Adapter, Setting, label
from kltest.adapters.installed import called, part, taken
from kltest.adapters.standalone import program

LOSSES = "torchrl.objectives.llm.grpo"
DOCUMENTED = "https://docs.pytorch.org/rl/main/reference/generated/torchrl.objectives.llm.GRPOLoss.html"
TRANSFORMED = "https://docs.pytorch.org/rl/main/reference/generated/torchrl.envs.llm.transforms.KLComputation.html"
ACTOR = (
    "An actor that gives the log-probs of the sampled tokens; the KL term is averaged over all positions, padding too."
)
SAMPLED = (
    "The transform alone, with the policy gradient of the whole return: what makes an advantage of it is not called."
)
# Settings that came later than the rest. Up to 0.14.0, DAPO's constructor has the parameters of one of its methods.
LATER = {"aggregation": "0.11", "kl_mask_threshold": "0.11", "CISPOLoss": "0.11", "DAPO": "0.14.1"}
TRANSFORMS = "torchrl.envs.llm.transforms.kl"


def actor(logp, mask):
    """An actor whose distribution has these log-probs of the sampled tokens, and entropy zero."""
    torch = importlib.import_module("torch")

    class Fixed:
        def __init__(self):
            self.mask = mask.bool()

        def log_prob(self, value):
            return logp

        def entropy(self):
            return torch.zeros_like(logp)

    network = torch.nn.Module()
    network.in_keys, network.get_dist = (), lambda tensordict, **names: Fixed()
    return network


def grpo(logp, old_logp, ref_logp, mask, tokens, advantage, beta, loss="GRPOLoss", recipe=False, **settings):
    """The sum of all terms of a GRPO loss, or of the recipe's, with `kl_to_ref_coeff` β; no such term if β = 0."""
    kind = part("kltest.adapters.torchrl.recipes", "SequenceKLGRPOLoss") if recipe else part(LOSSES, loss)
    offered = {"actor_network": actor(logp, mask), "kl_to_ref_coeff": beta or None}
    whole = kind(**taken(part(LOSSES, "GRPOLoss"), offered, settings))
    fields = {
        ("tokens", "full"): tokens,
        ("log_probs", "full"): old_logp,
        ("next", "ref_log_probs", "full"): ref_logp,
        "advantage": advantage[:, None, None].expand(*tokens.shape, 1),
    }
    found = whole(part("tensordict", "TensorDict")(fields, batch_size=[len(tokens)]))
    terms = [found.get(name) for name in type(found).__dataclass_fields__ if name.startswith("loss_")]
    total = sum(term.squeeze(-1).sum() if term.dim() > 1 else term.sum() for term in terms if term is not None)
    logged = found.get("kl_to_ref")
    return total, {} if logged is None else {"kl": logged}


def scored(logp, old_logp, ref_logp, mask, tokens, reward, group, beta, **settings):
    """`MCAdvantage` of each group, whose trajectories have a step with a reward each, and the loss."""
    torch = importlib.import_module("torch")
    rows, order, size = part("tensordict", "TensorDict"), group.argsort(stable=True), len(group) // len(group.unique())
    transform = part(LOSSES, "MCAdvantage")(grpo_size=size, prompt_key="group")
    step = {"reward": reward[order, None, None], "done": torch.ones(len(order), 1, 1, dtype=torch.bool)}
    fields = {"group": group[order, None, None], "row": order[:, None, None], "next": rows(step, [len(order), 1])}
    written = transform.inv(rows(fields, [len(order), 1]))
    advantage = torch.zeros_like(reward).index_put((written["row"].flatten(),), written["advantage"].flatten())
    return grpo(logp, old_logp, ref_logp, mask, tokens, advantage, beta, **settings)[0]


def kl_computation(old_logp, ref_logp, mask, **settings):
    """The cost that `KLComputation` subtracts from the reward of each token, from log-probs at the time of sampling."""
    torch = importlib.import_module("torch")
    transform, rows = part(TRANSFORMS, "KLComputation"), part("tensordict", "TensorDict")
    charge = called(transform, {}, settings)
    after = [
        rows({("log_probs", "full"): new, ("ref_log_probs", "full"): ref, "reward": torch.zeros_like(new)[:, None]})
        for new, ref in zip(of_rows(old_logp, mask), of_rows(ref_logp, mask), strict=True)
    ]
    charged = charge(part("tensordict", "lazy_stack")([rows({"next": row}) for row in after])).get("next")
    costs = [-row.squeeze(-1) for row in charged.get("reward", as_list=True)]
    costs = torch.cat(costs)
    return costs.new_zeros(mask.shape).masked_scatter(mask.bool(), costs)


def of_rows(values, mask):
    """The live tokens of each row: rollouts are stored without padding."""
    return [row[live] for row, live in zip(values, mask.bool(), strict=True)]


LOSS = Setting.of(
    grpo,
    name="loss",
    options=STEP,
    source=DOCUMENTED,
    note=ACTOR,
    brought=LATER,
    policy=(f"{__name__}:scored", {}),
)


def whole(loss: str = "GRPOLoss", ascends: str | None = None, **settings: object) -> Setting:
    """A whole loss, with `kl_to_ref_coeff`."""
    return LOSS.variant({"loss": loss, **settings}, label(loss, **settings), ascends=ascends)


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
        LOSS.by_default(f"{LOSSES}:GRPOLoss(kl_to_ref_coeff)", {"loss": "GRPOLoss"}, name="GRPOLoss", ascends="dapo"),
        whole("DAPO", "dapo"),
        whole("CISPOLoss", "cispo"),
        whole(ascends="grpo", aggregation="prompt_mean"),
        whole(aggregation="none"),
        whole(kl_mask_threshold=0.1),
        whole(masking_strategy="rlhf"),
        whole(masking_strategy="generic"),
        whole(entropy_bonus=False),
        Setting.of(
            kl_computation,
            name="kl_in_reward/KLComputation",
            depth="function",
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
    standalone=program,
)
