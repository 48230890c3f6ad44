"""torchtune: its GRPO losses, from log-probs, and its losses for distillation."""

from kltest.adapters import STEP, Adapter, Setting
from kltest.adapters.installed import called, found

COMMIT = "bd2a0fc7c3"
HOME = "https://github.com/pytorch/torchtune"
TREE = f"{HOME}/blob/{COMMIT}/torchtune"


def grpo(logp, old_logp, ref_logp, mask, advantage, beta, loss):
    """A class of `torchtune.dev.grpo.loss`."""
    function = found("torchtune.dev.grpo.loss", loss)(kl_coeff=beta)
    total, _, kl, *_ = function(old_logp, logp, ref_logp, advantage, padding_masks=mask.bool())
    return total, {"kl": kl}


def distilled(logits, ref_logits, tokens, mask, loss, **settings):
    """A class of `torchtune.modules.loss.kd_losses`; the reference is the teacher. Chunks are columns of tokens."""
    chunks = mask.shape[1]
    function = called(found("torchtune.modules.loss.kd_losses", loss), {"num_output_chunks": chunks}, settings)
    labels = tokens.where(mask != 0, function.ignore_index)
    if hasattr(function, "num_output_chunks"):
        return function(logits.chunk(chunks, dim=1), ref_logits.chunk(chunks, dim=1), labels)
    return function(logits.flatten(0, 1), ref_logits.flatten(0, 1), labels.flatten())


GRPO = Setting.of(grpo, options=STEP, source=f"{TREE}/dev/grpo/loss.py")
DISTILLATION = Setting.of(
    distilled,
    name="distillation",
    source=f"{TREE}/modules/loss/kd_losses.py",
    note="The reference is the teacher.",
)

ADAPTER = Adapter.cloned(
    "torchtune",
    HOME,
    COMMIT,
    "torchtune.dev.grpo.loss",
    module="torchtune",
    settings=(
        GRPO.by_default(
            "torchtune.dev.grpo.loss:GRPOSimpleLoss(kl_coeff)",
            {"loss": "GRPOSimpleLoss"},
            note="The loss of the recipe for GRPO.",
        ),
        GRPO.variant({"loss": "GRPOCompletionLoss"}),
        DISTILLATION.by_default("the loss itself", {"loss": "ForwardKLLoss"}),
        *(DISTILLATION.variant({"loss": f"{kind}KLLoss"}) for kind in ("Reverse", "Symmetric")),
        *(
            DISTILLATION.variant({"loss": f"{kind}KLWithChunkedOutputLoss"})
            for kind in ("Forward", "Reverse", "Symmetric")
        ),
    ),
)
