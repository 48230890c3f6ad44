"""tunix (JAX): `compute_kl_divergence` by every method, and `grpo_loss_fn` from the logits of a model to the loss."""

from __future__ import annotations

from functools import partial

from kltest.adapters.adapter import Adapter, Setting, label
from kltest.adapters.standalone import program

COMMON = "tunix.rl.common"
CALLS = "kltest.adapters.tunix.calls"
SOURCE = "https://github.com/google/tunix/blob/main/tunix/rl"
TABLE = "A flax module gives the logits after a prompt of one token; float32, as the library computes log-probs."
METHODS = ("low_var_kl", "kl", "mse_kl")
AGGREGATIONS = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-scale",
    "seq-mean-token-sum",
    "sequence-mean-token-sum-norm",
)
# Every shape of batch is compiled; groups of two keep that to a minute or two.
OPTIONS = {"sampler": "both", "group_size": 2, "timeout": 600}
FINITE = {"ignore": "KL502"}
"""The padding cannot be NaN: it holds the model's own logits, which a forward pass computes."""


def divergence(method: str) -> Setting:
    """`compute_kl_divergence` alone, per token, as a loss."""
    return Setting(
        f"compute_kl_divergence/{method}",
        f"{COMMON}:compute_kl_divergence",
        {"method": method},
        default=method == METHODS[0],
        source=f"{SOURCE}/common.py",
    )


def whole(**settings: object) -> Setting:
    """`grpo_loss_fn` with settings over the defaults of GRPOConfig."""
    return Setting(
        f"grpo_loss_fn/{label(**settings) or 'GRPOConfig'}",
        f"{CALLS}:grpo",
        settings,
        {**OPTIONS, **FINITE},
        depth="trainer",
        default=not settings,
        source=f"{SOURCE}/grpo/grpo_learner.py",
        note=TABLE,
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
        divergence(METHODS[0]),
        whole(),
        *map(divergence, METHODS[1:]),
        whole(kl_loss_mode="mse_kl"),
        whole(kl_loss_mode="low_var_kl"),
        whole(loss_algo="gspo-token"),
        *(whole(kl_loss_mode="mse_kl", loss_agg_mode=mode) for mode in AGGREGATIONS if mode != AGGREGATIONS[1]),
        Setting(
            "grpo_loss_fn/grpo-sequence-kl",
            f"{CALLS}:grpo",
            {"recipe": True},
            {**OPTIONS, **FINITE},
            depth="trainer",
            recipe=True,
            source=f"{SOURCE}/function_registry.py",
            note="A policy loss to register; it costs a forward pass more, and the variance of the sequence ratio. "
            "What the model gives at padding must be finite, as it is (KL502).",
        ),
    ),
    standalone=partial(program, fields={"per_token_logps": "logp", "ref_per_token_logps": "ref_logp"}, backend="jax"),
)
