"""tinker-cookbook: its KL in advantages, of reinforcement learning and distillation, and its self-distillation."""

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
    torch, holder, client_side = importlib.import_module("torch"), loaded(f"tinker_cookbook.{module}"), stand_ins()

    async def answer(number):
        return [0.0, *ref_logp[number].tolist()]

    async def score_sequences(client, numbers):
        return [await answer(number) for number in numbers], None

    client = SimpleNamespace(compute_logprobs=lambda number: SimpleNamespace(coroutine=partial(answer, number)))
    data = []
    for number, (sampled, live, value) in enumerate(zip(old_logp, mask, advantage, strict=True)):
        words = {"logprobs": sampled, "mask": live, "advantages": live * value}
        words = {name: client_side.TensorData(each) for name, each in words.items()} | {
            "target_tokens": SimpleNamespace(data=[0])
        }
        prompt = SimpleNamespace(append_int=lambda _, number=number: number)
        data.append(SimpleNamespace(model_input=prompt, loss_fn_inputs=words))
    # Log-probs of the service are numbers, of which the library makes float32.
    doubled = mock.MagicMock(wraps=torch, tensor=partial(torch.tensor, dtype=logp.dtype))
    teachers = ([client] * len(data), [0] * len(data)) if "distillation" in module else (client,)
    with (
        mock.patch.object(holder, "tinker", client_side),
        mock.patch.object(holder, "score_sequences", score_sequences, create=True),
        mock.patch.object(holder, "torch", doubled),
    ):
        asyncio.run(holder.incorporate_kl_penalty(data, *teachers, beta, kl_discount_factor))
    return serviced(logp, old_logp, [datum.loss_fn_inputs["advantages"].to_torch() for datum in data], mask)


def scored(logp, old_logp, ref_logp, mask, reward, group, beta, **settings):
    """`compute_advantages` of each group, and `charged`."""
    advantages_of, advantage = loaded("tinker_cookbook.rl.data_processing").compute_advantages, reward.clone()
    for number in group.unique():
        rows = group == number
        advantage[rows] = advantages_of([SimpleNamespace(get_total_rewards=reward[rows].tolist)])[0].to(reward.dtype)
    return charged(logp, old_logp, ref_logp, mask, advantage, beta, **settings)


def stand_ins():
    """Stand for the classes of the service's client."""

    class TensorData:
        def __init__(self, value):
            self.value = self.data = value

        def to_torch(self):
            return self.value

        from_torch = classmethod(lambda cls, value: cls(value))

    class ModelInput(list):
        length, to_ints = property(len), list.copy

        def append_int(self, token):
            return ModelInput([*self, token])

    same = dict.fromkeys(("Datum", "SamplingParams"), SimpleNamespace)
    return SimpleNamespace(TensorData=TensorData, ModelInput=ModelInput, **same)


def self_distilled(logits, logp, old_logp, ref_logits, ref_logp, tokens, mask, topk, reverse=False):
    """A step of self-distillation, every token of it, and the service's loss; the reference is the teacher.

    `topk` and `reverse` are those of its `Config`.
    """
    holder, client_side = loaded("tinker_cookbook.distillation.sdft"), stand_ins()
    Data, Text = client_side.TensorData, client_side.ModelInput

    async def scored(text):
        return [None, *ref_logp[text[0]].tolist()]

    async def likeliest(prompt, topk_prompt_logprobs, **others):
        top = ref_logits[prompt[0]].topk(topk_prompt_logprobs, dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return SimpleNamespace(topk_prompt_logprobs=[None, *(list(zip(*each, strict=True)) for each in pairs)])

    client = SimpleNamespace(
        compute_logprobs=lambda text: SimpleNamespace(coroutine=partial(scored, text)),
        sample=lambda **named: SimpleNamespace(coroutine=partial(likeliest, **named)),
    )
    data = []
    for row, sampled, live in zip(tokens.tolist(), old_logp, mask, strict=True):
        words = {"logprobs": Data(sampled), "mask": Data(live), "target_tokens": Data(row)}
        data.append(SimpleNamespace(model_input=Text([0, *row[:-1]]), loss_fn_inputs=words))
    asked = data, [{"group_idx": row} for row in range(len(data))], client, [Text([row]) for row in range(len(data))]
    with mock.patch.object(holder, "tinker", client_side):
        if not topk:
            asyncio.run(holder.compute_sdft_advantages(*asked))
            return serviced(logp, old_logp, [datum.loss_fn_inputs["advantages"].value for datum in data], mask)
        build = holder.build_reverse_kl_datums if reverse else holder.build_topk_distillation_datums
        datums = asyncio.run(build(*asked, topk=topk, skip_first_n_tokens=0))[0]
        targets, weights = (
            [each.loss_fn_inputs[name].value for each in datums] for name in ("target_tokens", "weights")
        )
        of_student = [row.gather(-1, ids) for row, ids in zip(logits, targets, strict=True)]
        if reverse:
            return holder.reverse_kl_custom_loss(datums, of_student)[0]
    return -sum((weight * row).sum() for weight, row in zip(weights, of_student, strict=True))


def serviced(logp, old_logp, advantages, mask):
    """The service's loss "importance_sampling": minus the sum of ρ·A."""
    return -((logp - old_logp).exp() * importlib.import_module("torch").stack(advantages) * mask).sum()


NOTE = "The loss of the service, which is not part of the library, is that of its documentation."
REINFORCED = Setting.of(
    charged, name="rl", options=STEP, source=f"{TREE}/rl/train.py", note=NOTE, policy=(f"{__name__}:scored", {})
)
DISTILLED = Setting.of(
    charged,
    {"module": "distillation.train_on_policy"},
    name="on_policy_distillation",
    options=STEP,
    source=f"{TREE}/distillation/train_on_policy.py",
    note=f"The reference is the teacher. {NOTE}",
)

SELF_DISTILLED = Setting.of(
    self_distilled,
    {"topk": 2},
    name="sdft",
    options={"sampler": "both"},
    source=f"{TREE}/distillation/sdft.py",
    note="The reference is the teacher. Its default leaves out the first three tokens, which count here, "
    f"and takes a support of 20, which has two tokens of four here. {NOTE}",
)

ADAPTER = Adapter(
    name="tinker-cookbook",
    distribution="tinker-cookbook",
    version="0.6.1",
    installs=(("--no-deps", "tinker-cookbook=={version}"),),
    module="tinker_cookbook",
    homepage="https://github.com/thinking-machines-lab/tinker-cookbook",
    settings=(
        REINFORCED.by_default("tinker_cookbook.rl.train:Config.kl_penalty_coef", ascends="dr-grpo"),
        DISTILLED.by_default("tinker_cookbook.distillation.train_on_policy:Config.kl_penalty_coef"),
        DISTILLED.variant({"kl_discount_factor": 1.0}),
        SELF_DISTILLED.by_default("the loss itself"),
        SELF_DISTILLED.variant({"reverse": True}),
        SELF_DISTILLED.variant({"topk": 0}),
    ),
    loads=partial(loaded, "tinker_cookbook.rl.metrics"),
    standalone=program,
)
