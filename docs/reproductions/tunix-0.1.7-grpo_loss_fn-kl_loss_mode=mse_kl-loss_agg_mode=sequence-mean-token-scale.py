import dataclasses
import importlib
import inspect
import itertools
import jax
import jax.numpy as jnp
import json
import warnings

warnings.filterwarnings("ignore")
STALE = False
END = -2
PAD = -1


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


def configured(settings):
    kind = part("tunix.rl.grpo.grpo_learner", "GRPOConfig")
    known = {field.name for field in dataclasses.fields(kind)}
    for name in settings:
        if name not in known:
            raise LookupError(f"in the installed version GRPOConfig has no {name!r}, which this setting is about")
    config = kind(**settings)
    if not hasattr(config, "temperature"):
        # The learner writes the rollout's temperature onto the configuration.
        object.__setattr__(config, "temperature", 1.0)
    return config


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


def example(old_logp, ref_logp, mask, tokens, advantage):
    import jax.numpy as jnp
    kind = part("tunix.rl.common", "TrainExample")
    offered = {
        "prompt_ids": jnp.zeros_like(tokens[:, :1]),
        "prompt_mask": jnp.ones_like(mask[:, :1]),
        "completion_ids": tokens,
        "completion_mask": mask,
        "advantages": advantage,
        "ref_per_token_logps": ref_logp,
        "old_per_token_logps": old_logp,
    }
    return kind(**taken(kind, offered, {}))


def table(logits):
    import jax.numpy as jnp
    from flax import nnx
    class Table(nnx.Module):
        def __init__(self, logits):
            self.logits = nnx.Param(logits)
        def __call__(self, tokens, positions=None, cache=None, attention_mask=None):
            logits = self.logits[...]
            return jnp.concatenate([logits, jnp.zeros_like(logits[:, :1])], axis=1), cache
    return Table(logits)


def compiled(recipe, with_old, beta, settings):
    import jax
    known = compiled.__dict__.setdefault("known", {})
    asked = recipe, with_old, beta, settings
    if asked in known:
        return known[asked]
    whole = (
        sequence_kl_loss_fn
        if recipe
        else part("tunix.rl.algo_core", "grpo_loss_fn")
    )
    config = configured({"beta": beta, **dict(settings)})
    def loss(logits, old_logp, ref_logp, mask, tokens, advantage):
        batch = example(old_logp if with_old else None, ref_logp, mask, tokens, advantage)
        offered = {"model": table(logits), "train_example": batch, "algo_config": config, "pad_id": PAD, "eos_id": END}
        return whole(**taken(whole, offered, {}))
    known[asked] = jax.jit(loss)
    return known[asked]


def grpo(logits, old_logp, ref_logp, mask, tokens, advantage, beta, with_old=True, recipe=False, **settings):
    import jax
    assert isinstance(logits, jax.Array)
    whole = compiled(recipe, with_old, float(beta), tuple(sorted(settings.items())))
    loss, metrics = whole(logits, old_logp, ref_logp, mask, tokens, advantage)
    return loss, {"kl": metrics["kl"]} if "kl" in metrics else {}

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
    found = grpo(logits=policy[at[rows]], old_logp=old_logp[rows], ref_logp=ref_logp[rows], mask=jnp.ones((len(rows), T)), tokens=tokens[rows], advantage=reward[rows] - chance @ reward, beta=beta, kl_loss_mode='mse_kl', loss_agg_mode='sequence-mean-token-scale')
    return (found[0] if isinstance(found, tuple) else found).sum()


def summed(logits):
    return sum(chance[row] * (call(logits, jnp.array([row]), 1.0) - call(logits, jnp.array([row]), 0.0)) for row in range(len(tokens)))

expected = jax.grad(summed)(logits)
said = {"vocabulary": V, "length": T, "policy": tables["policy"].tolist(), "reference": tables["reference"].tolist()}
said["sampler"] = tables["sampler"].tolist() if STALE else None
print(json.dumps({**said, "expected": expected.tolist()}))
