"""tunix (JAX): `compute_kl_divergence` by every method, and `grpo_loss_fn` from the logits of a model to the loss."""

from functools import partial

from kltest.adapters import Adapter, Setting
from kltest.adapters.standalone import program
from kltest.adapters.tunix.calls import advantages, compiled

COMMON = "tunix.rl.common"
SOURCE = "https://github.com/google/tunix/blob/main/tunix/rl"
TABLE = "A flax module gives the logits after a prompt of one token; float32, as the library computes log-probs."
METHODS = ("low_var_kl", "kl", "mse_kl")
# Beside the default, "sequence-mean-token-mean".
AGGREGATIONS = ("token-mean", "sequence-mean-token-scale", "seq-mean-token-sum", "sequence-mean-token-sum-norm")
# Registered policy losses with the advantages of these, up to a constant.
ASCENDS = {"token-mean": "dapo", "seq-mean-token-sum": "grpo"}
# Every shape of batch is compiled; groups of two keep that to a minute or two.
# The padding cannot be NaN (KL502): it holds the model's own logits, which a forward pass computes.
OPTIONS = {"sampler": "both", "group_size": 2, "timeout": 600, "ignore": "KL502"}


def grpo(logits, old_logp, ref_logp, mask, tokens, advantage, beta, with_old=True, recipe=False, **settings):
    """`grpo_loss_fn` with `settings` over the defaults of GRPOConfig; `with_old` is for several updates a batch."""
    import jax

    assert isinstance(logits, jax.Array)
    whole = compiled(recipe, with_old, float(beta), tuple(sorted(settings.items())))
    loss, metrics = whole(logits, old_logp, ref_logp, mask, tokens, advantage)
    return loss, {"kl": metrics["kl"]} if "kl" in metrics else {}


def scored(logits, old_logp, ref_logp, mask, tokens, reward, group, beta, with_old=True, **settings):
    """The advantage estimator of GRPOConfig, of rewards whose groups follow one another, and `grpo_loss_fn`."""
    advantage = advantages(reward, group, settings.get("advantage_estimator", "grpo"))
    return grpo(logits, old_logp, ref_logp, mask, tokens, advantage, beta, with_old, **settings)[0]


# The function alone, per token, as a loss.
DIVERGENCE = Setting.of(f"{COMMON}:compute_kl_divergence", source=f"{SOURCE}/common.py")
LEARNER = f"{SOURCE}/grpo/grpo_learner.py"
LOSS = Setting.of(
    grpo,
    name="grpo_loss_fn",
    options=OPTIONS,
    depth="trainer",
    source=LEARNER,
    note=TABLE,
    policy=(f"{__name__}:scored", {}),
)


ADAPTER = Adapter(
    name="tunix",
    distribution="google-tunix",
    version="0.1.7",
    installs=(
        ("--no-deps", "google-tunix=={version}"),
        (
            *("jax", "flax", "optax", "google-metrax", "clu", "wrapt", "tensorboardX", "jaxtyping", "tqdm", "pillow"),
            *("huggingface_hub", "sentencepiece", "perfetto", "pandas", "transformers", "datasets", "grain"),
            # Needed by older versions only.
            "kagglehub",
        ),
    ),
    module=COMMON,
    homepage="https://github.com/google/tunix",
    settings=(
        LOSS.by_default("tunix.rl.grpo.grpo_learner:GRPOConfig.beta", name="GRPOConfig", ascends="grpo"),
        *(DIVERGENCE.variant({"method": method}, method) for method in METHODS),
        LOSS.variant({"kl_loss_mode": "mse_kl"}),
        LOSS.variant({"kl_loss_mode": "low_var_kl"}),
        LOSS.variant({"loss_algo": "gspo-token"}, ascends="gspo"),
        *(
            LOSS.variant({"kl_loss_mode": "mse_kl", "loss_agg_mode": mode}, ascends=ASCENDS.get(mode))
            for mode in AGGREGATIONS
        ),
        LOSS.variant(
            {"recipe": True},
            "grpo-sequence-kl",
            recipe=True,
            source=f"{SOURCE}/function_registry.py",
            note="A policy loss to register; it costs a forward pass more, and the variance of the sequence ratio. "
            "What the model gives at padding must be finite, as it is (KL502).",
        ),
    ),
    standalone=partial(program, parameters=("per_token_logps", "ref_per_token_logps"), backend="jax"),
)
