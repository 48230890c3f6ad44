import importlib
import inspect
import itertools
import json
import torch
import warnings

warnings.filterwarnings("ignore")
STALE = False
LOSSES = 'torchrl.objectives.llm.grpo'


def actor(logp, mask):
    import torch
    class Given:
        def __init__(self):
            self.mask = mask.bool()
        def log_prob(self, value):
            return logp
        def entropy(self):
            return torch.zeros_like(logp)
    class Actor(torch.nn.Module):
        in_keys = ()
        def get_dist(self, tensordict, **names):
            return Given()
    return Actor()


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


def grpo(logp, old_logp, ref_logp, mask, tokens, advantage, beta, loss="GRPOLoss", recipe=False, **settings):
    kind = SequenceKLGRPOLoss if recipe else part(LOSSES, loss)
    offered = {"actor_network": actor(logp, mask), "kl_to_ref_coeff": beta or None}
    whole = kind(**taken(part(LOSSES, "GRPOLoss"), offered, settings))
    fields = {
        ("tokens", "full"): tokens,
        ("log_probs", "full"): old_logp,
        ("next", "ref_log_probs", "full"): ref_logp,
        "advantage": advantage[:, None, None].expand(*tokens.shape, 1),
    }
    found = whole(part("tensordict", "TensorDict")(fields, batch_size=[len(tokens)]))
    terms = [found.get(name) for name in dir(type(found)) if name.startswith("loss_")]
    total = sum(term.squeeze(-1).sum() if term.dim() > 1 else term.sum() for term in terms if term is not None)
    logged = found.get("kl_to_ref")
    return total, {} if logged is None else {"kl": logged}


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
    found = grpo(logp=logp[rows], old_logp=old_logp[rows], ref_logp=ref_logp[rows], mask=torch.ones(len(rows), T, dtype=torch.float64), tokens=tokens[rows], advantage=reward[rows] - chance @ reward, beta=beta, loss='GRPOLoss', masking_strategy='rlhf')
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
