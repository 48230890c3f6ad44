"""The expected gradient of fused/loss_type=dapo with respect to the logits, summed over all rollouts."""

import importlib
import inspect
import itertools
import json
import torch
import warnings

warnings.filterwarnings("ignore")
STALE = False  # rollouts of another policy
MODULE = 'liger_kernel.chunked_loss.grpo_loss'


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


def called(function, offered, settings=()):
    return function(**taken(function, offered, dict(settings)))


def part(module, names):
    try:
        found = importlib.import_module(module)
        for each in names.split("."):
            found = getattr(found, each)
    except Exception as error:
        # A package may raise any exception if it finds no accelerator.
        library = module.partition(".")[0]
        raise LookupError(f"the installed {library} has no {module}:{names} that can be used here: {error}") from error
    return found


def fused(logits, old_logp, ref_logits, tokens, mask, advantage, beta, **settings):
    torch = importlib.import_module("torch")
    usual = {"beta": beta, "compiled": False, "use_ref_model": True, "chunk_size": len(tokens)}
    loss = called(part(MODULE, "LigerFusedLinearGRPOLoss"), usual, settings)
    weight = torch.eye(logits.shape[-1], dtype=logits.dtype)
    offered = {
        "_input": logits,
        "lin_weight": weight,
        "selected_token_ids": tokens,
        "attention_mask": mask,
        "advantages": advantage,
        "ref_input": ref_logits,
        "ref_weight": weight,
        "old_per_token_logps": old_logp,
    }
    value, metrics = called(loss.forward, offered)
    return value, {"kl": metrics[0]} if beta else {}


V, T = 2, 3
# The probability of token 0 in each of the 7 contexts, breadth first.
first = {"policy": [0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55], "reference": [0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3]}
first["sampler"] = [0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65] if STALE else first["policy"]
tables = {name: torch.tensor([[p, 1 - p] for p in rows], dtype=torch.float64) for name, rows in first.items()}
logits = tables["policy"].log().requires_grad_()
policy, reference, sampler = logits.log_softmax(-1), tables["reference"].log(), tables["sampler"].log()
tokens = torch.tensor(list(itertools.product(range(V), repeat=T)))
at = torch.tensor([[V**t - 1 + sum(y[s] * V ** (t - 1 - s) for s in range(t)) for t in range(T)] for y in tokens])
logp, ref_logp, old_logp = (table[at, tokens] for table in (policy, reference, sampler))
probability = old_logp.sum(-1).exp()
reward = torch.tensor([float(i % 3) for i in range(len(tokens))], dtype=torch.float64)


def loss(rows, beta):
    value = fused(logits=policy[at[rows]], old_logp=old_logp[rows], ref_logits=reference[at[rows]], tokens=tokens[rows], mask=torch.ones(len(rows), T, dtype=torch.float64), advantage=reward[rows] - probability @ reward, beta=beta, loss_type='dapo')
    value = value[0] if isinstance(value, tuple) else value
    return value.sum()


def summed(size):
    """The gradient summed over all batches of `size` rollouts with their probabilities."""
    total = torch.zeros_like(logits)
    for chosen in itertools.product(range(len(tokens)), repeat=size):
        rows = list(chosen)
        term = loss(rows, 1.0) - loss(rows, 0.0)
        if term.requires_grad:
            total += probability[rows].prod() * torch.autograd.grad(term, logits, retain_graph=True)[0]
    return total


try:
    expected = summed(1)
    single = expected.abs().max() > 1e-9
except Exception:
    single = False
# A loss that compares the rollouts of a batch needs pairs.
expected = expected if single else summed(2)
answer = {"vocabulary": V, "length": T, "policy": tables["policy"].tolist(), "reference": tables["reference"].tolist()}
answer["sampler"] = tables["sampler"].tolist() if STALE else None
print(json.dumps({**answer, "expected": expected.tolist()}))
