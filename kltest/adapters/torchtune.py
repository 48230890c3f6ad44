"""torchtune: its GRPO losses, from log-probs, and its losses for distillation."""

import importlib
from types import SimpleNamespace
from unittest import mock

from kltest.adapters import STEP, Adapter, Setting
from kltest.adapters.installed import called, found, loaded

COMMIT = "bd2a0fc7c3"
HOME = "https://github.com/pytorch/torchtune"
TREE = f"{HOME}/blob/{COMMIT}/torchtune"


def grpo(logp, old_logp, ref_logp, mask, advantage, beta, loss):
    """A class of `torchtune.dev.grpo.loss`."""
    function = found("torchtune.dev.grpo.loss", loss)(kl_coeff=beta)
    total, _, kl, *_ = function(old_logp, logp, ref_logp, advantage, padding_masks=mask.bool())
    return total, {"kl": kl}


class WrittenError(Exception):
    """Ends the loop of a worker, with what it wrote into its buffer."""


def advantages(reward, group):
    """What `PostProcessingWorker.run` writes into its buffer, rollouts of a prompt one after another.

    Its model, its tokenizer and their tokens are stand-ins: advantages are made of rewards alone.
    """
    torch = importlib.import_module("torch")
    worker = loaded("torchtune.dev.rl.workers.postprocessing", ("torchtune.training",))
    order, prompts = group.argsort(stable=True), len(group.unique())
    tokens = torch.zeros(len(group), 2, dtype=torch.long)
    names = ("logprobs", "seq_lens", "answers", "policy_version", "sequence_ids")
    rollouts = SimpleNamespace(query_responses=tokens, responses=tokens[:, 1:], **dict.fromkeys(names))
    rollouts.query_response_padding_masks, rollouts.to = tokens == 0, lambda device: rollouts

    def written(trajectory):
        raise WrittenError(trajectory.advantages)

    stand_in = SimpleNamespace(
        cfg=SimpleNamespace(inference=SimpleNamespace(batch_size=prompts, group_size=len(group) // prompts)),
        rollout_queue=SimpleNamespace(get=lambda timeout: rollouts),
        replay_buffer=SimpleNamespace(extend=written),
        reward_functions=[lambda *given: SimpleNamespace(total_reward=reward[order])],
        _ref_model=lambda tokens, **others: torch.zeros(*tokens.shape, 2),
        _tokenizer=SimpleNamespace(pad_id=0, decode=str),
        STOP_TOKENS_TENSOR=torch.tensor([1]),
        **{"_is_actor_zero": False, "_device": "cpu", "_temperature": 1.0},
    )
    kept = SimpleNamespace
    with (
        mock.patch.object(worker, "Trajectory", lambda **fields: kept(cpu=lambda: kept(**fields))),
        mock.patch.object(worker, "log", mock.MagicMock()),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats"),
    ):
        try:
            worker.PostProcessingWorker.run(stand_in)
        except WrittenError as end:
            return end.args[0][order.argsort()]
    raise LookupError("the worker of this commit writes nothing")


def scored(logp, old_logp, ref_logp, mask, reward, group, beta, loss):
    """The advantages of a worker, and a class of `torchtune.dev.grpo.loss`."""
    return grpo(logp, old_logp, ref_logp, mask, advantages(reward, group), beta, loss)[0]


def distilled(logits, ref_logits, tokens, mask, loss, **settings):
    """A class of `torchtune.modules.loss.kd_losses`; the reference is the teacher. Chunks are columns of tokens."""
    chunks = mask.shape[1]
    function = called(found("torchtune.modules.loss.kd_losses", loss), {"num_output_chunks": chunks}, settings)
    labels = tokens.where(mask != 0, function.ignore_index)
    if hasattr(function, "num_output_chunks"):
        return function(logits.chunk(chunks, dim=1), ref_logits.chunk(chunks, dim=1), labels)
    return function(logits.flatten(0, 1), ref_logits.flatten(0, 1), labels.flatten())


GRPO = Setting.of(grpo, options=STEP, source=f"{TREE}/dev/grpo/loss.py", policy=(f"{__name__}:scored", {}))
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
            ascends="grpo",
        ),
        GRPO.variant({"loss": "GRPOLoss"}, ascends="dapo"),
        GRPO.variant({"loss": "GRPOCompletionLoss"}, ascends=""),
        DISTILLATION.by_default("the loss itself", {"loss": "ForwardKLLoss"}),
        *(DISTILLATION.variant({"loss": f"{kind}KLLoss"}) for kind in ("Reverse", "Symmetric")),
        *(
            DISTILLATION.variant({"loss": f"{kind}KLWithChunkedOutputLoss"})
            for kind in ("Forward", "Reverse", "Symmetric")
        ),
    ),
)
