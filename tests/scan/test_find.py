"""Finding KL terms: every form, and beside each the one that looks like it and is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scan.reading import cases, found

from kltest.estimators import registry
from kltest.scanning.search import Search
from kltest.scanning.sources import contents
from kltest.scanning.store import Store

TERMS = {
    "a loss beside entries of lists that a loop writes": (
        """
def loss(logp, ref_logp, mask, heads):
    scales = [1.0] * len(heads)
    for at in range(len(heads)):
        scales[at] = heads[at] * [0.5, 2.0][at]
    kl = ((logp - ref_logp) ** 2 * mask).sum()
    return kl
""",
        "loss",
    ),
    "a loss that is logged as a number where it is one": (
        """
def loss_of(logp, ref_logp, mask, data):
    kl = ((logp - ref_logp) ** 2 * mask).sum() if "mask" in data else ((logp - ref_logp) ** 2).mean()
    metrics = {"loss": float(kl.item()) if kl.ndim == 0 else kl}
    return kl, metrics
""",
        "loss",
    ),
    "a loss that a helper is given under another name": (
        """
def measured(inputs):
    return inputs.mean()

def step(logp, ref_logp, mask):
    total = ((logp - ref_logp) ** 2 * mask).sum()
    measured(total)
    return {"loss": total}
""",
        "loss",
    ),
    "a loss in whose name there is a mask": (
        """
def loss_with_mask(logp, ref_logp, mask):
    return ((logp - ref_logp) ** 2 * mask).sum()
""",
        "loss",
    ),
    "a helper whose value is measured as well": (
        """
def calculate_kl(logprobs, ref_logprobs, stats):
    kl_stats = (ref_logprobs - logprobs) ** 2
    stats.append(kl_stats)
    return kl_stats
""",
        "helper",
    ),
    "beside operations of a name whose operand is not given": (
        """
def track(one, other, third):
    return one

def loss(logits, labels, logp, ref_logp, mask):
    progress = track(logits.add(), logits.sub(), labels.lt())
    return ((logp - ref_logp) ** 2 * mask).sum() + progress
""",
        "loss",
    ),
    "entries of what a loader gives, of which one is called log-probs": (
        """
from torch.utils.data import DataLoader

def learn(memories, model, tokens):
    for masks, old_probs, old_logps in DataLoader(memories):
        probs = model(tokens).logits.softmax(-1)
        kl = (old_probs * (old_probs.log() - probs.log())).sum(-1)
        loss = (kl * masks).sum()
        loss.backward()
""",
        "loss",
    ),
    "k3 in the loss": (
        """
def loss(logprobs, ref_logprobs, advantages, beta):
    kl = torch.exp(ref_logprobs - logprobs) - (ref_logprobs - logprobs) - 1
    return -(advantages * logprobs - beta * kl).mean()
""",
        "loss",
    ),
    "k3 of a named log-ratio": (
        """
class Trainer:
    def compute_loss(self, model, inputs):
        per_token_logps = self.get_logps(model, inputs)
        log_ratio = inputs["ref_per_token_logps"] - per_token_logps
        per_token_loss = -inputs["advantages"].unsqueeze(1) + self.beta * (log_ratio.exp() - 1 - log_ratio)
        return (per_token_loss * inputs["completion_mask"]).sum()
""",
        "loss",
    ),
    "k3 by expm1": (
        """
def policy_loss(logp, ref_logp, beta):
    d = ref_logp - logp
    loss = beta * (torch.expm1(d) - d).mean()
    return loss
""",
        "loss",
    ),
    "k2": (
        """
def loss(new_logprobs, teacher_logprobs):
    return 0.5 * (new_logprobs - teacher_logprobs).pow(2).mean()
""",
        "loss",
    ),
    "absolute difference": (
        """
def loss(logp, base_logp):
    return (logp - base_logp).abs().mean()
""",
        "loss",
    ),
    "k1 in the reward": (
        """
def make(scores, logprobs, ref_logprobs, kl_coef):
    non_score = -kl_coef * (logprobs - ref_logprobs)
    rewards = non_score.clone()
    rewards[:, -1] += scores
    return gae(rewards)
""",
        "reward",
    ),
    "k1 in the reward, whose advantage comes to the loss as a number": (
        """
def train(policy, anchor, batch, coef):
    with torch.no_grad():
        logprobs, ref_logprobs = policy(batch), anchor(batch)
        kl = logprobs - ref_logprobs
        rewards = batch["rewards"] - coef * kl
        advantages = rewards.flip(1).cumsum(1).flip(1)
    loss = -(advantages * (policy(batch) - logprobs).exp()).mean()
    loss.backward()
    return (logprobs - ref_logprobs).sum(1).mean().item()
""",
        "reward",
    ),
    "a helper of what nobody calls": (
        """
def forward_kl(logits, teacher_logits):
    return -(F.softmax(teacher_logits, -1) * F.log_softmax(logits, -1)).sum(-1).mean()

def halved(logits, teacher_logits):
    return 0.5 * forward_kl(logits, teacher_logits)
""",
        "helper",
    ),
    "k1 subtracted from the advantage": (
        """
def apply(args, advantages, student_log_probs, teacher_log_probs):
    for i in range(len(advantages)):
        advantages[i] = advantages[i] - args.coef * (student_log_probs[i] - teacher_log_probs[i])
""",
        "advantage",
    ),
    "all of the vocabulary": (
        """
def distillation_loss(student_logits, teacher_logits, mask):
    p = student_logits.softmax(-1)
    gap = student_logits.log_softmax(-1) - teacher_logits.log_softmax(-1)
    return ((p * gap).sum(-1) * mask).sum()
""",
        "loss",
    ),
    "cross-entropy to a teacher": (
        """
def kd_loss(student_logits, teacher_logits):
    return -(F.softmax(teacher_logits, -1) * F.log_softmax(student_logits, -1)).sum(-1).mean()
""",
        "loss",
    ),
    "F.kl_div": (
        """
def step(student_log_probs, teacher_log_probs):
    loss = F.kl_div(student_log_probs, teacher_log_probs, log_target=True, reduction="batchmean")
    loss.backward()
""",
        "loss",
    ),
    "a helper": (
        """
def approx_kl(logprobs, ref_logprobs, kind):
    diff = logprobs - ref_logprobs
    if kind == "k2":
        return diff.square() / 2
    return diff

def compute_loss(batch, new_logprobs):
    kl = approx_kl(new_logprobs, batch.ref_logprobs, "k2")
    return kl.mean()
""",
        "loss",
    ),
    "a helper that nobody calls": (
        """
def kl_penalty(logprob, ref_logprob):
    return logprob - ref_logprob
""",
        "helper",
    ),
    "stored, and subtracted from the reward elsewhere": (
        """
def collect(batch, logprobs, ref_logprobs):
    batch.kl = logprobs - ref_logprobs

def finish(batch):
    rewards = batch.scores - 0.1 * batch.kl
    return rewards
""",
        "reward",
    ),
    "under no_grad, in the loss all the same": (
        """
def loss(logp, ref_logp, beta):
    with torch.no_grad():
        kl = logp - ref_logp
    return beta * kl.mean()
""",
        "loss",
    ),
    "a reference that is the policy without its adapters, where an argument says so": (
        """
def logprobs_of(model, batch, reference):
    with torch.no_grad() if reference else nullcontext(), (model.disable_adapter() if reference else nullcontext()):
        logits = model(batch["input_ids"]).logits
    return logits.log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)

def compute_loss(model, batch, beta):
    new_logprobs, ref_logprobs = logprobs_of(model, batch, False), logprobs_of(model, batch, reference=True)
    kl = torch.exp(ref_logprobs - new_logprobs) - (ref_logprobs - new_logprobs) - 1.0
    return beta * (kl * batch["mask"]).sum()
""",
        "loss",
    ),
    "from dictionaries that are put together": (
        """
class Actor:
    def update(self, data, metrics):
        for micro in data.split(4):
            inputs = {**micro.batch, **micro.others, "scale": 2.0}
            logp = self.forward(inputs)["logp"]
            loss = -(logp * inputs["advantages"]).sum()
            if self.config.use_kl_loss and "ref_logp" in inputs:
                kl_loss = ((logp - inputs["ref_logp"]) ** 2 * inputs["mask"]).sum()
                loss = loss + self.config.kl_coef * kl_loss
            loss = loss * inputs["scale"] / inputs.get("count")
            loss.backward()
""",
        "loss",
    ),
    "logits that a head makes of hidden states, in chunks": (
        """
def logprobs_of(model, ids, size):
    found, hidden = [], model(ids).hidden_states
    for start in range(0, hidden.shape[1], size):
        logits = hidden[:, start : start + size] @ model.head.weight.t()
        chosen = logits.gather(-1, ids[:, start : start + size].unsqueeze(-1)).squeeze(-1)
        found.append(chosen - logits.logsumexp(-1))
    return torch.cat(found, dim=1)

def compute_loss(model, ref_model, input_ids, mask):
    gap = logprobs_of(ref_model, input_ids, 64) - logprobs_of(model, input_ids, 64)
    return ((gap.exp() - gap - 1) * mask).sum()
""",
        "loss",
    ),
    "a criterion that is defined in a branch of a loop, and handed on": (
        """
class Consumer:
    def step(self, batches, pipeline):
        for batch in batches:
            if self.staged:
                ref_logp = batch["ref_logp"]

                def criterion(outputs, inputs):
                    logp = outputs.logits.log_softmax(-1).gather(-1, inputs["labels"].unsqueeze(-1)).squeeze(-1)
                    kl = torch.exp(inputs["ref_logp"] - logp) - (inputs["ref_logp"] - logp) - 1
                    loss = -(logp * inputs["advantages"]).mean() + self.beta * kl.mean()
                    return loss

                pipeline.run(batch, criterion, ref_logp)
""",
        "loss",
    ),
    "weights that are nothing over nothing where both agree": (
        """
def loss(logits, teacher_logits, cut):
    p, q = logits.softmax(-1), teacher_logits.softmax(-1)
    tail = (q.cumsum(-1) <= 0.5).float()
    head, rest = (((p - q).abs() * part).sum(-1).detach() for part in (1 - tail, tail))
    return (head / (head + rest) * (p * (p.log() - q.log())).sum(-1)).mean()
""",
        "loss",
    ),
    "a method called like a function of the tree": (
        """
def mean(values):
    return values.mean()

def loss(logp, ref_logp):
    return ((logp - ref_logp) ** 2).mean()
""",
        "loss",
    ),
    "a method that is called like a built-in function": (
        """
class Half:
    def float(self):
        return self

def loss(logp, ref_logp):
    return ((logp - ref_logp) ** 2).mean() * float("1")
""",
        "loss",
    ),
    "to the sampler, called KL": (
        """
def loss(logp, old_logp, coef):
    kl = (old_logp - logp).mean()
    loss = coef * kl
    return loss
""",
        "loss",
    ),
    "a reward that a helper calls an advantage": (
        """
def standardized(adv_list):
    return [(adv - adv.mean()) / adv.std() for adv in adv_list]

def scores(ref_logps, old_logps, rewards, beta):
    token_rewards = rewards - beta * (old_logps - ref_logps)
    return standardized([token_rewards])
""",
        "reward",
    ),
    "called a reward, and a weight of the loss": (
        """
def distillation(logp, old_logp, teacher_logp, mask):
    reward = teacher_logp - logp.detach()
    loss = -(reward * torch.exp(logp - old_logp) * mask).sum()
    loss.backward()
""",
        "loss",
    ),
    "in an unknown function, with an option of its own": (
        """
import torch

def step(self, logp, ref_logp, mask, detached):
    gap = (logp.detach() if detached else logp) - ref_logp
    loss = self.aggregator(torch.expm1(gap) - gap, mask) * 0.1
    loss.backward()
""",
        "loss",
    ),
    "what a reward function returns": (
        """
def compute_rewards(scores, old_log_prob, ref_log_prob, kl_ratio):
    gap = old_log_prob - ref_log_prob
    return scores - gap * kl_ratio
""",
        "reward",
    ),
    "a function whose values raise in a branch": (
        """
import torch

def loss(kind, logp, ref_logp, mask):
    if kind == "k1":
        gap = logp - ref_logp
    elif kind == "k2":
        gap = (logp - ref_logp) ** 2 / 2
    else:
        raise ValueError(kind)
    return (gap * mask).sum()
""",
        "loss",
    ),
    "an object of two, as an option says, which a loss returns in another": (
        """
@dataclass
class Total:
    summed: object
    tokens: object

@dataclass
class Output:
    primary_loss: Total
    metrics: dict

def aggregate(per_token, mask):
    return Total((per_token * mask).sum(), mask.sum())

def policy_loss(logps, ref_logps, old_logps, advantages, mask, beta):
    total = aggregate(-(logps - old_logps).exp() * advantages, mask)
    if beta != 0.0:
        kl = aggregate((logps - ref_logps) ** 2 / 2, mask)
        total = Total(total.summed + beta * kl.summed, total.tokens)
    return Output(primary_loss=total, metrics={})
""",
        "loss",
    ),
}
TERMS_NOT_YET = {
    "stored, and subtracted from the reward elsewhere": "a field that another function stores",
}
NONE = {
    "a helper of a class that is called a loss": """
class ClippedLoss:
    def log_weights(self, logps, old_logps):
        return (logps - old_logps).clamp(-20.0, 20.0)

    def forward(self, logps, old_logps, advantages):
        return -(self.log_weights(logps, old_logps).exp() * advantages).mean()
""",
    "the mismatch of a sampler, which another function only measures": """
def ratios_and_mismatch_kl(trainer_logprobs, inference_logprobs):
    log_ratio = trainer_logprobs - inference_logprobs
    ratio = torch.exp(log_ratio)
    return log_ratio, ratio, ratio - log_ratio - 1

def policy_loss(trainer_logprobs, inference_logprobs, advantages, mask):
    log_ratio, ratio, mismatch_kl = ratios_and_mismatch_kl(trainer_logprobs, inference_logprobs)
    loss = -(ratio * advantages * mask).sum()
    return loss, {"mismatch_kl": (mismatch_kl * mask).sum() / mask.sum()}
""",
    "a metric that is averaged as losses are": """
def agg_loss(loss_mat, mask):
    loss = (loss_mat * mask).sum() / mask.sum()
    return loss

class Actor:
    def loss_func(self, logps, old_logps, advantages, mask):
        ratio = (logps - old_logps).exp()
        total = agg_loss(-ratio * advantages, mask)
        metrics = {"actor/policykl": agg_loss(logps - old_logps, mask).detach().item()}
        return total, metrics
""",
    "the loss of an evaluation, and metrics of a loss": """
def evaluate(logp, ref_logp, stats, squared):
    with torch.no_grad():
        if squared:
            loss = ((logp - ref_logp) ** 2).mean()
        else:
            loss = (logp - ref_logp).abs().mean()
        stats["loss/total"] = 2 * loss
    stats["loss/squared"] = (logp - ref_logp).square().mean()
""",
    "the ratio of a clip": """
def policy_loss(logprobs, old_logprobs, advantages):
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return -torch.min(ratio * advantages, clipped * advantages).mean()
""",
    "the ratio of a clip, called KL": """
def clip_loss(ppo_kl, advantages):
    ratio = (-ppo_kl).exp()
    return -(ratio * advantages).mean()

def policy_loss(logp, old_logp, advantages):
    ppo_kl = old_logp - logp
    loss = clip_loss(ppo_kl, advantages)
    return loss
""",
    "logged under no_grad": """
def policy_loss(logp, old_logp, advantages, metrics):
    ratio = torch.exp(logp - old_logp)
    with torch.no_grad():
        log_ratio = logp - old_logp
        metrics["approx_kl"] = ((ratio - 1) - log_ratio).mean().item()
    return -(ratio * advantages).mean()
""",
    "a reward that is only logged": """
class Trainer:
    def step(self, logprobs, ref_logprobs, scores):
        kl = logprobs - ref_logprobs
        rlhf_reward = scores - self.beta * kl.sum(1)
        self.stats["rlhf_reward"].append(rlhf_reward.mean().item())
""",
    "preferences": """
def dpo_loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, beta):
    pi = policy_chosen_logps - policy_rejected_logps
    ref = reference_chosen_logps - reference_rejected_logps
    return -F.logsigmoid(beta * (pi - ref)).mean()
""",
    "a margin of one preference": """
def kto_loss(policy_logps, reference_logps, beta, target):
    return 1 - F.sigmoid(beta * (policy_logps - reference_logps) * target).mean()
""",
    "the implicit reward of a preference": """
def bco_loss(policy_logps, reference_logps, beta, delta):
    rewards = beta * (policy_logps - reference_logps)
    return -F.logsigmoid(rewards - delta).mean()
""",
    "a margin of a preference, told beside its loss": """
def compute_loss(logprobs_w, logprobs_l, ref_logprobs_w, ref_logprobs_l, beta, more=False):
    logits = beta * ((logprobs_w - ref_logprobs_w) - (logprobs_l - ref_logprobs_l))
    loss = -F.logsigmoid(logits).mean()
    return (loss, dict(logits=logits)) if more else loss
""",
    "a reward that all callers put into a preference": """
def sequence_rewards(policy_logps, reference_logps):
    return (policy_logps - reference_logps).sum(-1)

def dpo_loss(good, bad, ref_good, ref_bad, beta):
    return -F.logsigmoid(beta * (sequence_rewards(good, ref_good) - sequence_rewards(bad, ref_bad))).mean()

def kto_loss(chosen_logps, ref_chosen_logps, beta):
    chosen_rewards = sequence_rewards(chosen_logps, ref_chosen_logps)
    return 1 - F.sigmoid(beta * chosen_rewards)
""",
    "a distance of logits": """
def kd_mse_loss(logits_S, logits_T):
    return F.mse_loss(logits_S / 2, logits_T / 2)
""",
    "entropy": """
def entropy_loss(logits, mask):
    logp = logits.log_softmax(-1)
    return -((logp.exp() * logp).sum(-1) * mask).sum()
""",
    "numbers of a dictionary of metrics": """
def compute_kl_sample_train(data, training_logprobs, mask):
    diffs = [(one.inputs["logprobs"] - new)[mask] for one, new in zip(data, training_logprobs)]
    flat = torch.cat(diffs)
    return {"optim/kl_v1": flat.mean().item(), "optim/kl_v2": 0.5 * (flat**2).mean().item()}
""",
    "the reward that a model is trained to give": """
def compute_implicit_reward(log_probs, ref_log_probs, beta):
    return beta * (log_probs - ref_log_probs)
""",
    "rewards in a dictionary of metrics": """
def step(logp, ref_logp, beta):
    metrics = {"rewards": beta * (logp - ref_logp)}
    stats.update({"advantage": (logp - ref_logp).mean().detach()})
    return {"loss": -logp.mean(), **metrics}
""",
    "rewards of preferences that are chosen and rejected": """
def bco_loss(policy_logps, reference_logps, beta, delta):
    reward_gap = beta * (policy_logps - reference_logps)
    chosen_rewards = reward_gap * chosen
    return -F.logsigmoid(chosen_rewards - delta).mean()
""",
    "a log-ratio to the sampler that nobody here calls": """
def sequence_kl(log_probs, old_log_probs, mask):
    kl = ((old_log_probs - log_probs) * mask).sum() / mask.sum()
    return kl.expand_as(log_probs)
""",
    "a loss of values": """
def value_loss(values, old_values, returns):
    return 0.5 * ((values - returns) ** 2).mean() + (values - old_values).abs().mean()
""",
    "cross-entropy": """
def sft_loss(logits, labels):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))
""",
    "an adaptive coefficient": """
class Controller:
    def update(self, logp, ref_logp):
        with torch.no_grad():
            self.stats["kl"] = (logp - ref_logp).mean().item()
""",
    "a mask of rollouts far off": """
def mask_of(logp, old_logp, mask, limit):
    seq_kl = ((old_logp - logp) * mask).sum(-1) / mask.sum(-1)
    return (seq_kl < limit).float()
""",
    "a log-ratio of which only the shape is read": """
def sequence_loss(logp, old_logp, advantages, mask):
    log_ratio = logp - old_logp
    adv = (advantages * mask).sum(-1, keepdim=True).expand_as(log_ratio)
    return -(adv * torch.exp(log_ratio) * mask).sum()
""",
    "the ratio of a sequence": """
def gspo_loss(logp, old_logp, advantages, mask):
    log_ratio = ((logp - old_logp) * mask).sum(-1) / mask.sum(-1)
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    return -torch.min(ratio * advantages, clipped * advantages).mean()
""",
    "a ratio that is clipped and detached": """
def cispo_loss(per_token_logps, old_per_token_logps, advantages, mask, epsilon_high):
    ratio = torch.exp(per_token_logps - old_per_token_logps)
    weight = torch.clamp(ratio, max=epsilon_high).detach()
    per_token_loss = -weight * advantages.unsqueeze(1) * per_token_logps
    return (per_token_loss * mask).sum() / mask.sum()
""",
    "a squared margin": """
def ipo_loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, beta):
    logits = (policy_chosen_logps - policy_rejected_logps) - (reference_chosen_logps - reference_rejected_logps)
    return ((logits - 1 / (2 * beta)) ** 2).mean()
""",
    "a margin without a reference": """
def simpo_loss(chosen_logps, rejected_logps, beta, gamma):
    return -F.logsigmoid(beta * (chosen_logps - rejected_logps) - gamma).mean()
""",
    "implicit rewards beside a loss of preferences": """
def dpo_loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, beta):
    logits = policy_chosen_logps - policy_rejected_logps - reference_chosen_logps + reference_rejected_logps
    losses = -F.logsigmoid(beta * logits)
    chosen_rewards = beta * (policy_chosen_logps - reference_chosen_logps).detach()
    rejected_rewards = beta * (policy_rejected_logps - reference_rejected_logps).detach()
    return losses, chosen_rewards, rejected_rewards
""",
    "an entropy bonus": """
def policy_loss(logits, logp, old_logp, advantages, mask, entropy_coef):
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    pg_loss = -(torch.exp(logp - old_logp) * advantages * mask).sum()
    return pg_loss - entropy_coef * (entropy * mask).sum()
""",
    "an approximate KL that stops an epoch early": """
def update(policy, batch, optimizer, target_kl, mask):
    for _ in range(4):
        logp = policy.log_prob(batch["tokens"])
        log_ratio = logp - batch["old_logp"]
        loss = -(log_ratio.exp() * batch["advantages"] * mask).mean()
        with torch.no_grad():
            approx_kl = ((log_ratio.exp() - 1) - log_ratio).mean()
        if approx_kl > 1.5 * target_kl:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    "implicit rewards, of which pairs are taken": """
def dpo_forward(policy_logps, ref_logps, losses, mask, half):
    rewards = policy_logps.sum(-1) - ref_logps.sum(-1)
    chosen_rewards, rejected_rewards = rewards[:half], rewards[half:]
    return (losses * mask).mean(), chosen_rewards, rejected_rewards
""",
    "a log-ratio times zero": """
def policy_loss(logp, old_logp, advantages, mask):
    log_ratio = logp - old_logp
    pg_loss = -(log_ratio.exp() * advantages * mask).sum()
    return pg_loss + torch.tensor(0.0) * (log_ratio * mask).sum()
""",
    "a clipped loss of values": """
def value_loss(values, old_values, returns, mask, clip):
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return 0.5 * (torch.max((values - returns) ** 2, (clipped - returns) ** 2) * mask).sum() / mask.sum()
""",
}
NONE_NOT_YET = {
    "a distance of logits": "logits that are not normalised are taken to be log-probs",
    "a reward that is only logged": "a variable called reward counts, whatever becomes of it",
    "a reward that all callers put into a preference": "a helper is not told by its callers",
    "a log-ratio to the sampler that nobody here calls": "a helper whose name says KL",
}


@pytest.mark.parametrize("name", cases(TERMS, TERMS_NOT_YET))
def test_a_term_is_found_once_with_its_place(name: str, tmp_path: Path) -> None:
    text, place = TERMS[name]
    terms = found(tmp_path, text)
    assert [{one.place for one in its if one.called} for _, its in terms] == [{place}]


@pytest.mark.parametrize("name", cases(NONE, NONE_NOT_YET))
def test_what_looks_like_a_term_is_not_found(name: str, tmp_path: Path) -> None:
    assert [(find.lines, [one.formula for one in its]) for find, its in found(tmp_path, NONE[name])] == []


def test_lines_are_those_of_the_expression(tmp_path: Path) -> None:
    ((find, _),) = found(tmp_path, TERMS["k3 in the loss"][0])
    lines = (tmp_path / "code.py").read_text().splitlines()
    assert [lines[line - 1].strip().partition(" = ")[0] for line in find.lines] == ["kl"]


def test_nothing_of_the_tree_is_executed_while_looking(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"open({str(mark)!r}, 'w').close()\n" + TERMS["a helper"][0]
    assert len(found(tmp_path, text)) == 1
    assert not mark.exists()


PACKAGE = Path(__file__).parents[2] / "kltest"
LISTED = """
import sys
from pathlib import Path
from kltest.scanning.search import Search
from kltest.scanning.sources import contents
from kltest.scanning.store import Store
print([(row.to_dict(), row.against) for row in Search(list(contents(map(Path, sys.argv[1:]), [])), Store(None))])
"""


@pytest.mark.scheduled
def test_our_own_estimators_are_found() -> None:
    """All but those that weigh a rollout's score by its worth in its group, have a tail bucket, or call full-loss."""
    rows = Search(list(contents([PACKAGE / "estimators"], [])), Store(None))
    known = {row.function.replace("_", "-") for row in rows}
    assert set(registry()) - known == {
        *("group-mean", "group-std", "leave-one-out"),
        *("forward-kl-topk-tail", "reverse-kl-topk-tail", "full-reward", "rao-blackwell"),
    }


OF_THREE = """
def loss(logp, ref_logp, mask, weight=0.0, scale=0.0, offset=0.0):
    log_ratio = logp - ref_logp
    kl = log_ratio.square() if weight + scale + offset > 1 else log_ratio.exp() - log_ratio
    return (kl * mask).sum(-1).mean()
"""


@pytest.mark.scheduled
def test_what_is_found_does_not_depend_on_how_words_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(OF_THREE, encoding="utf-8")
    folders = (PACKAGE / "checks" / "sequences", PACKAGE / "adapters" / "trl", tmp_path)
    command = [sys.executable, "-c", LISTED, *map(str, folders)]
    told = {
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert told.pop().count(b"'function'") >= 5
