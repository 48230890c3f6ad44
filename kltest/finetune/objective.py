"""The objective of a run, as its gradient with respect to the log-probs of the sampled tokens.

A loss of rewards and a KL term depends on the model through the log-probs of the sampled tokens (or, for some KL
terms, of all next tokens). Its gradient there is computed first, for the joint batch of all processes, and then pulled
back through the model. Micro-batches and processes therefore do not change it. With advantages A_i, weights w_i (1/B,
or less with `normalise`) and importance ratios c_t, the surrogate to be minimised is

    Σ_i w_i Σ_t [ −A_i c_t + β ∂(KL term)_i/∂log π_t ] · log π_t

with everything but the last factor constant. The KL term is any target that `kltest grade` takes: it is called with a
`Rollout` and differentiated with respect to that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kltest.errors import KltestError, UsageError
from kltest.finetune.settings import AUTO, NONE, Settings
from kltest.loss.calling import Loss
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout

SCALE = 1e-4
"""Added to a group's standard deviation, as in the GRPO paper's implementations."""


@dataclass(frozen=True)
class Fields:
    """The batch that the gradient depends on, as in kltest.rollout.

    Attributes:
        logp: (B, T) log-probs of the policy, in nats.
        ref_logp: (B, T) of the reference.
        old_logp: (B, T) of the sampler.
        mask: (B, T) bool, true at tokens.
        tokens: (B, T) ids.
        reward: (B,).
        group: (B,) the number of the prompt.
    """

    logp: Tensor
    ref_logp: Tensor
    old_logp: Tensor
    mask: Tensor
    tokens: Tensor
    reward: Tensor
    group: Tensor


@dataclass(frozen=True)
class LogProbGradient:
    """A gradient with respect to log-probs.

    Attributes:
        logp: (B, T) at the sampled tokens.
        logits: (B, T, V) at all next tokens, for terms that read them.
        logged: The KL that the term logs, in nats a rollout.
        one_number: True if the term is one number for the whole batch, not one for each row.
    """

    logp: Tensor
    logits: Tensor | None = None
    logged: float | None = None
    one_number: bool = False


class KLTerm:
    """The KL term of a run's settings, with its placement and credit."""

    def __init__(self, settings: Settings) -> None:
        settings = settings.resolved
        call = Call(
            None if settings.placement == AUTO else settings.placement,  # type: ignore[arg-type]
            None if settings.credit == AUTO else settings.credit,  # type: ignore[arg-type]
            None,
            settings.kl_options,
        )
        loss = resolve(settings.kl, call)
        assert isinstance(loss, Loss)
        self.loss, self.beta = loss, settings.beta
        self.takes_logits = bool(loss.takes & {"logits", "ref_logits", "old_logits"})
        self.couples = loss.spec is not None and loss.spec.couples

    def gradient(self, fields: Fields, weights: Tensor, logits: tuple[Tensor, Tensor] | None = None) -> LogProbGradient:
        """Return the gradient of Σ_i weights_i·(KL term)_i, or of the term if it is one number for the batch.

        Args:
            fields: The batch.
            weights: (B,).
            logits: (B, T, V) log-probs of all next tokens under the policy and the reference, if the term reads them.

        Raises:
            TargetError: The term fails.
            KltestError: Its gradient is not finite.
        """
        rollout = _rollout(fields, logits, beta=self.beta)
        outcome = self.loss(rollout)
        objective = outcome.objective if outcome.rows is None else (outcome.rows * weights.to(outcome.rows)).sum()
        found = leaf_gradients(self.loss, objective, rollout)
        live = fields.mask
        on_logp = found["logp"].to(fields.logp) if "logp" in found else torch.zeros_like(fields.logp)
        on_logits = found.get("logits")
        return LogProbGradient(
            on_logp.where(live, 0.0),
            None if on_logits is None else on_logits.to(live.device).where(live[:, :, None], 0.0),
            _logged(outcome.metric if outcome.metric is not None else outcome.value, live),
            outcome.rows is None,
        )


class Objective:
    """Reward part and KL term of a run's settings; either can be left out to measure the other."""

    def __init__(self, settings: Settings, *, reward: bool = True, kl: bool = True) -> None:
        self.settings = settings.resolved
        self.with_reward = reward
        unused = self.settings.kl == NONE or (reward and self.settings.beta == 0)
        self.kl = None if unused or not kl else KLTerm(self.settings)
        # Measured alone, the KL gradient is that of the term without its coefficient.
        self.beta = self.settings.beta if reward else 1.0

    @property
    def takes_logits(self) -> bool:
        return self.kl is not None and self.kl.takes_logits

    def weights(self, fields: Fields, longest: int) -> Tensor:
        """Return the weights (B,) of rollouts in the joint batch; `longest` is max_tokens."""
        rows = len(fields.mask)
        lengths = fields.mask.sum(dim=1).clamp(min=1).to(fields.logp)
        by = {NONE: torch.ones_like(lengths), "sequence": lengths, "constant": torch.full_like(lengths, longest)}
        divisor = by.get(self.settings.normalise, lengths.mean().expand(rows))
        return 1 / (rows * divisor)

    def gradient(self, fields: Fields, weights: Tensor) -> LogProbGradient:
        """Return the gradient for a joint batch, without a KL term that reads logits."""
        total, logged = torch.zeros_like(fields.logp), None
        if self.with_reward:
            total = total - self._ascent(fields) * weights[:, None]
        if self.kl is not None and not self.kl.takes_logits:
            kl = self.kl.gradient(fields, weights)
            total, logged = total + self.beta * kl.logp, kl.logged
        return LogProbGradient(total.where(fields.mask, 0.0), None, logged)

    def gradient_with_logits(
        self, fields: Fields, weights: Tensor, logits: tuple[Tensor, Tensor], *, split: bool = False
    ) -> LogProbGradient:
        """Return the gradient of a KL term that reads logits; `split` says that the rows are a part of the batch.

        Raises:
            UsageError: The term couples the rows of a batch and would see only a part of them.
        """
        assert self.kl is not None
        kl = self.kl.gradient(fields, weights, logits)
        if split and (self.kl.couples or kl.one_number):
            raise UsageError(
                f"{self.kl.loss.name} takes all next tokens' log-probs and couples the rows of a batch, so that the "
                "batch cannot be split: set micro_batch=0 and use one process"
            )
        return LogProbGradient(self.beta * kl.logp, None if kl.logits is None else self.beta * kl.logits, kl.logged)

    def _ascent(self, fields: Fields) -> Tensor:
        """(B, T) A·c, the ascent direction of the reward part."""
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
    """Return (B,) rewards minus a baseline of their group, divided by its standard deviation if `scale` says so.

    Args:
        reward: (B,).
        group: (B,) the number of the prompt.
        baseline: none, mean or leave-one-out.
        scale: none or group-std (with n − 1).
    """
    rows = _summed(torch.ones_like(reward), group)
    mean = _summed(reward, group) / rows
    centred = reward - mean
    found = reward if baseline == NONE else centred
    if baseline == "leave-one-out":
        # x − mean of the n − 1 others = n/(n − 1)·(x − mean of all); without others it is x.
        found = torch.where(rows > 1, centred * rows / (rows - 1).clamp(min=1), reward)
    if scale == NONE:
        return found
    return found / ((_summed(centred.square(), group) / (rows - 1).clamp(min=1)).sqrt() + SCALE)


def clipped(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return where PPO's clipped objective has no gradient."""
    return ((advantage > 0) & (ratio > 1 + clip)) | ((advantage < 0) & (ratio < 1 - clip))


def _summed(values: Tensor, group: Tensor) -> Tensor:
    """(B,) sum over each row's group."""
    _, place = group.unique(return_inverse=True)
    return torch.zeros_like(values).index_add(0, place, values)[place]


def _rollout(fields: Fields, logits: tuple[Tensor, Tensor] | None, *, beta: float) -> Rollout:
    """The rollout that a KL term is called with: float64 on the CPU, or on the device of logits, which are large."""
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
    """The logged KL in nats a rollout."""
    if value is None:
        return None
    if value.dim() == 2:
        value = value.where(live.to(value.device), 0.0).sum(dim=1)
    return float(value.mean())
