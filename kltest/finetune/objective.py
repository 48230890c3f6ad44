"""The gradient that a run follows, as weights on the log-probs of its tokens.

A loss of rewards and a KL term depends on the model through the log-probs of the sampled tokens (or, for some KL
terms, of all next tokens). Its gradient there is worked out first, for the joint batch of all processes, and only then
chained into the model: so neither micro-batches nor processes change it. With A_i the advantage, w_i what a rollout
counts (1/B, or less with `normalise`) and ratios c_t as in kltest.training.reward, to be minimised:

    Σ_i w_i Σ_t [ −A_i c_t + β ∂(KL term)_i/∂log π_t ] · log π_t

The KL term is a target as `kltest grade` takes them, called with a `Rollout` and differentiated there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kltest.errors import KltestError, UsageError
from kltest.finetune.settings import AUTO, NONE, Settings
from kltest.loss.calling import BoundLoss
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout

SCALE = 1e-4
"""Added to a group's standard deviation, as in the GRPO paper's implementations."""


@dataclass(frozen=True)
class Fields:
    """What the gradient depends on, (B, T) or (B,): see kltest.rollout. `mask` is bool; groups are told by `group`."""

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    mask: Tensor
    tokens: Tensor
    reward: Tensor
    group: Tensor


@dataclass(frozen=True)
class Pull:
    """∂loss/∂log π (B, T) and, of terms that look at all next tokens, (B, T, V); `logged` is the KL that it logs.

    `one_number`: the term is one for the whole batch, not one for each row.
    """

    logp: Tensor
    logits: Tensor | None = None
    logged: float | None = None
    one_number: bool = False


class KLTerm:
    """A KL term by name, in a placement and with a credit."""

    def __init__(self, settings: Settings) -> None:
        settings = settings.resolved
        call = Call(
            None if settings.placement == AUTO else settings.placement,  # type: ignore[arg-type]
            None if settings.credit == AUTO else settings.credit,  # type: ignore[arg-type]
            None,
            settings.kl_options,
        )
        loss = resolve(settings.kl, call)
        assert isinstance(loss, BoundLoss)
        self.loss, self.beta = loss, settings.beta
        self.takes_logits = bool(loss.takes & {"logits", "ref_logits", "old_logits"})
        self.couples = loss.spec is not None and loss.spec.couples

    def pull(
        self, fields: Fields, weights: Tensor, logits: tuple[Tensor, Tensor] | None = None, *, beta: float | None = None
    ) -> Pull:
        """The gradient of Σ_i weights_i·(KL term)_i; of a term that is one number for the batch, of that number.

        `logits` (B, T, V) are the policy's and the reference's log-probs. `beta` is what a term is given that takes it.
        Raises TargetError where the term fails, KltestError where its gradient is not finite.
        """
        rollout = _rollout(fields, logits, beta=self.beta if beta is None else beta)
        outcome = self.loss(rollout)
        objective = outcome.objective if outcome.rows is None else (outcome.rows * weights.to(outcome.rows)).sum()
        found = leaf_gradients(self.loss, objective, rollout)
        live = fields.mask
        on_logp = found["logp"].to(fields.logp) if "logp" in found else torch.zeros_like(fields.logp)
        on_logits = found.get("logits")
        return Pull(
            on_logp.where(live, 0.0),
            None if on_logits is None else on_logits.to(live.device).where(live[:, :, None], 0.0),
            _logged(outcome.metric if outcome.metric is not None else outcome.value, live),
            outcome.rows is None,
        )


class Objective:
    """Reward part and KL term of a run's settings; either can be left out, to measure the other."""

    def __init__(self, settings: Settings, *, reward: bool = True, kl: bool = True) -> None:
        self.settings = settings.resolved
        self.with_reward = reward
        unused = self.settings.kl == NONE or (reward and self.settings.beta == 0)
        self.kl = None if unused or not kl else KLTerm(self.settings)
        # Measured alone, the KL gradient is that of the term itself.
        self.beta = self.settings.beta if reward else 1.0

    @property
    def takes_logits(self) -> bool:
        return self.kl is not None and self.kl.takes_logits

    def weights(self, fields: Fields, longest: int) -> Tensor:
        """(B,) what each rollout of the joint batch counts; `longest` is max_tokens."""
        rows = len(fields.mask)
        lengths = fields.mask.sum(dim=1).clamp(min=1).to(fields.logp)
        by = {NONE: torch.ones_like(lengths), "sequence": lengths, "constant": torch.full_like(lengths, longest)}
        divisor = by.get(self.settings.normalise, lengths.mean().expand(rows))
        return 1 / (rows * divisor)

    def pull(self, fields: Fields, weights: Tensor) -> Pull:
        """The gradient at the log-probs of a joint batch, without a KL term that takes logits."""
        total, logged = torch.zeros_like(fields.logp), None
        if self.with_reward:
            total = total - self._push(fields) * weights[:, None]
        if self.kl is not None and not self.kl.takes_logits:
            kl = self.kl.pull(fields, weights)
            total, logged = total + self.beta * kl.logp, kl.logged
        return Pull(total.where(fields.mask, 0.0), None, logged)

    def pull_with_logits(
        self, fields: Fields, weights: Tensor, logits: tuple[Tensor, Tensor], *, split: bool = False
    ) -> Pull:
        """The gradient of a KL term that takes logits; `split` says that these rows are but a part of the batch.

        Raises UsageError for a term that couples the rows of a batch, of which it would see a part.
        """
        assert self.kl is not None
        kl = self.kl.pull(fields, weights, logits)
        if split and (self.kl.couples or kl.one_number):
            raise UsageError(
                f"{self.kl.loss.name} takes all next tokens' log-probs and couples the rows of a batch, so that the "
                "batch cannot be split: set micro_batch=0 and use one process"
            )
        return Pull(self.beta * kl.logp, None if kl.logits is None else self.beta * kl.logits, kl.logged)

    def _push(self, fields: Fields) -> Tensor:
        """(B, T) A·c: the ascent direction of the reward part."""
        advantage = advantages(fields.reward, fields.group, self.settings.baseline, self.settings.scale)[:, None]
        if self.settings.ratio == NONE:
            return advantage.expand_as(fields.logp)
        log_ratio = (fields.logp - fields.old_logp).where(fields.mask, 0.0)
        if self.settings.ratio == "sequence":
            log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
        ratio = log_ratio.exp()
        if self.settings.clip > 0:
            ratio = ratio.where(~clipped(ratio, advantage, self.settings.clip), 0.0)
        return advantage * ratio


def advantages(reward: Tensor, group: Tensor, baseline: str, scale: str) -> Tensor:
    """(B,) rewards less a baseline of their group, over the group's standard deviation (n − 1) if asked for."""
    rows = _summed(torch.ones_like(reward), group)
    mean = _summed(reward, group) / rows
    centred = reward - mean
    found = reward if baseline == NONE else centred
    if baseline == "leave-one-out":
        # x less the mean of n − 1 others is n/(n − 1) times x less the mean of all; alone, it is x itself.
        found = torch.where(rows > 1, centred * rows / (rows - 1).clamp(min=1), reward)
    if scale == NONE:
        return found
    return found / ((_summed(centred.square(), group) / (rows - 1).clamp(min=1)).sqrt() + SCALE)


def clipped(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Where PPO's clipped objective has no gradient."""
    return ((advantage > 0) & (ratio > 1 + clip)) | ((advantage < 0) & (ratio < 1 - clip))


def _summed(values: Tensor, group: Tensor) -> Tensor:
    """(B,) the sum over each row's group."""
    _, place = group.unique(return_inverse=True)
    return torch.zeros_like(values).index_add(0, place, values)[place]


def _rollout(fields: Fields, logits: tuple[Tensor, Tensor] | None, *, beta: float) -> Rollout:
    """As estimators see rollouts: float64, and on the CPU, but for logits, which are too large to be moved about."""
    home = logits[0].device if logits is not None else torch.device("cpu")

    def at_home(value: Tensor) -> Tensor:
        value = value.detach().to(home)
        return value.double() if value.is_floating_point() else value

    given: dict[str, Any] = {
        name: at_home(getattr(fields, name)) for name in ("logp", "ref_logp", "old_logp", "tokens", "reward", "group")
    }
    given["mask"] = fields.mask.to(home, torch.float64)
    given["advantage"] = advantages(given["reward"], given["group"], "mean", NONE)
    if logits is not None:
        given |= {"logits": logits[0].detach(), "ref_logits": logits[1].detach()}
        same = bool(torch.equal(fields.logp, fields.old_logp))
        given["old_logits"] = _stale if not same else logits[0].detach()
    return Rollout(given, beta=beta)


def _stale() -> Tensor:
    raise KltestError("this KL term takes old_logits, which are not kept for a stale sampler; set inner_epochs=1")


def _logged(value: Tensor | None, live: Tensor) -> float | None:
    """The KL that is logged, in nats a rollout."""
    if value is None:
        return None
    if value.dim() == 2:
        value = value.where(live.to(value.device), 0.0).sum(dim=1)
    return float(value.mean())
