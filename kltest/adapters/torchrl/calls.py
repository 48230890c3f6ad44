"""torchrl's whole GRPO losses, and its KL in the reward."""

import importlib

from kltest.adapters.installed import called, part, taken

LOSSES = "torchrl.objectives.llm.grpo"
TRANSFORMS = "torchrl.envs.llm.transforms.kl"


def actor(logp, mask):
    """An actor whose distribution has these log-probs of the sampled tokens, and entropy zero."""
    import torch

    class Fixed:
        def __init__(self):
            self.mask = mask.bool()

        def log_prob(self, value):
            return logp

        def entropy(self):
            return torch.zeros_like(logp)

    class Actor(torch.nn.Module):
        in_keys = ()

        def get_dist(self, tensordict, **names):
            return Fixed()

    return Actor()


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
