"""prime-rl: `compute_loss` with its KL to the sampler, and with its on-policy distillation."""

import asyncio
from functools import partial
from types import SimpleNamespace

from kltest.adapters import STEP_OF_TOKENS, Adapter, Setting
from kltest.adapters.installed import loaded, packed

COMMIT = "559b44772e"
HOME = "https://github.com/PrimeIntellect-ai/prime-rl"
MODULE = "prime_rl.trainer.rl.loss"
# Classes of configurations, from a package of their own.
UNUSED = ("prime_rl.configs",)


def packed_loss(logp, old_logp, ref_logp, mask, advantage, beta, kind="default"):
    """`compute_loss` of packed rows. beta is `kl_tau`, or the weight of each token if `kind` is "ref_kl"."""
    losses = loaded(MODULE, UNUSED)
    new, old, ref, live = (packed(each, mask) for each in (logp, old_logp, ref_logp, mask != 0))
    advantages = [row.detach() * 0 + value for row, value in zip(new, advantage, strict=True)]
    settings = SimpleNamespace(dppo_mask_high=0.2, dppo_mask_low=0.2, ipo_threshold=0.1, adv_tau=1.0, kl_tau=beta)
    weights = [row * beta for row in live] if kind == "ref_kl" else None
    function = partial(losses.ipo_loss_fn if kind == "ipo" else losses.default_loss_fn, loss_config=settings)
    tokens = sum(row.sum() for row in live)
    of_rewards = [row * 0.0 for row in live] if kind == "ref_kl" else None
    return losses.compute_loss(
        new, old, ref, advantages, live, of_rewards, None, weights, function, tokens, tokens, tokens
    )[0]


def scored(logp, old_logp, ref_logp, mask, reward, group, beta):
    """`GRPOAlgorithm.score_group` of each group, without its penalty of lengths, and `packed_loss`."""
    algorithm = loaded("prime_rl.orchestrator.algo.grpo", (*UNUSED, "prime_rl.transports")).GRPOAlgorithm
    nodes = [SimpleNamespace(mask=[True], token_ids=[0]) for _ in mask]
    for number in group.unique():
        traces = [
            SimpleNamespace(reward=value, has_error=False, agent=SimpleNamespace(trainable=True), nodes=[node])
            for value, own, node in zip(reward.tolist(), group, nodes, strict=True)
            if own == number
        ]
        asyncio.run(algorithm.score_group(SimpleNamespace(length_penalty=None), [SimpleNamespace(traces=traces)]))
    advantage = reward.new_tensor([node.advantages[0] for node in nodes])
    return packed_loss(logp, old_logp, ref_logp, mask, advantage, beta)


SOURCE = f"{HOME}/blob/{COMMIT}/src/prime_rl/trainer/rl/loss.py"
LOSS = Setting.of(packed_loss, name="loss", options=STEP_OF_TOKENS, source=SOURCE, policy=(f"{__name__}:scored", {}))
NONE = "no KL to a reference"

ADAPTER = Adapter.cloned(
    "prime-rl",
    HOME,
    COMMIT,
    MODULE,
    UNUSED,
    module="prime_rl",
    folder="src",
    settings=(
        LOSS.by_default(
            NONE, note="Its KL is that to the sampler; there is none to a reference.", ascends="grpo-without-std"
        ),
        LOSS.by_default(NONE, {"kind": "ref_kl"}, note="On-policy distillation: the reference is the teacher."),
    ),
)
