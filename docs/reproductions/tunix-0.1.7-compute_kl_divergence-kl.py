from tunix.rl.common import compute_kl_divergence
import itertools
import jax
import jax.numpy as jnp
import json
import warnings

warnings.filterwarnings("ignore")
STALE = False


jax.config.update("jax_enable_x64", True)

V, T = 2, 3
ups = {"policy": [0.6, 0.3, 0.8, 0.45, 0.7, 0.25, 0.55], "reference": [0.4, 0.5, 0.6, 0.7, 0.35, 0.5, 0.3]}
ups["sampler"] = [0.5, 0.4, 0.7, 0.5, 0.6, 0.35, 0.65] if STALE else ups["policy"]
tables = {name: jnp.array([[p, 1 - p] for p in rows]) for name, rows in ups.items()}
logits, reference, sampler = (jnp.log(tables[name]) for name in ("policy", "reference", "sampler"))
tokens = jnp.array(list(itertools.product(range(V), repeat=T)))
at = jnp.array([[V**t - 1 + sum(y[s] * V ** (t - 1 - s) for s in range(t)) for t in range(T)] for y in tokens.tolist()])
ref_logp, old_logp = reference[at, tokens], sampler[at, tokens]
chance = jnp.exp(old_logp.sum(-1))
reward = jnp.arange(len(tokens)) % 3.0


def call(logits, rows, beta):
    policy = jax.nn.log_softmax(logits)
    logp = policy[at, tokens]
    found = compute_kl_divergence(per_token_logps=logp[rows], ref_per_token_logps=ref_logp[rows], method='kl')
    return (found[0] if isinstance(found, tuple) else found).sum()


def summed(logits):
    return sum(chance[row] * (call(logits, jnp.array([row]), 1.0)) for row in range(len(tokens)))

expected = jax.grad(summed)(logits)
said = {"vocabulary": V, "length": T, "policy": tables["policy"].tolist(), "reference": tables["reference"].tolist()}
said["sampler"] = tables["sampler"].tolist() if STALE else None
print(json.dumps({**said, "expected": expected.tolist()}))
