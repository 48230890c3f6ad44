"""A program with a library and torch alone that shows the gradient of a setting which a function here calls.

It holds the lines of that function, a world of three tokens of two actions, and the sum over all rollouts; where a
batch of one rollout says nothing, over all pairs of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from kltest.adapters.adapter import Setting

# Parameters are filled with these; `rows` are the rollouts of a batch.
FIELDS = {
    "logp": "logp[rows]",
    "old_logp": "old_logp[rows]",
    "ref_logp": "ref_logp[rows]",
    "logits": "policy[at[rows]]",
    "old_logits": "sampler[at[rows]]",
    "ref_logits": "reference[at[rows]]",
    "tokens": "tokens[rows]",
    "mask": "torch.ones(len(rows), T, dtype=torch.float64)",
    "reward": "reward[rows]",
    "advantage": "reward[rows] - chance @ reward",
    "group": "torch.zeros(len(rows), dtype=torch.int64)",
    "beta": "beta",
}
TABLES = """
V, T = 2, 3
ups = {"policy": [0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55], "reference": [0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3]}
ups["sampler"] = [0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65] if STALE else ups["policy"]
"""
WORLD = """
tables = {name: torch.tensor([[p, 1 - p] for p in rows], dtype=torch.float64) for name, rows in ups.items()}
logits = tables["policy"].log().requires_grad_()
policy, reference, sampler = logits.log_softmax(-1), tables["reference"].log(), tables["sampler"].log()
tokens = torch.tensor(list(itertools.product(range(V), repeat=T)))
at = torch.tensor([[V**t - 1 + sum(y[s] * V ** (t - 1 - s) for s in range(t)) for t in range(T)] for y in tokens])
logp, ref_logp, old_logp = (table[at, tokens] for table in (policy, reference, sampler))
chance = old_logp.sum(-1).exp()
reward = torch.tensor([float(i % 3) for i in range(len(tokens))], dtype=torch.float64)
"""
SUMMED = """
def summed(size):
    total = torch.zeros_like(logits)
    for chosen in itertools.product(range(len(tokens)), repeat=size):
        rows = list(chosen)
        part = call(rows, 1.0)DIFFERENCE
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
"""
SAID = """
said = {"vocabulary": V, "length": T, "policy": tables["policy"].tolist(), "reference": tables["reference"].tolist()}
said["sampler"] = tables["sampler"].tolist() if STALE else None
print(json.dumps({**said, "expected": expected.tolist()}))
"""
RECIPE = re.compile(r'part\("kltest\.adapters\.(\w+)\.recipes", "(\w+)"\)')


@dataclass(frozen=True)
class Parts:
    """What a program takes over: imports, definitions, and the call of the function with its arguments."""

    imports: tuple[str, ...]
    definitions: str
    call: str
    differs: bool

    def head(self, *imports: str, stale: bool) -> str:
        lines = sorted({*self.imports, "import itertools", "import json", "import warnings", *imports})
        # Before whatever is imported says something.
        quiet = [line for line in lines if line == "import warnings"]
        silenced = ["", 'warnings.filterwarnings("ignore")', f"STALE = {stale}"]
        return "\n".join([*(line for line in lines if line not in quiet), *quiet, *silenced])


def parts_of(setting: Setting, fields: Mapping[str, str]) -> Parts:
    """The function that a setting calls, and what its parameters are filled with; a recipe's file with it."""
    from kltest.counterexample.sources import source_of

    module, _, name = setting.target.partition(":")
    function = getattr(import_module(module), name)
    parameters = inspect.signature(function).parameters
    given = {name: fields[name] for name in parameters if name in fields}
    given.update({name: repr(value) for name, value in setting.arguments.items()})
    lines = [line for line in source_of(function, "", frozenset()).lines if line]
    imports = tuple(line for line in lines if line.startswith(("import ", "from ")))
    own = "\n".join(f"\n\n{line}" if line.startswith("def ") else line for line in lines if line not in imports)
    recipes = sorted({found[1] for found in RECIPE.finditer(own)}) if setting.recipe else []
    folder = Path(__file__).parent
    texts = [(folder / each / "recipes.py").read_text(encoding="utf-8") for each in recipes]
    own = "\n\n".join([*texts, RECIPE.sub(r"\2", own)])
    call = f"{name}({', '.join(f'{name}={value}' for name, value in given.items())})"
    return Parts(imports, own, call, "beta" in given)


def reproduction(setting: Setting) -> str:
    """The program: for a recipe with rollouts of another policy, else with those of the policy itself.

    Empty for a function of the library's own, whose program the grader writes.
    """
    if not setting.target.startswith("kltest."):
        return ""
    parts = parts_of(setting, FIELDS)
    loss = "found[0] if isinstance(found, tuple) else found"
    if setting.options.get("placement") == "reward":
        # What is found is a cost of each token, and the whole sequence answers for it.
        loss = "(found.detach().sum(-1) * logp[rows].sum(-1)).sum()"
    call = f"""
def call(rows, beta):
    found = {parts.call}
    return {loss}
"""
    head = parts.head("import torch", stale=setting.recipe)
    summed = SUMMED.replace("DIFFERENCE", " - call(rows, 0.0)" if parts.differs else "")
    return f"{head}\n{parts.definitions}\n\n{TABLES.rstrip()}{WORLD}\n{call}\n{summed.rstrip()}{SAID}"
