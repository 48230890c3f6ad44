"""What is lifted out of a function computes what the function does; what cannot be is refused with its reason."""

import math
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch

from kltest.scanning.follow import tree_of
from kltest.scanning.lift import NAME, Lifted, lifted
from kltest.scanning.sources import sources
from kltest.scanning.terms import terms

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
Fields = dict[str, torch.Tensor]


def k3(given: Fields) -> torch.Tensor:
    return torch.exp(given["ref_logp"] - given["logp"]) - (given["ref_logp"] - given["logp"]) - 1


def k2(given: Fields) -> torch.Tensor:
    return (given["logp"] - given["ref_logp"]) ** 2 / 2


def gap(given: Fields) -> torch.Tensor:
    return (given["logp"] - given["ref_logp"]).abs()


def live(value: Callable[[Fields], torch.Tensor]) -> Callable[[Fields], torch.Tensor]:
    return lambda given: (value(given) * given["mask"]).sum()


def forward_kl(given: Fields) -> torch.Tensor:
    return (given["ref_logits"].exp() * (given["ref_logits"] - given["logits"])).sum()


def row_means(value: Callable[[Fields], torch.Tensor]) -> Callable[[Fields], torch.Tensor]:
    return lambda given: ((value(given) * given["mask"]).sum(1) / given["mask"].sum(1)).mean()


def rollouts() -> Fields:
    """Five rollouts of four tokens over three, masks of several lengths; full fields are log-probs."""
    random = torch.Generator().manual_seed(0)
    whole = {f"{who}logits": torch.randn(5, 4, 3, generator=random, dtype=torch.float64).log_softmax(-1)
             for who in ("", "ref_", "old_")}  # fmt: skip
    tokens = torch.randint(3, (5, 4), generator=random)
    sampled = {
        name.replace("logits", "logp"): value.gather(-1, tokens[..., None])[..., 0] for name, value in whole.items()
    }
    mask = (torch.arange(4) < torch.tensor([[1], [2], [4], [3], [4]])).double()
    return {**whole, **sampled, "tokens": tokens, "mask": mask, "beta": torch.tensor(0.7), "reward": torch.randn(5)}


def variants(folder: Path, text: str, *, logged: bool = False, **more: str) -> list[Lifted]:
    for name, other in {"code": HEAD + text, **more}.items():
        file = folder / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(other)
    tree = tree_of(list(sources([folder], [])))
    return [variant for term in terms(tree, logged=logged) for variant in lifted(tree, term)]


def value_of(variant: Lifted) -> torch.Tensor:
    assert variant.refused == ""
    names: dict[str, object] = {}
    exec(HEAD + "import math\nimport torch as jnp\n\n" + variant.source, names)
    return names[NAME](**{name: rollouts()[name] for name in variant.fields})  # type: ignore[operator,no-any-return]


LOOPS = {
    "chunks that are added up": ("""
def loss(logp, ref_logp, chunk, beta):
    total = 0.0
    n = logp.shape[0]
    for i in range(0, n, chunk):
        d = ref_logp[i : i + chunk] - logp[i : i + chunk]
        total += (torch.exp(d) - d - 1).sum()
    return beta * total / n
""", lambda given: 0.7 * k3(given).sum() / 5),
    "a list of rollouts": ("""
def loss(logp, ref_logp, mask):
    kls = []
    for i in range(len(logp)):
        d = ref_logp[i] - logp[i]
        kls.append(((d.exp() - d - 1) * mask[i]).sum() / mask[i].sum())
    return torch.stack(kls).mean()
""", row_means(k3)),
    "rollouts side by side": ("""
def loss(logps, ref_logps, masks):
    kls = []
    for lp, rlp, m in zip(logps, ref_logps, masks):
        kls.append(((lp - rlp) ** 2 * m).sum())
    loss = sum(kls) / len(kls)
    return loss
""", lambda given: 2 * live(k2)(given) / 5),
    "added to a loss of another kind": ("""
def loss(logp, ref_logp, advantages, mask):
    loss = -(advantages * logp).sum()
    for i in range(len(logp)):
        loss = loss + ((logp[i] - ref_logp[i]).abs() * mask[i]).sum()
    return loss
""", live(gap)),
    "generated": ("""
def loss(logps, ref_logps, masks):
    return sum(((a - b).abs() * m).sum() for a, b, m in zip(logps, ref_logps, masks)) / len(logps)
""", lambda given: live(gap)(given) / 5),
    "chunks of what a model gives": ("""
def loss(model, ids, ref_logps, mask, chunk_size):
    total = 0.0
    for start in range(0, ids.shape[0], chunk_size):
        chunk_ids = ids[start : start + chunk_size]
        chunk_logps = compute_logps(model, chunk_ids)
        gap = (ref_logps[start : start + chunk_size] - chunk_logps).abs()
        total += (gap * mask[start : start + chunk_size]).sum()
    return total
""", live(gap)),
    "mini-batches by indices, dropped by a guard": ("""
def epoch(batch, ref_logps, actor, args):
    order = torch.randperm(len(ref_logps))
    for i in range(0, len(order), args.size):
        inds = order[i : i + args.size]
        logps = actor(batch)[inds]
        loss = (((ref_logps[inds] - logps).abs()) * batch["mask"][inds]).sum()
        if args.stop:
            loss = loss * 0.0
        loss.backward()
""", live(gap)),
    "epochs and mini-batches are entered once": ("""
def loss(self, loader, epochs):
    for _ in range(epochs):
        for batch in loader:
            d = batch["ref_logps"] - batch["logps"]
            loss = ((d.exp() - d - 1) * batch["mask"]).sum()
            loss.backward()
""", live(k3)),
}  # fmt: skip
NAMES = {
    "a cross-entropy less an entropy": ("""
def entropy(logits):
    return -(F.softmax(logits, -1) * F.log_softmax(logits, -1)).sum(-1)

def cross_entropy(logits_1, logits_2, inf_mask, parallel=False):
    if parallel:
        raise NotImplementedError
    return -(F.softmax(logits_1, -1) * F.log_softmax(logits_2, -1).masked_fill(inf_mask, 0)).sum(-1)

def reg_loss(self, logits, batch, inf_mask, mask):
    t_logits = self.compute_logits(batch, base="teacher")
    xent, ent = cross_entropy(logits, t_logits, inf_mask, self.args.parallel), entropy(logits)
    return ((xent - ent) * mask).sum()
""", live(lambda given: (given["logits"].exp() * (given["logits"] - given["ref_logits"])).sum(-1))),
    "a mixture of two helpers that read a batch": ("""
def forward_kl(logits, teacher_logits, batch):
    kl = F.softmax(teacher_logits, -1) * (F.log_softmax(teacher_logits, -1) - F.log_softmax(logits, -1))
    return (kl.sum(-1) * (batch["label"] != -100)).sum()

def reverse_kl(logits, teacher_logits, batch):
    kl = F.softmax(logits, -1) * (F.log_softmax(logits, -1) - F.log_softmax(teacher_logits, -1))
    return (kl.sum(-1) * (batch["label"] != -100)).sum()

def symmetric_kl(logits, teacher_logits, batch, lam=0.9):
    there = forward_kl(logits, teacher_logits, batch)
    back = reverse_kl(logits, teacher_logits, batch)
    distil_loss = (1 - lam) * there + lam * back
    return distil_loss
""", lambda given: ((0.1 * given["ref_logits"].exp() - 0.9 * given["logits"].exp()).mul(
        given["ref_logits"] - given["logits"]).sum(-1) * given["mask"]).sum()),
    "a divergence of optax, at a temperature of a schedule": ("""
class Distil:
    def soft_loss(self, s_logits, t_logits, step):
        weight, temperature = self.schedule(step)
        log_s, t = F.log_softmax(s_logits / temperature, -1), F.softmax(t_logits / temperature, -1)
        return optax.kl_divergence(log_s, t).sum()
""", forward_kl),
    "one after the other by a generator": ("""
def loss(policy, ref_policy, batch, entropy_coef):
    logits, ref_logits = policy(batch), ref_policy(batch)
    logits, ref_logits = tuple(each[..., :] for each in (logits, ref_logits))
    kl = F.kl_div(F.log_softmax(logits, -1), F.softmax(ref_logits, -1), reduction="sum")
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    return kl - entropy * entropy_coef
""", forward_kl),
    "one key in two places": ("""
def loss(self, batch, episode):
    penalty = (episode["logprobs"] - batch["logprobs"]).sum()
    kl_penalty = penalty
    return -episode["gain"].sum() + 0.5 * kl_penalty
""", lambda given: 0.5 * (given["logp"] - given["old_logp"]).sum()),
    "a share of a mixture": ("""
def skewed_kl_loss(self, logits, teacher_logits):
    p, q = torch.softmax(teacher_logits, -1), torch.softmax(logits, -1)
    mixed_logprobs = torch.log(self.args.skew_lambda * p + (1 - self.args.skew_lambda) * q)
    return (p * (torch.log_softmax(teacher_logits, -1) - mixed_logprobs)).sum()
""", lambda given: (given["ref_logits"].exp() * (given["ref_logits"] - torch.log(
        (given["ref_logits"].exp() + given["logits"].exp()) / 2))).sum()),
    "a number that is made a tensor": ("""
def jsd_loss(student_logits, teacher_logits, beta=0.5):
    student, teacher = F.log_softmax(student_logits, -1), F.log_softmax(teacher_logits, -1)
    beta = torch.tensor(beta, dtype=student.dtype)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]), dim=0)
    return F.kl_div(mixture, teacher, reduction="none", log_target=True).sum()
""", lambda given: (given["ref_logits"].exp() * (given["ref_logits"] - torch.log(
        (given["ref_logits"].exp() + given["logits"].exp()) / 2))).sum()),
    "how many logits are kept": ("""
def token_logprobs(model, ids, mask, logits_to_keep):
    return model(ids, mask).logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

def grpo_loss(model, rollouts, beta):
    ids, mask, logits_to_keep = rollouts["ids"], rollouts["mask"], rollouts["logits_to_keep"]
    old_log_probs, ref_log_probs = rollouts["old_log_probs"], rollouts["ref_log_probs"]
    log_probs = token_logprobs(model, ids, mask, logits_to_keep)
    ratio = torch.exp(log_probs - old_log_probs)
    kl = torch.exp(ref_log_probs - log_probs) - (ref_log_probs - log_probs) - 1
    loss = (beta * kl - ratio * rollouts["advantages"]).sum()
    return loss
""", lambda given: 0.7 * k3(given).sum()),
    "log-probs of what gives an entropy beside them": ("""
def logp_and_entropy(model, ids, more=False):
    logp = model(ids).logits.log_softmax(-1)
    picked_logp = logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if not more:
        return picked_logp
    return picked_logp, -(logp.exp() * logp).sum(-1).mean()

def loss(model, ref_model, ids, mask, beta):
    new_logp, ref_logp = logp_and_entropy(model, ids), logp_and_entropy(ref_model, ids)
    kl_loss = beta * ((new_logp - ref_logp) * mask).sum()
    return kl_loss
""", lambda given: 0.7 * ((given["logp"] - given["ref_logp"]) * given["mask"]).sum()),
    "a ratio that is called a coefficient": ("""
def loss(self, logp, inputs):
    old_logp, ref_logp = inputs["old_logp"], inputs["ref_logp"]
    log_ratio = logp - old_logp
    coef_1 = torch.exp(log_ratio)
    per_token_kl = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1
    per_token_kl = per_token_kl * coef_1
    return (self.beta * per_token_kl).sum()
""", lambda given: 0.7 * (k3(given) * (given["logp"] - given["old_logp"]).exp()).sum()),
    "a number called by one letter": ("""
def kd_loss(student_logits, teacher_logits, T=1.0):
    s, t = F.log_softmax(student_logits / T, -1), F.softmax(teacher_logits / T, -1)
    return F.kl_div(s, t, reduction="sum") * T**2
""", forward_kl),
    "a temperature that may be a tensor": ("""
def kd_loss(logits, teacher_logits, temperature=1):
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        temperature = temperature.unsqueeze(-1)
    return -(F.softmax(teacher_logits / temperature, -1) * F.log_softmax(logits / temperature, -1)).sum()
""", lambda given: -(given["ref_logits"].exp() * given["logits"]).sum()),
    "a cross-entropy of s and t": ("""
def kd_ce_loss(logits_S, logits_T):
    beta_logits_T, beta_logits_S = logits_T / 1.0, logits_S / 1.0
    p_T = F.softmax(beta_logits_T, dim=-1)
    return -(p_T * F.log_softmax(beta_logits_S, dim=-1)).sum()
""", lambda given: -(given["ref_logits"].exp() * given["logits"]).sum()),
    "a target beside logits": ("""
def dense_kl_loss(logits, target_logits):
    mine, theirs = torch.log_softmax(logits, -1), torch.log_softmax(target_logits, -1)
    return F.kl_div(input=mine, target=theirs, reduction="none", log_target=True).sum()
""", forward_kl),
    "lprobs": ("""
def reverse_kl_loss(logits, teacher_logits):
    probs, lprobs = torch.softmax(logits, -1), torch.log_softmax(logits, -1)
    teacher_lprobs = torch.log_softmax(teacher_logits, -1)
    return (probs * (lprobs - teacher_lprobs)).sum()
""", lambda given: (given["logits"].exp() * (given["logits"] - given["ref_logits"])).sum()),
    "a guard against what is not there": ("""
def loss(model, ref_model, rolls, mask, beta):
    if beta and ref_model is None:
        raise ValueError("a reference is needed")
    logps, ref_logps = get_logps(model, rolls), get_logps(ref_model, rolls)
    total = torch.tensor(0.0)
    if ref_model is not None and rolls is not None:
        total = total + beta * ((logps - ref_logps).abs() * mask).sum()
    return total
""", lambda given: 0.7 * live(gap)(given)),
    "assigned within an expression": ("""
def loss(logp, ref_logp, mask):
    return (((d := ref_logp - logp).exp() - d - 1) * mask).sum()
""", live(k3)),
    "one of several results of a helper": ("""
def parts(d, mask):
    return (d.abs() * mask).sum(), mask.sum()

def loss(logp, ref_logp, mask):
    total, count = parts(logp - ref_logp, mask)
    return total / count
""", lambda given: live(gap)(given) / given["mask"].sum()),
    "a method, inherited": ("""
class Other:
    def penalty(self, d):
        return d.square()

class Base:
    def penalty(self, d):
        return self.scale(d.abs())
    @staticmethod
    def scale(d):
        return 2 * d

class Loss(Base):
    def compute_loss(self, logp, ref_logp, mask):
        return (self.penalty(logp - ref_logp) * mask).sum()
""", lambda given: 2 * live(gap)(given)),
    "a lambda": ("""
def loss(logp, ref_logp, mask):
    k = lambda d: d.exp() - d - 1
    return (k(ref_logp - logp) * mask).sum()
""", live(k3)),
    "a partial, whose names state no side": ("""
import functools

def distance(a, b, power):
    return (a - b).abs() ** power
kl_fn = functools.partial(distance, power=1)

def loss(logp, ref_logp, mask):
    return (kl_fn(logp, ref_logp) * mask).sum()
""", live(gap)),
    "a partial that a constructor keeps": ("""
from functools import partial

def distance(a, b, power, scale=1):
    return scale * (a - b).abs() ** power

class Trainer:
    def __init__(self):
        self.kl_fn = partial(distance, power=1, scale=3)
    def compute_loss(self, logp, ref_logp, mask):
        return (self.kl_fn(logp, ref_logp, scale=2) * mask).sum()
""", lambda given: 2 * live(gap)(given)),
    "modules and functions under other names": ("""
import torch as th
from torch.nn.functional import log_softmax as lsm

def kd_loss(student_logits, teacher_logits):
    gap = lsm(teacher_logits, -1) - lsm(student_logits, -1)
    return th.sum(th.exp(lsm(teacher_logits, -1)) * gap)
""", forward_kl),
    "divergences of distributions": ("""
from torch.distributions import Categorical, kl_divergence

def loss(logits, ref_logits):
    return kl_divergence(Categorical(logits=ref_logits), Categorical(logits=logits)).sum()
""", forward_kl),
    "a module that the constructor makes": ("""
class Trainer:
    def __init__(self):
        self.kl = nn.KLDivLoss(reduction="sum", log_target=True)
    def loss(self, student_logits, teacher_logits):
        return self.kl(student_logits.log_softmax(-1), teacher_logits.log_softmax(-1))
""", forward_kl),
    "normalised by hand": ("""
def kd_loss(student_logits, teacher_logits):
    s = student_logits - student_logits.logsumexp(-1, keepdim=True)
    t = teacher_logits - teacher_logits.logsumexp(-1, keepdim=True)
    return (t.exp() * (t - s)).sum()
""", forward_kl),
    "changed under its own name, and divided by something unknown": ("""
def loss(logp, ref_logp, weights):
    kl = (logp - ref_logp).abs()
    kl = kl * 2
    loss = kl.sum() / weights.of_somebody()
    return loss
""", lambda given: 2 * gap(given)),
    "options kept by a constructor, and a temperature without a default": ("""
FACTOR = 0.5

class KDConfig:
    scale: float = field(default=3.0)

class Distil:
    def __init__(self, args, floor=1.0):
        self.temp = args.temperature
        self.scale = args.scale
        self.factor = getattr(args, "factor", 2.0)
        self.floor = floor
    def kd_loss(self, logits, teacher_logits):
        q = (logits / self.temp).log_softmax(-1)
        p = torch.softmax(teacher_logits / self.temp, -1)
        return self.scale * (p * (p.log() - q)).sum() * self.factor ** self.floor * FACTOR
""", lambda given: 3 * forward_kl(given)),
    "a mask computed from tokens, its inverse, and lists of chunks": ("""
def train(policy, data, args):
    logprobs, ref_logprobs, responses = [], [], []
    for i in range(0, len(data), args.chunk):
        response = generate(policy, data[i : i + args.chunk])
        responses.append(response)
        logprobs.append(policy.logprob(response))
        ref_logprobs.append(reference.logprob(response))
    responses = torch.cat(responses, 0)
    logprobs = torch.cat(logprobs, 0)
    ref_logprobs = torch.cat(ref_logprobs, 0)
    ends = (responses == args.eos).int().argmax(dim=1)
    padding_mask = torch.arange(responses.shape[1]) > ends.unsqueeze(1)
    kl = torch.masked_fill((logprobs - ref_logprobs).abs(), padding_mask, 0)
    loss = kl.sum()
    loss.backward()
""", live(gap)),
    "what models give": ("""
def scores_of(net, batch):
    out = net(batch["input_ids"]).logits.log_softmax(-1)
    return out.gather(-1, batch["labels"][..., None])[..., 0]

def loss(policy_model, frozen, batch, labels_mask):
    x = scores_of(policy_model, batch)
    with torch.no_grad():
        y = frozen.get_log_probs(batch)
    return ((y - x).abs() * labels_mask[..., 1:]).sum()
""", live(gap)),
    "a mixture, called a target": ("""
def loss(student_logps, teacher_logps, mask):
    target_logps = torch.logaddexp(student_logps, teacher_logps) - 0.7
    return ((student_logps - target_logps).abs() * mask).sum()
""", live(lambda given: (given["logp"] - torch.logaddexp(given["logp"], given["ref_logp"]) + 0.7).abs())),
    "a skewed divergence, written out": ("""
def kd_loss(student_logits, teacher_logits):
    p, q = F.softmax(teacher_logits, -1), F.softmax(student_logits, -1)
    between = torch.log(0.1 * p + 0.9 * q)
    return -(p * between).sum()
""", lambda given: -(given["ref_logits"].exp()
                     * (0.1 * given["ref_logits"].exp() + 0.9 * given["logits"].exp()).log()).sum()),
    "the Jensen-Shannon divergence, written out": ("""
def kd_loss(student_logits, teacher_logits):
    p, q = F.softmax(teacher_logits, -1), F.softmax(student_logits, -1)
    m = 0.5 * (p + q)
    one = (p * (p.log() - m.log())).sum()
    other = (q * (q.log() - m.log())).sum()
    return 0.5 * one + 0.5 * other
""", lambda given: 0.5 * sum(
        (one * (one.log() - (one + other).log() + math.log(2))).sum()
        for one, other in permutations((given["ref_logits"].exp(), given["logits"].exp())))),
    "live tokens, called a mask of padding": ("""
def mean(values, mask):
    return (values * mask).sum() / mask.sum()

def loss(logp, ref_logp, padding_masks):
    return mean((logp - ref_logp).abs(), padding_masks)
""", lambda given: live(gap)(given) / given["mask"].sum()),
    "a relative entropy by its name": ("""
from scipy.special import rel_entr

def kd_loss(student_logits, teacher_logits):
    p, q = student_logits.softmax(-1), teacher_logits.softmax(-1)
    return rel_entr(q, p).sum()
""", forward_kl),
    "a cross-entropy by its name": ("""
def kd_loss(student_logits, teacher_logits):
    return -torch.special.xlogy(teacher_logits.softmax(-1), student_logits.softmax(-1)).sum()
""", lambda given: -(given["ref_logits"].exp() * given["logits"]).sum()),
    "parts that are kept in a dictionary": ("""
def loss(logp, ref_logp, mask):
    parts = {"policy": -logp}
    parts["kl"] = (logp - ref_logp).abs()
    parts["kl"] *= 3
    total_loss = ((parts["policy"] + parts["kl"]) * mask).sum()
    log(parts)
    return total_loss
""", lambda given: 3 * live(gap)(given)),
    "parts that are fields of an object": ("""
class Parts(NamedTuple):
    policy: torch.Tensor
    kl: torch.Tensor

def loss(logp, ref_logp, mask):
    parts = Parts(policy=-logp, kl=(logp - ref_logp).abs())
    return ((parts.policy + 0.5 * parts.kl) * mask).sum()
""", lambda given: 0.5 * live(gap)(given)),
    "one mask under two names": ("""
def loss(logp, ref_logp, inputs):
    completion_mask = inputs["completion_mask"]
    mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]
    return ((logp - ref_logp).abs() * mask).sum()
""", live(gap)),
    "a reduction of a part": ("""
def loss(logp, ref_logp, mask):
    k = (logp - ref_logp).abs() * mask[:, :]
    return k.sum() / mask[0:].sum()
""", lambda given: live(gap)(given) / given["mask"].sum()),
}  # fmt: skip


def of_rollouts(value: Callable[..., torch.Tensor], *, mean: bool = False) -> Callable[[Fields], torch.Tensor]:
    """A formula of the sums, or means, of a rollout's log-probs over its live tokens."""

    def taken(given: Fields) -> torch.Tensor:
        count = given["mask"].sum(1) if mean else 1
        return value(*((given[f"{who}logp"] * given["mask"]).sum(1) / count for who in ("", "ref_", "old_")))

    return taken


ADDED_UP = """
def seq(model, ids, start, average=False):
    logp = torch.log_softmax(model(ids), -1)[:-1].gather(1, ids[1:, None]).squeeze(-1)[start:]
    return logp.mean() if average else logp.sum()

"""
ROLLOUTS = {
    "a stack of sums": (ADDED_UP + """
def loss(model, ref_model, rolls):
    logps = torch.stack([seq(model, *each) for each in rolls])
    ref_logps = torch.stack([seq(ref_model, *each) for each in rolls])
    return ((logps - ref_logps) ** 2).mean()
""", of_rollouts(lambda new, ref, old: ((new - ref) ** 2).mean())),
    "listed in a loop, with a second result": ("""
def seq(model, ids, more=False):
    logp = model(ids).log_softmax(-1).gather(1, ids[:, None])
    total = torch.sum(logp)
    if not more:
        return total
    return total, -logp.mean()

def loss(model, ref_model, rolls, old_logps):
    new_logps, ref_logps = [], []
    for ids in rolls:
        new_logp, entropy = seq(model, ids, more=True)
        new_logps.append(new_logp)
        ref_logps.append(seq(ref_model, ids))
    new_logps = torch.stack(new_logps)
    ref_logps = torch.stack(ref_logps).detach()
    return (torch.exp(new_logps - old_logps) * (new_logps - ref_logps)).mean()

def train(model, ref_model, rolls, mask, token_logps):
    loss(model, ref_model, rolls, (token_logps * mask).sum(-1)).backward()
""", of_rollouts(lambda new, ref, old: ((new - old).exp() * (new - ref)).mean())),
    "a helper's callers hand in sums": ("""
def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - (ref_logp - logp) - 1

def get_logps(logits, labels, mask, average=False):
    each = torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    if average:
        return (each * mask).sum(-1) / mask.sum(-1)
    return (each * mask).sum(-1)

def train(model, ref_model, ids, labels, mask):
    loss = k3(get_logps(model(ids), labels, mask), get_logps(ref_model(ids), labels, mask)).mean()
    loss.backward()
""", of_rollouts(lambda new, ref, old: (ref - new).exp() - (ref - new) - 1)),
    "called where they meet": (ADDED_UP.replace("seq(", "seq_logp(") + """
def loss(model, ref_model, ids, start):
    gap = seq_logp(model, ids, start) - seq_logp(ref_model, ids, start)
    return gap.abs().mean()
""", of_rollouts(lambda new, ref, old: (new - ref).abs().mean())),
    "means": (ADDED_UP + """
def loss(model, ref_model, rolls):
    logps = torch.stack([seq(model, *each, average=True) for each in rolls])
    ref_logps = torch.stack([-ref_model(each, labels=each).loss for each in rolls])
    return (logps - ref_logps).abs().mean()
""", of_rollouts(lambda new, ref, old: (new - ref).abs().mean(), mean=True)),
    "a sum over tokens in its own statement": ("""
def loss(model, ids, ref_logps):
    logps = model(ids).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1).sum(-1)
    return (logps - ref_logps.sum(-1)).abs().mean()
""", lambda given: ((given["logp"] * given["mask"]).sum(1) - given["ref_logp"].sum(1)).abs().mean()),
    "a mask of rows beside that of tokens": ("""
def loss(self, batch, logps, ref_logps):
    rows_mask = batch.get("distillation_mask")
    if rows_mask is None:
        mask = batch["completion_mask"]
    else:
        mask = batch["completion_mask"] * rows_mask.unsqueeze(1)
    return ((logps - ref_logps).abs() * mask).sum() / mask.sum()
""", lambda given: live(gap)(given) / given["mask"].sum()),
    "labels that are there, though they need not be": ("""
def loss(logits, teacher_logits, labels=None):
    kl = F.kl_div(logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    if labels is not None:
        kl = kl[labels != -100]
    return kl.sum()
""", live(lambda given: (given["ref_logits"].exp() * (given["ref_logits"] - given["logits"])).sum(-1))),
    "called that of a sequence": ("""
def loss(seq_logps, ref_seq_logps):
    return (seq_logps - ref_seq_logps).abs().mean()
""", of_rollouts(lambda new, ref, old: (new - ref).abs().mean())),
    "called that of a sequence, and masked": ("""
def loss(seq_logps, ref_seq_logps, mask):
    kl = (seq_logps - ref_seq_logps).abs()
    return (kl * mask).sum()
""", live(gap)),
    "one-hot tokens are added up over the vocabulary": ("""
def loss(model, ids, ref_logps, mask, vocabulary):
    logps = (model(ids).log_softmax(-1) * F.one_hot(ids, vocabulary)).sum(-1)
    return ((logps - ref_logps).abs() * mask).sum()
""", live(gap)),
    "prefixes": ("""
def loss(per_token_logps, ref_per_token_logps, mask):
    logps, ref_logps = (per_token_logps * mask).cumsum(-1), (ref_per_token_logps * mask).cumsum(-1)
    return ((logps - ref_logps).abs() * mask).sum()
""", lambda given: (((given["logp"] - given["ref_logp"]) * given["mask"]).cumsum(1).abs() * given["mask"]).sum()),
}  # fmt: skip
EMPTY = {
    "an empty batch": "    return kl.mean() if mask.any() else kl.sum() * 0.0",
    "a number of tokens": "    total = count(mask)\n    return kl.mean() if total else torch.tensor(0.0)",
    "a return before": "    if not mask.any():\n        return logp.sum() * 0.0\n    return kl.mean()",
    "numbers that are not finite": "    kl = kl.mean()\n    if not torch.isfinite(kl):\n        kl *= 2\n    return kl",
    "zeros": "    if fits(mask):\n        kl = kl.mean()\n    else:\n        kl = torch.zeros_like(kl)\n    return kl",
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_a_batch_of_which_nothing_is_left_is_no_configuration(name: str, tmp_path: Path) -> None:
    text = f"def loss(logp, ref_logp, mask):\n    kl = (logp - ref_logp).abs() * mask\n{EMPTY[name]}\n"
    (only,) = variants(tmp_path, text)
    torch.testing.assert_close(value_of(only), live(gap)(rollouts()) / 20)


@pytest.mark.parametrize("name", [*LOOPS, *NAMES, *ROLLOUTS])
def test_what_is_lifted_computes_what_the_function_does(name: str, tmp_path: Path) -> None:
    text, expected = {**LOOPS, **NAMES, **ROLLOUTS}[name]
    *helpers, only = variants(tmp_path, text)
    assert all(each.place == "helper" for each in helpers)
    torch.testing.assert_close(value_of(only), expected(rollouts()))


TABLES = {
    "a table": """
def k1(a, b):
    return a - b

KINDS = {"k1": k1, "k2": lambda a, b: (a - b) ** 2 / 2}
""",
    "a registry": """
KINDS = {}

def register(name):
    def wrap(function):
        KINDS[name] = function
        return function
    return wrap

@register("k1")
def plain(a, b):
    return a - b

@register("k2")
def squared(a, b):
    return (a - b) ** 2 / 2
""",
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_functions_makes_a_variant_of_each(name: str, tmp_path: Path) -> None:
    loss = """
def loss(logp, ref_logp, mask, kind):
    return (KINDS[kind](logp, ref_logp) * mask).sum()
"""
    found = {variant.variant: value_of(variant) for variant in variants(tmp_path, TABLES[name] + loss)}
    assert sorted(found) == ["kind='k1'", "kind='k2'"]
    torch.testing.assert_close(found["kind='k2'"], live(k2)(rollouts()))
    torch.testing.assert_close(found["kind='k1'"], live(lambda given: given["logp"] - given["ref_logp"])(rollouts()))


def test_a_match_statement_makes_a_variant_of_each_case(tmp_path: Path) -> None:
    text = """
def kl_penalty(logp, ref_logp, kind):
    d = logp - ref_logp
    match kind:
        case "k1" | "kl":
            return d
        case "k2":
            return d.square() / 2
        case _:
            raise ValueError(kind)
"""
    found = {variant.variant: value_of(variant) for variant in variants(tmp_path, text)}
    assert sorted(found) == ["kind='k1'", "kind='k2'"]
    torch.testing.assert_close(found["kind='k2'"], k2(rollouts()))


@pytest.mark.parametrize(
    ("names", "call", "place", "fields"),
    [
        ("a b", 'log_probs_a=batch["logprobs"], log_probs_b=batch["init_logprobs"]', "reward", "logp ref_logp"),
        ("1 2", 'batch["init_logprobs"], batch["logprobs"]', "reward", "ref_logp logp"),
        ("1 2", 'batch["old_logprobs"], batch["logprobs"]', "reward", "old_logp logp"),
        ("a b", "", "helper", "logp ref_logp"),
        ("s t", "", "helper", "logp ref_logp"),
    ],
)
def test_twins_of_names_are_whose_their_callers_say(
    names: str, call: str, place: str, fields: str, tmp_path: Path
) -> None:
    one, other = (f"log_probs_{mark}" for mark in names.split())
    text = f"def kl_penalty({one}, {other}):\n    return ({one} - {other}).abs()\n"
    if call:
        text += (
            f"def collect(batch):\n    rewards_with_kl = batch.rewards - kl_penalty({call})\n    return rewards_with_kl"
        )
    (only,) = variants(tmp_path, text)
    assert (only.place, only.fields) == (place, tuple(fields.split()))


def test_twins_that_callers_give_both_ways_are_left(tmp_path: Path) -> None:
    text = """
def kl_of(logits_1, logits_2):
    return (logits_1.softmax(-1) * (logits_1.log_softmax(-1) - logits_2.log_softmax(-1))).sum()

def loss(logits, teacher_logits):
    return kl_of(logits, teacher_logits) + 2 * kl_of(teacher_logits, logits)
"""
    (only,) = variants(tmp_path, text)
    given = rollouts()
    back = (given["logits"].exp() * (given["logits"] - given["ref_logits"])).sum()
    torch.testing.assert_close(value_of(only), back + 2 * forward_kl(given))


def test_each_return_of_an_estimator_is_a_variant(tmp_path: Path) -> None:
    text = """
def kl_penalty(logprob, ref_logprob, config, kind=None):
    if kind is None:
        kind = config.kind
    if kind == "abs":
        return (logprob - ref_logprob).abs()
    if kind == "k3":
        d = ref_logprob - logprob
        if isinstance(d, torch.Tensor):
            return torch.exp(d) - d - 1
        raise ValueError(d)
    if kind == "k2":
        return 0.5 * (logprob - ref_logprob).square()
    raise NotImplementedError
"""
    found = {variant.variant: value_of(variant) for variant in variants(tmp_path, text)}
    assert sorted(found) == ["kind='abs'", "kind='k2'", "kind='k3'"]
    for kind, value in (("abs", gap), ("k2", k2), ("k3", k3)):
        torch.testing.assert_close(found[f"kind='{kind}'"], value(rollouts()))


def test_a_helper_is_that_of_the_module_it_is_imported_from(tmp_path: Path) -> None:
    text = """
from .right import bend as form

def loss(logp, ref_logp, mask):
    return (form(logp - ref_logp) * mask).sum()
"""
    shape = "def bend(d):\n    return d.{}()\n"
    # Another one of that name stands in a file before it.
    more = {"package.__init__": "", "package.a": shape.format("square"), "package.right": shape.format("abs")}
    found = variants(tmp_path, "", **more, **{"package.use": HEAD + text})
    (only,) = found
    torch.testing.assert_close(value_of(only), live(gap)(rollouts()))
    starred = text.replace("from .right import bend as form", "from .b import *").replace("form(", "bend(")
    (tmp_path / "package" / "use.py").write_text(HEAD + starred)
    (only,) = variants(tmp_path, "")
    assert "several functions" in only.refused


def test_no_gradient_of_a_helper_is_kept(tmp_path: Path) -> None:
    text = """
@torch.no_grad()
def bend(d):
    return d.abs()

def loss(logp, ref_logp, mask):
    return (bend(logp - ref_logp) * mask).sum()
"""
    (only,) = variants(tmp_path, text)
    assert "torch.no_grad()" in only.source


REFUSED = {
    "a loss without the policy": ("""
def step(self, old_logp, ref_logp, mask):
    kl_loss = self.beta * ((old_logp - ref_logp) * mask).sum()
    loss = self.pg_loss + kl_loss
    loss.backward()
""", "nothing of the policy"),
    "two sides that look like one": ("""
def kl_penalty(log_probs_mine, log_probs_theirs):
    return (log_probs_mine - log_probs_theirs).abs()
""", "whose probabilities"),
    "a part of a divergence": ("""
def partial_kl(logits, ref_logits, logp, ref_logp, tokens, k=2):
    log_head, top = logits.topk(k, dim=-1)
    head = (log_head.exp() * (log_head - ref_logits.gather(-1, top))).sum(dim=-1)
    tail = (logp - ref_logp).detach() * (logp - logp.detach()).exp()
    return head + tail.where((top != tokens.unsqueeze(-1)).all(dim=-1), 0.0)
""", "which reads the reference as well"),
    "what is left of a distribution": ("""
def partial_kl(logits, top_logps, top_probs, ids):
    top_log_probs = logits.log_softmax(-1).gather(-1, ids)
    kl = (top_probs * (top_logps - top_log_probs)).sum(-1)
    log_teacher_rest, log_student_rest = torch.log1p(-top_probs.sum(-1)), torch.log1p(-top_log_probs.exp().sum(-1))
    rest_kl = log_teacher_rest.exp() * (log_teacher_rest - log_student_rest)
    kl += rest_kl
    return kl.sum()
""", "part of a distribution"),
    "one of two summands": ("""
def loss(self, logits, teacher_logits, mask):
    probs, teacher_probs = logits.softmax(-1), teacher_logits.softmax(-1)
    forward = (teacher_probs * (teacher_probs.log() - probs.log())).sum(-1)
    backward = (probs * (probs.log() - teacher_probs.log())).sum(-1)
    loss = some_average(forward + backward, mask)
    return loss
""", "no"),
    "log-probs of tokens or of rollouts, as the configuration says": ("""
def logps_of(logits, ids, whole):
    each = logits.log_softmax(-1).gather(-1, ids)
    if whole:
        return each.sum(-1)
    return each

def loss(self, model, ref_model, ids):
    logps, ref_logps = logps_of(model(ids), ids, self.whole), logps_of(ref_model(ids), ids, self.whole)
    return (logps - ref_logps).abs().mean()
""", "whole rollouts"),
    "parts that a function may change": ("""
def loss(logp, ref_logp, mask):
    parts = {"kl": (logp - ref_logp).abs()}
    scale_each(parts)
    return (parts["kl"] * mask).sum()
""", "no arithmetic"),
    "a gradient written by hand": ("""
class Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp, ref_logp):
        return (logp - ref_logp).square().sum()
""", "by hand"),
    "a gradient written by hand, to a target": ("""
class TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx, vocab_parallel_logits, target_logits, ids, weight=1.0):
        predicted_logits = vocab_parallel_logits.gather(-1, ids)
        probs, target = predicted_logits.softmax(-1), target_logits.logsumexp(-1, keepdim=True)
        loss = weight * (probs * (predicted_logits.log_softmax(-1) - target_logits + target)).sum(-1)
        return loss
""", "by hand"),
    "a mixture of which a part is not known": ("""
def forward_kl(logits, teacher_logits):
    return (F.softmax(teacher_logits, -1) * (F.log_softmax(teacher_logits, -1) - F.log_softmax(logits, -1))).sum(-1)

def reverse_kl(logits, teacher_logits):
    return forward_kl(teacher_logits, logits)

def adaptive_kl(logits, teacher_logits, tail_mask):
    share = tail_mask.mean()
    there = forward_kl(logits, teacher_logits)
    back = reverse_kl(logits, teacher_logits)
    return share * there + (1 - share) * back
""", "part of a distribution"),
    "a function that is handed in": ("""
def model(d):
    return d.square()

def loss(logp, ref_logp, model):
    return model((logp - ref_logp).abs()).sum()
""", "model("),
    "a while loop": ("""
def loss(logp, ref_logp):
    i, total = 0, 0.0
    while i < len(logp):
        total = total + (logp[i] - ref_logp[i]).square().sum()
        i += 1
    return total / i
""", "while"),
    "a loop that ends before all of it is known": ("""
def loss(logp, ref_logp):
    kls = {}
    for i in range(len(logp)):
        d = ref_logp[i] - logp[i]
        kls[i] = d.exp() - d - 1
    return mean_of(kls)
""", "computes k3, and only log-ratio could be cut out"),
    "a weight without a gradient, of something that is not known": ("""
def loss(student_logps, teacher_logps, model):
    weight = (student_logps - teacher_logps).detach()
    loss = model(weight).sum()
    return loss
""", "model(…) is not"),
    "one position of a rollout": ("""
def apply(advantages, student_log_probs, teacher_log_probs, mask, coef):
    idx = int(mask.nonzero()[0].item())
    advantages[idx] = advantages[idx] - coef * (student_log_probs[idx] - teacher_log_probs[idx])
""", "part of a rollout"),
    "log-probs of the likeliest tokens": ("""
def penalty(ref_logits, logits, k):
    support = ref_logits.topk(k, dim=-1).indices
    log_probs, ref_log_probs = logits.gather(-1, support), ref_logits.gather(-1, support)
    return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)
""", "part of a distribution"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_lifted_says_why(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    found = variants(tmp_path, text)
    assert found
    for variant in found:
        if variant.term is found[-1].term:  # and none of a helper before it
            assert reason in variant.refused, variant.source


MANY = """
class Trainer:
    def _compute_loss(self, model, inputs, logps):
        per_token_logps, mask = logps, inputs["completion_mask"]
        if self.kind == "token":
            ratio = torch.exp(per_token_logps - inputs["old_per_token_logps"])
        elif self.kind == "sequence":
            ratio = torch.exp((per_token_logps - inputs["old_per_token_logps"]).sum(-1, keepdim=True))
        else:
            raise ValueError(self.kind)
        log_ratio = inputs["ref_per_token_logps"] - per_token_logps
        kl = torch.exp(log_ratio) - log_ratio - 1
        if self.corrected:
            kl = kl * ratio
        loss = -(ratio * inputs["advantages"] * mask).sum()
OTHERS
        loss = loss + self.beta * (kl * mask).sum()
        policy_loss = loss.detach()
        self.metrics["loss"] = policy_loss.item()
        return loss
"""


def test_a_choice_that_matters_is_found_among_many_that_do_not(tmp_path):
    """Twelve conditions that change the rest of the loss would be 4,096 configurations; three are the term's."""
    others = "\n".join(f"        if self.option_{n}:\n            loss = loss * self.scale_{n}" for n in range(12))
    found = [each for each in variants(tmp_path, MANY.replace("OTHERS", others)) if not each.refused]
    given = rollouts()
    ratio = torch.exp(given["logp"] - given["old_logp"])
    whole = torch.exp((given["logp"] - given["old_logp"]).sum(-1, keepdim=True))
    ratios = {"not corrected": 1.0, "'token', corrected": ratio, "'sequence', corrected": whole}
    for name, each in ratios.items():
        (one,) = [variant for variant in found if name in variant.variant]
        torch.testing.assert_close(value_of(one), given["beta"] * (each * k3(given) * given["mask"]).sum())
    assert len(found) == 3


def test_each_average_is_told_of_the_first_variant(tmp_path: Path) -> None:
    """Three estimators times four averages are seven rows, and averages that are the same are one."""
    found = variants(tmp_path, """
class Trainer:
    def compute_loss(self, logps, inputs):
        ref_logps, mask = inputs["ref_logps"], inputs["completion_mask"]
        if self.kind == "k3":
            kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        elif self.kind == "k2":
            kl = (logps - ref_logps) ** 2 / 2
        else:
            kl = (logps - ref_logps).abs()
        if self.average == "rows":
            loss = ((kl * mask).sum(-1) / mask.sum(-1)).mean()
            loss = loss / (self.accumulation_steps if self.training else 1.0)
        elif self.average in ("tokens", "dapo"):
            loss = (kl * mask).sum() / (inputs["num_items"] / self.accelerator.num_processes)
        elif self.average == "constant":
            loss = (kl * mask).sum() / (kl.size(0) * self.max_length)
        else:
            loss = unknown(kl, mask)
        return self.beta * loss
""")  # fmt: skip
    given = rollouts()
    expected = {
        "kind='k3'": k3(given),
        "kind='k2'": k2(given),
        "kind otherwise": gap(given),
        "kind='k3', average='rows'": row_means(k3)(given),
        "kind='k3', average='tokens' or 'dapo'": live(k3)(given) / given["mask"].sum(),
        "kind='k3', average='constant'": live(k3)(given) / (5 * 8),
    }
    assert {each.variant for each in found} == expected.keys()
    for each in found:
        scale = 0.7 if "average" in each.variant else 1.0
        torch.testing.assert_close(value_of(each), scale * expected[each.variant])


def test_an_optional_ratio_makes_two_variants(tmp_path: Path) -> None:
    found = variants(tmp_path, """
def kl_of(logp, ref_logp, importance_ratio=None):
    kl = (logp - ref_logp).abs()
    if importance_ratio is not None:
        kl = importance_ratio * kl
    return kl
""")  # fmt: skip
    given = rollouts()
    ratio = torch.exp(given["logp"] - given["old_logp"])
    expected = {"with importance_ratio": ratio * gap(given), "without importance_ratio": gap(given)}
    assert {each.variant for each in found} == expected.keys()
    for each in found:
        torch.testing.assert_close(value_of(each), expected[each.variant])


KL, K2 = "live(logp - ref_logp, mask).mean()", "live((logp - ref_logp).square() / 2, mask).mean()"
LOGGED = {
    "an item of a metric": (f"metrics['kl'] = {KL}.item()", KL),
    "a call that logs": (f"mean_kl = {KL}.item()\n    self.log('train/kl', mean_kl, bar=True)", KL),
    "under a key that says KL": (f"wandb.log({{'loss': loss.item(), 'kl': float({KL})}})", KL),
    "appended": (f"self.stats['kl'].append(self.accelerator.gather({K2}).tolist())", K2),
    "under another name, of what is called KL": (
        "kl = live(logp - ref_logp, mask)\n    self.log('gap', kl.mean())",
        KL,
    ),
    "beside the loss": (f"return loss, {{'loss': loss, 'kl': {KL}}}", KL),
    "to the sampler": (f"metrics['approx_kl'] = {KL}.item()".replace("ref_", "old_"), ""),
    "called no KL": (f"metrics['gap'] = {KL}.item()", ""),
    "of a preference": (f"metrics['kl'] = {KL}.item()".replace("ref_logp", "chosen_logps"), ""),
    "in the loss as well": (f"kl = {KL}\n    metrics['kl'] = kl.item()\n    loss = loss + kl", ""),
}
"""Statements that log, and the value that they log; the empty string if that is no KL to the reference alone."""


@pytest.mark.parametrize("name", LOGGED)
def test_what_is_only_logged_is_lifted_if_it_is_asked_for(name: str, tmp_path: Path) -> None:
    text, value = LOGGED[name]
    text = f"""
def live(value, mask):
    return (value * mask).sum(-1)

def step(self, logp, ref_logp, old_logp, mask, advantages, metrics):
    loss = -(advantages * logp * mask).sum()
    {text}
    return loss
"""
    assert "logged" not in [each.place for each in variants(tmp_path, text)]
    found = [each for each in variants(tmp_path, text, logged=True) if each.place == "logged"]
    assert len(found) == bool(value), found
    for each in found:
        given = {**rollouts(), "live": lambda value, mask: (value * mask).sum(-1)}
        logged = torch.as_tensor(value_of(each)[1]["kl"])
        torch.testing.assert_close(logged, eval(value, given).to(logged))


def test_what_is_made_in_a_rewards_statement_is_no_loss_as_well(tmp_path: Path) -> None:
    """And an estimate that is called a score is no reward, in a function that is called a KL."""
    (found,) = variants(tmp_path, """
def step(self, logps, ref_logps, new_logps, mask, scores):
    kl_rewards = -self.beta * (logps - ref_logps) * mask
    rewards = kl_rewards.clone() + scores
    advantages = rewards.flip(1).cumsum(1).flip(1)
    pg_loss = -((new_logps - logps).exp() * advantages).sum()
    loss = pg_loss
    loss.backward()
""")  # fmt: skip
    assert found.place == "reward"
    (found,) = variants(tmp_path, """
def kl_penalty(logprob, ref_logprob):
    backward_score = 0.5 * (logprob - ref_logprob).square()
    return backward_score - backward_score.detach()
""")  # fmt: skip
    assert found.place == "helper"


def test_the_value_of_a_straight_through_estimate_counts_in_a_reward(tmp_path: Path) -> None:
    helper, rewarded = variants(tmp_path, """
def estimate(logp, ref_logp, kind):
    return STORED[kind](logp, ref_logp)

def kl_penalty(logp, ref_logp, kind):
    backward = 0.5 * (logp - ref_logp).square()
    return backward - backward.detach() + estimate(logp, ref_logp, kind).detach()

def loss(self, logp, ref_logp, mask):
    kl_loss = (kl_penalty(logp, ref_logp, "x") * mask).sum()
    return kl_loss

def rewards(self, logp, ref_logp, scores):
    with torch.no_grad():
        kl_rewards = scores - self.beta * kl_penalty(logp, ref_logp, "x")
    return kl_rewards
""")  # fmt: skip
    assert (helper.place, rewarded.place) == ("helper", "reward")
    torch.testing.assert_close(value_of(helper), torch.zeros(5, 4, dtype=torch.float64))
    assert rewarded.source == ""
    assert "its value" in rewarded.refused


def test_an_advantage_that_nothing_detaches_is_no_reward_by_itself(tmp_path: Path) -> None:
    found = variants(tmp_path, """
def criterion(self, logp, ref_logp, mask, inputs):
    per_token_kl = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1
    advantages = inputs["rewards"].unsqueeze(-1)
    if self.adv == "penalised":
        advantages = advantages - 0.5 * per_token_kl
        per_token_kl = 0.0
    loss = (-(advantages * torch.exp(logp - logp.detach())) + 0.5 * per_token_kl) * mask
    loss = loss.sum()
    return loss
""")  # fmt: skip
    by = {each.place: each for each in found if "penalised" in each.variant or each.place != "loss"}
    torch.testing.assert_close(value_of(by["loss"]), 0.5 * live(k3)(rollouts()))
    assert "nothing detaches it" in by["advantage"].refused
