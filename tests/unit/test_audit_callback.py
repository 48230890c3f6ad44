"""Audits in a training loop, of a trainer with a table as its model: what it follows is known at every step."""

import copy
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from audited import Table, rollouts
from weekly import first

from kltest import KLAuditCallback
from kltest.environments import Instance, ragged
from kltest.environments.policies import table
from kltest.errors import UsageError

INSTANCE = Instance.draw(ragged(3, 3), 33)
INSTANCE = replace(INSTANCE, reference=table(2 * INSTANCE.reference))
FOLLOWS = {"k3": "local_forward_kl", "in the reward": "reverse_kl", "k1": None}
GROUP = 4


def _counted(module, ids):
    module.passes += 1


class Trainer:
    """The part of TRL's trainers that an audit calls; generation and loss draw from torch's generator."""

    loss_is_scaled_for_ga, temperature, num_generations, processing_class = True, 1.0, GROUP, None
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    args = SimpleNamespace(gradient_accumulation_steps=2, steps_per_generation=2, num_iterations=1)
    current_gradient_accumulation_steps = 2

    def __init__(self, kind, prompts):
        self.kind, self.beta, self.prompts, self.scored = kind, 0.5, prompts, []
        self.state = SimpleNamespace(global_step=0)
        self.model, self.ref_model = (self._table(one) for one in (INSTANCE.policy, INSTANCE.reference))
        self._metrics = {"train": defaultdict(list)}

    def _table(self, logits):
        model = Table(INSTANCE.environment, logits)
        model.config = SimpleNamespace(eos_token_id=0, pad_token_id=0)
        model.register_buffer("passes", torch.zeros(1))
        model.register_forward_pre_hook(_counted)
        return model

    def _generate(self, inputs):
        policy = self.model.logits.detach().log_softmax(1).numpy()
        chances = torch.from_numpy(replace(INSTANCE, policy=policy).rollout_weights("current"))
        return rollouts(INSTANCE, torch.multinomial(chances, GROUP * self.prompts, replacement=True))

    def _calculate_rewards(self, drawn):
        self.scored.append(len(drawn))
        return torch.rand(len(drawn)).double()

    def _get_per_token_logps_and_entropies(self, model, ids, mask, width):
        logits = model(ids).logits[:, -width - 1 : -1].log_softmax(-1)
        return logits.gather(2, ids[:, -width:, None])[..., 0], None

    def _generate_and_score_completions(self, inputs):
        drawn = self._generate(inputs)
        ids, width = torch.cat([drawn.prompts, drawn.tokens], 1), drawn.tokens.shape[1]
        with torch.no_grad():
            old, ref = (
                self._get_per_token_logps_and_entropies(one, ids, None, width)[0]
                for one in (self.model, self.ref_model)
            )
        reward, more = self._calculate_rewards(drawn), {"ref_per_token_logps": ref}
        if self.kind == "in the reward":
            reward, more = reward - self.beta * ((old - ref) * drawn.mask).sum(1), {}
        groups = reward.view(-1, GROUP)
        advantages = (groups - (groups.sum(1, keepdim=True) - groups) / (GROUP - 1)).flatten()
        names = {"prompt_ids": drawn.prompts, "prompt_mask": drawn.prompt_mask, "completion_ids": drawn.tokens}
        self._metrics["train"]["reward"].append(float(reward.mean()))
        return {**names, "completion_mask": drawn.mask, "advantages": advantages, **more}

    def compute_loss(self, model, inputs, num_items_in_batch=None):
        ids, mask = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1), inputs["completion_mask"]
        logp = self._get_per_token_logps_and_entropies(model, ids, None, mask.shape[1])[0]
        loss = -(logp - logp.detach()).exp() * inputs["advantages"][:, None] + 0 * torch.rand(1)
        if self.kind != "in the reward":
            u = logp - inputs["ref_per_token_logps"]
            loss = loss + self.beta * (u if self.kind == "k1" else (-u).exp() - 1 + u)
        self._metrics["train"]["loss"].append(float(loss.detach().mean()))
        return (loss * mask).sum(1).mean() / self.current_gradient_accumulation_steps

    def train(self, steps, callback=None):
        """Train as transformers does: an epoch of some steps, two batches of shuffled rows each."""
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)

        def call(event):
            if callback:
                getattr(callback, event)(self.args, self.state, None)

        call("on_train_begin")
        for self.state.global_step in range(steps):
            call("on_step_begin")
            batch = self._generate_and_score_completions([])
            for rows in torch.randperm(GROUP * self.prompts).chunk(2):
                self.compute_loss(self.model, {name: one[rows] for name, one in batch.items()}).backward()
            gradient = self.model.logits.grad.clone()
            call("on_pre_optimizer_step")
            assert torch.equal(self.model.logits.grad, gradient)
            optimizer.step()
            optimizer.zero_grad()
        call("on_train_end")


@pytest.mark.parametrize("kind", first(1, FOLLOWS))
def test_it_tells_at_every_step_what_is_followed(kind):
    """By intervals that hold at 99 %; a k1 in the loss, the planted bug, is refuted."""
    trainer = Trainer(kind, 48)
    callback = KLAuditCallback(trainer, every=1, units=48, expect=FOLLOWS[kind] or "reverse_kl")
    trainer.train(2, callback)
    assert list(callback.audits) == [0, 1]
    logged = trainer._metrics["train"]
    for step, found in enumerate(callback.audits.values()):
        assert found.units == logged["kl_audit/units"][step] == 48
        assert found.missed is None or logged["kl_audit/missed_low"][step] == found.missed.low
        if FOLLOWS[kind] is None:
            assert found.verdict == "refuted"
            assert logged["kl_audit/coefficient_reverse_kl_high"][step] < 1
        else:
            # Of a KL in the reward, which is far noisier, 48 prompts tell less.
            assert found.verdict == ("confirmed" if kind == "k3" else "inconclusive")
            assert found.declared.coefficient.low - 1e-4 < 1 < found.declared.coefficient.high + 1e-4
            assert found.declared.coefficient.low > 0


@pytest.mark.parametrize("kind", first(1, ["k3", "in the reward"]))
def test_training_is_the_same_with_it(kind):
    """Weights, buffers, random numbers, metrics and calls of the reward, to the last bit; 8 prompts in two steps."""
    trainers = []
    for audited in (False, True):
        trainer = Trainer(kind, 4)
        trainer.train(5, KLAuditCallback(trainer, every=3, units=8) if audited else None)
        trainers.append((trainer, torch.get_rng_state()))
    (plain, state), (audited, its_state) = trainers
    audits = {name: value for name, value in audited._metrics["train"].items() if name.startswith("kl_audit/")}
    assert audits["kl_audit/units"] == [8, 8]
    assert {**plain._metrics["train"], **audits} == dict(audited._metrics["train"])
    assert torch.equal(state, its_state)
    assert plain.scored == audited.scored
    assert set(vars(plain)) == set(vars(audited))
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, audited.model.state_dict()[name]), name


def test_what_cannot_be_audited_is_refused_and_training_goes_on():
    trainer = Trainer("k3", 8)
    with pytest.raises(UsageError, match="units=4"):
        KLAuditCallback(trainer, units=4)
    without = copy.copy(trainer)
    without.beta = 0.0
    with pytest.raises(UsageError, match="beta is 0"):
        KLAuditCallback(without)
    with pytest.raises(UsageError, match="SimpleNamespace has no _get_per_token"):
        KLAuditCallback(SimpleNamespace())
    callback = KLAuditCallback(trainer, every=1, units=8)
    trainer.compute_loss = lambda model, inputs: (model.logits**2).sum()
    with pytest.warns(UserWarning, match="does not call _get_per_token_logps_and_entropies"):
        trainer.train(2, callback)
    assert callback.last is None
    assert not np.allclose(trainer.model.logits.detach(), INSTANCE.policy)
