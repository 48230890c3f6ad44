import importlib
import inspect
import itertools
import json
import os
import torch
import warnings

warnings.filterwarnings("ignore")
STALE = False


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


def called(offered, settings):
    # Without a GPU importing the package fails otherwise; versions read one or the other when they are imported.
    for name in ("UNSLOTH_ZOO_DISABLE_GPU_INIT", "UNSLOTH_ALLOW_CPU"):
        os.environ.setdefault(name, "1")
    whole = part("unsloth_zoo.rl_replacements", "grpo_compute_loss")
    # It takes its settings out of keyword arguments, by names that stand in its code.
    known = inspect.unwrap(whole).__code__.co_consts
    for name in settings:
        if name not in known:
            raise LookupError(
                f"in the installed version grpo_compute_loss has no {name!r}, which this setting is about"
            )
    offered = {**offered, "sampling_per_token_logps": None}
    arguments = {}
    for parameter in inspect.signature(whole).parameters.values():
        if parameter.name in offered:
            arguments[parameter.name] = offered[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            raise LookupError(
                f"in the installed version grpo_compute_loss wants {parameter.name!r}, which is not known here"
            )
    return whole(**arguments, num_items_in_batch=offered["mask"].sum(), **settings)


def grpo(logp, old_logp, ref_logp, mask, tokens, advantage, beta, with_old=True, **settings):
    offered = {"ref": ref_logp, "new": logp, "old": old_logp if with_old else None, "beta": beta}
    loss, _, kl, *_ = called({**offered, "input_ids": tokens, "mask": mask, "advantages": advantage}, settings)
    return loss, {"kl": kl}


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
    found = grpo(logp=logp[rows], old_logp=old_logp[rows], ref_logp=ref_logp[rows], mask=torch.ones(len(rows), T, dtype=torch.float64), tokens=tokens[rows], advantage=reward[rows] - chance @ reward, beta=beta, loss_type='luspo')
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
