"""tinker-cookbook: the KL in the advantages of its reinforcement learning and of its on-policy distillation."""

import asyncio
import importlib
from functools import partial
from types import SimpleNamespace
from unittest import mock

from kltest.adapters import STEP, Adapter, Setting
from kltest.adapters.installed import loaded
from kltest.adapters.standalone import program

TREE = "https://github.com/thinking-machines-lab/tinker-cookbook/blob/main/tinker_cookbook"


def charged(logp, old_logp, ref_logp, mask, advantage, beta, module="rl.metrics", kl_discount_factor=0.0):
    """`incorporate_kl_penalty` of a module, and the service's loss "importance_sampling": minus the sum of ρ·A.

    The reference is the teacher if the module is that of distillation.
    """
    torch, holder = importlib.import_module("torch"), loaded(f"tinker_cookbook.{module}")

    class Data:
        def __init__(self, value):
            self.value = value

        def to_torch(self):
            return self.value

        from_torch = classmethod(lambda cls, value: cls(value))

    async def answer(number):
        return [0.0, *ref_logp[number].tolist()]

    async def score_sequences(client, numbers):
        return [await answer(number) for number in numbers], None

    client = SimpleNamespace(compute_logprobs=lambda number: SimpleNamespace(coroutine=partial(answer, number)))
    data = []
    for number, (sampled, live, value) in enumerate(zip(old_logp, mask, advantage, strict=True)):
        words = {"logprobs": sampled, "mask": live, "advantages": live * value}
        words = {name: Data(each) for name, each in words.items()} | {"target_tokens": SimpleNamespace(data=[0])}
        prompt = SimpleNamespace(append_int=lambda _, number=number: number)
        data.append(SimpleNamespace(model_input=prompt, loss_fn_inputs=words))
    # Log-probs of the service are numbers, of which the library makes float32.
    doubled = mock.MagicMock(wraps=torch, tensor=partial(torch.tensor, dtype=logp.dtype))
    teachers = ([client] * len(data), [0] * len(data)) if "distillation" in module else (client,)
    with (
        mock.patch.object(holder, "tinker", SimpleNamespace(TensorData=Data)),
        mock.patch.object(holder, "score_sequences", score_sequences, create=True),
        mock.patch.object(holder, "torch", doubled),
    ):
        asyncio.run(holder.incorporate_kl_penalty(data, *teachers, beta, kl_discount_factor))
    advantages = torch.stack([datum.loss_fn_inputs["advantages"].to_torch() for datum in data])
    return -((logp - old_logp).exp() * advantages * mask).sum()


NOTE = "The loss of the service, which is not part of the library, is that of its documentation."
REINFORCED = Setting.of(charged, name="rl", options=STEP, source=f"{TREE}/rl/train.py", note=NOTE)
DISTILLED = Setting.of(
    charged,
    {"module": "distillation.train_on_policy"},
    name="on_policy_distillation",
    options=STEP,
    source=f"{TREE}/distillation/train_on_policy.py",
    note=f"The reference is the teacher. {NOTE}",
)

ADAPTER = Adapter(
    name="tinker-cookbook",
    distribution="tinker-cookbook",
    version="0.6.1",
    installs=(("--no-deps", "tinker-cookbook=={version}"),),
    module="tinker_cookbook",
    homepage="https://github.com/thinking-machines-lab/tinker-cookbook",
    settings=(
        REINFORCED.by_default("tinker_cookbook.rl.train:Config.kl_penalty_coef"),
        DISTILLED.by_default("tinker_cookbook.distillation.train_on_policy:Config.kl_penalty_coef"),
        DISTILLED.variant({"kl_discount_factor": 1.0}),
    ),
    loads=partial(loaded, "tinker_cookbook.rl.metrics"),
    standalone=program,
)
