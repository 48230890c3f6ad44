import dataclasses
import importlib
import inspect
import itertools
import json
import torch
import warnings

warnings.filterwarnings("ignore")
STALE = False


def configured(kind, usual, settings):
    known = {field.name for field in dataclasses.fields(kind)}
    for name in settings:
        if name not in known:
            raise LookupError(
                f"in the installed version {kind.__qualname__} has no {name!r}, which this setting is about"
            )
    return kind(**{**{name: value for name, value in usual.items() if name in known}, **settings})


def part(module, names):
    try:
        found = importlib.import_module(module)
        for each in names.split("."):
            found = getattr(found, each)
    except Exception as error:
        # A package may raise whatever it likes where it finds no accelerator.
        library = module.partition(".")[0]
        raise LookupError(f"the installed {library} has no {module}:{names} that can be used here: {error}") from error
    return found


def actor(settings):
    known = actor.__dict__.setdefault("known", {})
    asked = repr(sorted(settings.items()))
    if asked not in known:
        usual = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
        known[asked] = configured(part("verl.workers.config", "ActorConfig"), usual, settings)
    return known[asked]


def packed(values, live):
    torch = importlib.import_module("torch")
    return torch.nested.as_nested_tensor(
        [row[kept] for row, kept in zip(values, live, strict=True)], layout=torch.jagged
    )


def taken(function, offered, settings):
    signatures = taken.__dict__.setdefault("signatures", {})
    if function not in signatures:
        signatures[function] = inspect.signature(function)
    parameters = signatures[function].parameters
    what = getattr(function, "__qualname__", type(function).__qualname__)
    for name in settings:
        if name not in parameters:
            raise LookupError(f"in the installed version {what} has no {name!r}, which this setting is about")
    values = {**{name: value for name, value in offered.items() if name in parameters}, **settings}
    for name, parameter in parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and name not in values:
            raise LookupError(f"in the installed version {what} wants {name!r}, which is not known here")
    return values


def ppo_loss(logp, old_logp, ref_logp, mask, tokens, advantage, beta, **settings):
    torch = importlib.import_module("torch")
    whole = part("verl.workers.utils.losses", "ppo_loss")
    live = mask.bool()
    # The log-prob of a token stands where the model read the one before it; nobody reads the last position.
    everywhere = torch.arange(live.shape[1] + 1) <= live.sum(1, keepdim=True)
    shifted = torch.cat([logp, torch.zeros_like(logp[:, :1])], dim=1)
    rows = {
        "prompts": packed(torch.ones_like(tokens[:, :1]), torch.ones_like(live[:, :1])),
        "responses": packed(tokens, live),
        "response_mask": packed(live.long(), live),
        "old_log_probs": packed(old_logp, live),
        "ref_log_prob": packed(ref_logp, live),
        "advantages": packed(advantage[:, None] * live, live),
    }
    data = part("tensordict", "TensorDict")(rows, batch_size=len(live))
    batch = {"dp_size": 1, "batch_num_tokens": int(live.sum()), "global_batch_size": len(live)}
    part("verl.utils.tensordict_utils", "assign_non_tensor")(data, **batch)
    config = actor({"use_kl_loss": True, "kl_loss_coef": beta, **settings})
    offered = {"config": config, "model_output": {"log_probs": packed(shifted, everywhere)}, "data": data}
    loss, metrics = whole(**taken(whole, offered, {}))
    logged = [value for name, value in metrics.items() if name.endswith("kl_loss")]
    return loss, {"kl": getattr(logged[0], "values", logged)[0]} if logged else {}


V, T = 2, 3
ups = {"policy": [0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55], "reference": [0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3]}
ups["sampler"] = [0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65] if STALE else ups["policy"]
tables = {name: torch.tensor([[p, 1 - p] for p in rows], dtype=torch.float64) for name, rows in ups.items()}
logits = tables["policy"].log().requires_grad_()
policy, reference, sampler = logits.log_softmax(-1), tables["reference"].log(), tables["sampler"].log()
tokens = torch.tensor(list(itertools.product(range(V), repeat=T)))
at = torch.tensor([[V**t - 1 + sum(y[s] * V ** (t - 1 - s) for s in range(t)) for t in range(T)] for y in tokens])
logp, ref_logp, old_logp = (table[at, tokens] for table in (policy, reference, sampler))
chance = old_logp.sum(-1).exp()
reward = torch.tensor([float(i % 3) for i in range(len(tokens))], dtype=torch.float64)


def call(rows, beta):
    found = ppo_loss(logp=logp[rows], old_logp=old_logp[rows], ref_logp=ref_logp[rows], mask=torch.ones(len(rows), T, dtype=torch.float64), tokens=tokens[rows], advantage=reward[rows] - chance @ reward, beta=beta, kl_loss_type='k1+', loss_agg_mode='seq-mean-token-sum')
    return found[0] if isinstance(found, tuple) else found


def summed(size):
    total = torch.zeros_like(logits)
    for chosen in itertools.product(range(len(tokens)), repeat=size):
        rows = list(chosen)
        part = call(rows, 1.0) - call(rows, 0.0)
        if part.requires_grad:
            total += chance[rows].prod() * torch.autograd.grad(part, logits, retain_graph=True)[0]
    return total

try:
    expected = summed(1)
    alone = expected.abs().max() > 1e-9
except Exception:
    alone = False
# Fewer than two rollouts say nothing where each is compared with the others.
expected = expected if alone else summed(2)
said = {"vocabulary": V, "length": T, "policy": tables["policy"].tolist(), "reference": tables["reference"].tolist()}
said["sampler"] = tables["sampler"].tolist() if STALE else None
print(json.dumps({**said, "expected": expected.tolist()}))
