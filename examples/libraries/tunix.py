"""The expected gradient of compute_kl_divergence/low_var_kl with respect to the logits, summed over all rollouts."""

import itertools
import jax
import jax.numpy as jnp
import json
import warnings
from tunix.rl.common import compute_kl_divergence

warnings.filterwarnings("ignore")
STALE = False  # rollouts of another policy

jax.config.update("jax_enable_x64", True)  # tables in float64, whatever the library makes of them
V, T = 2, 3
# The probability of token 0 in each of the 7 contexts, breadth first; fewer tokens need the first ones.
first = {"policy": [0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55], "reference": [0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3]}
first["sampler"] = [0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65] if STALE else first["policy"]
first = {name: rows[: V**T - 1] for name, rows in first.items()}
tables = {name: jnp.array([[p, 1 - p] for p in rows]) for name, rows in first.items()}
logits, reference, sampler = (jnp.log(tables[name]) for name in ("policy", "reference", "sampler"))
tokens = jnp.array(list(itertools.product(range(V), repeat=T)))
at = jnp.array([[V**t - 1 + sum(y[s] * V ** (t - 1 - s) for s in range(t)) for t in range(T)] for y in tokens.tolist()])
ref_logp, old_logp = reference[at, tokens], sampler[at, tokens]
probability = jnp.exp(old_logp.sum(-1))
reward = jnp.arange(len(tokens)) % 3.0


def loss(logits, rows, beta):
    policy = jax.nn.log_softmax(logits)
    logp = policy[at, tokens]
    value = compute_kl_divergence(per_token_logps=logp[rows], ref_per_token_logps=ref_logp[rows], method='low_var_kl')
    return (value[0] if isinstance(value, tuple) else value).sum()


def summed(logits):
    """The loss summed over all rollouts with their probabilities."""
    return sum(
        probability[row] * (loss(logits, jnp.array([row]), 1.0))
        for row in range(len(tokens))
    )


def kl(logits):
    """KL(π‖ref) of whole sequences."""
    logp = jax.nn.log_softmax(logits)[at, tokens]
    return (jnp.exp(logp.sum(-1)) * (logp - ref_logp).sum(-1)).sum()


expected, true = jax.grad(summed)(logits), jax.grad(kl)(logits)
answer = {"vocabulary": V, "length": T, "policy": tables["policy"].tolist(), "reference": tables["reference"].tolist()}
answer["sampler"] = tables["sampler"].tolist() if STALE else None
print(json.dumps({**answer, "true": true.tolist(), "expected": expected.tolist()}))
