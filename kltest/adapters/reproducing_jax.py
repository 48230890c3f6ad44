"""The program that `reproducing` writes, for a library of JAX: its function, a small world, the sum over rollouts."""

from __future__ import annotations

from kltest.adapters.adapter import Setting
from kltest.adapters.reproducing import SAID, TABLES, Parts, parts_of

FIELDS = {
    "logits": "policy[at[rows]]",
    "logp": "logp[rows]",
    "old_logp": "old_logp[rows]",
    "ref_logp": "ref_logp[rows]",
    "tokens": "tokens[rows]",
    "mask": "jnp.ones((len(rows), T))",
    "advantage": "reward[rows] - chance @ reward",
    "beta": "beta",
}
OWN = {"per_token_logps": FIELDS["logp"], "ref_per_token_logps": FIELDS["ref_logp"]}
"""Parameters of the library's functions of log-probs."""
WORLD = """
tables = {name: jnp.array([[p, 1 - p] for p in rows]) for name, rows in ups.items()}
logits, reference, sampler = (jnp.log(tables[name]) for name in ("policy", "reference", "sampler"))
tokens = jnp.array(list(itertools.product(range(V), repeat=T)))
at = jnp.array([[V**t - 1 + sum(y[s] * V ** (t - 1 - s) for s in range(t)) for t in range(T)] for y in tokens.tolist()])
ref_logp, old_logp = reference[at, tokens], sampler[at, tokens]
chance = jnp.exp(old_logp.sum(-1))
reward = jnp.arange(len(tokens)) % 3.0
"""
SUMMED = """
def summed(logits):
    return sum(chance[row] * (call(logits, jnp.array([row]), 1.0)DIFFERENCE) for row in range(len(tokens)))

expected = jax.grad(summed)(logits)
"""


def reproduction(setting: Setting) -> str:
    """The program: for a recipe with rollouts of another policy, else with those of the policy itself."""
    module, _, name = setting.target.partition(":")
    if setting.target.startswith("kltest."):
        parts = parts_of(setting, FIELDS)
    else:
        given = {**OWN, **{key: repr(value) for key, value in setting.arguments.items()}}
        arguments = ", ".join(f"{key}={value}" for key, value in given.items())
        parts = Parts((f"from {module} import {name}",), "", f"{name}({arguments})", False)
    call = f"""
def call(logits, rows, beta):
    policy = jax.nn.log_softmax(logits)
    logp = policy[at, tokens]
    found = {parts.call}
    return (found[0] if isinstance(found, tuple) else found).sum()
"""
    head = parts.head("import jax", "import jax.numpy as jnp", stale=setting.recipe)
    # Tables in float64, whatever the library makes of them.
    world = f'jax.config.update("jax_enable_x64", True)\n{TABLES.rstrip()}{WORLD}'
    summed = SUMMED.replace("DIFFERENCE", " - call(logits, jnp.array([row]), 0.0)" if parts.differs else "")
    return f"{head}\n{parts.definitions}\n\n{world}\n{call}\n{summed.rstrip()}{SAID}"
