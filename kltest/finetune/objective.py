"""The objective of a run, as its gradient with respect to the log-probs of the sampled tokens.

A loss of rewards and a KL term depends on the model through the log-probs of the sampled tokens (or, for some KL
terms, of all next tokens). Its gradient there is computed first, for the whole batch, and then pulled back through the
model. Micro-batches therefore do not change it. With advantages A_i, weights w_i (1/B,
or less with `normalise`) and importance ratios c_t, the surrogate to be minimised is

    Σ_i w_i Σ_t [ −A_i c_t + β ∂(KL term)_i/∂log π_t ] · log π_t

with everything but the last factor constant. The KL term is any target that `kltest grade` takes: it is called with a
`Rollout` and differentiated with respect to that.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from kltest.errors import KltestError, UsageError
from kltest.finetune.settings import AUTO, NONE, Settings
from kltest.language_models.generation import Rollouts
from kltest.loss.calling import Loss
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments.differentiate import leaf_gradients
from kltest.rollout import Rollout

# Added to a group's standard deviation, as in the GRPO paper's implementations.
SCALE = 1e-4


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

    @classmethod
    def of(cls, rollouts: Rollouts, logp: Tensor) -> Self:
        """Return the fields of rewarded rollouts; unknown log-probs of the reference or the sampler are `logp`."""
        assert rollouts.reward is not None
        ref_logp, old_logp = (logp if one is None else one for one in (rollouts.ref_logp, rollouts.old_logp))
        return cls(logp, ref_logp, old_logp, rollouts.mask, rollouts.tokens, rollouts.reward.to(logp), rollouts.group)


@dataclass(frozen=True)
class LogProbGradient:
    """A gradient with respect to log-probs.

    Attributes:
        logp: (B, T) at the sampled tokens.
        logits: (B, T, V) at all next tokens, for terms that read them.
        logged: The KL that the term logs, in nats a rollout.
    """

    logp: Tensor
    logits: Tensor | None = None
    logged: float | None = None


class Objective:
    """Reward part and KL term of a run's settings; without `reward` the KL term alone, without its coefficient."""

    def __init__(self, settings: Settings, *, reward: bool = True) -> None:
        self.settings = settings = settings.resolved
        self.with_reward, self.beta = reward, settings.beta if reward else 1.0
        self.kl: Loss | None = None
        if settings.kl != NONE and self.beta:
            placement, credit = (None if one == AUTO else one for one in (settings.placement, settings.credit))
            call = Call(placement, credit, None, settings.kl_options)  # type: ignore[arg-type]
            self.kl = resolve(settings.kl, call)

    @property
    def takes_logits(self) -> bool:
        """True if the KL term reads the log-probs of all next tokens."""
        return self.kl is not None and bool(self.kl.takes & {"logits", "ref_logits", "old_logits"})

    @property
    def separable(self) -> bool:
        """True if the KL term's gradient of a rollout is known to need no other rollout's log-probs."""
        return self.kl is None or self.takes_logits or (self.kl.spec is not None and not self.kl.spec.couples)

    @property
    def needs_reference(self) -> bool:
        """True if the reference's log-probs of the sampled tokens must be known before the update."""
        return self.kl is not None and not self.takes_logits

    def weights(self, fields: Fields, longest: int) -> Tensor:
        """Return the weights (B,) of rollouts in the batch; `longest` is max_tokens."""
        rows = len(fields.mask)
        lengths = fields.mask.sum(dim=1).clamp(min=1).to(fields.logp)
        by = {NONE: torch.ones_like(lengths), "sequence": lengths, "constant": torch.full_like(lengths, longest)}
        divisor = by.get(self.settings.normalise, lengths.mean().expand(rows))
        return 1 / (rows * divisor)

    def gradient(self, fields: Fields, weights: Tensor) -> LogProbGradient:
        """Return the gradient for a batch, without a KL term that reads logits."""
        total, logged = torch.zeros_like(fields.logp), None
        if self.with_reward:
            total = total - self._ascent(fields) * weights[:, None]
        if self.needs_reference:
            kl = self.kl_gradient(fields, weights)
            total, logged = total + kl.logp, kl.logged
        return LogProbGradient(total.where(fields.mask, 0.0), None, logged)

    def kl_gradient(
        self, fields: Fields, weights: Tensor, logits: tuple[Tensor, Tensor] | None = None, *, split: bool = False
    ) -> LogProbGradient:
        """Return β times the gradient of Σ_i weights_i·(KL term)_i, or of the term if it is one number for the batch.

        `logits` (B, T, V) are log-probs of all next tokens under the policy and the reference, if the term reads them;
        `split` is true if the rows are a part of the batch.

        Raises:
            TargetError: The term fails.
            KltestError: Its gradient is not finite.
            UsageError: The term couples the rows of a batch and would see only a part of them.
        """
        assert self.kl is not None
        rollout = _rollout(fields, logits, beta=self.settings.beta)
        outcome = self.kl(rollout)
        if split and (outcome.rows is None or (self.kl.spec is not None and self.kl.spec.couples)):
            raise UsageError(
                f"{self.kl.name} takes all next tokens' log-probs and couples the rows of a batch, so that the batch "
                "cannot be split: set micro_batch=0"
            )
        objective = outcome.objective if outcome.rows is None else (outcome.rows * weights.to(outcome.rows)).sum()
        found = leaf_gradients(self.kl, objective, rollout)
        live = fields.mask
        on_logp = found["logp"].to(fields.logp) if "logp" in found else torch.zeros_like(fields.logp)
        on_logits = found.get("logits")
        return LogProbGradient(
            self.beta * on_logp.where(live, 0.0),
            None if on_logits is None else self.beta * on_logits.to(live.device).where(live[:, :, None], 0.0),
            _logged(outcome.metric if outcome.metric is not None else outcome.value, live),
        )

    def _ascent(self, fields: Fields) -> Tensor:
        """(B, T) A·c, the ascent direction of the reward part."""
        advantage = advantages(fields.reward, fields.group, self.settings.baseline, self.settings.scale)[:, None]
        if self.settings.ratio == NONE:
            return advantage.expand_as(fields.logp)
        ratio = importance_ratios(fields, self.settings.ratio)
        if self.settings.clip > 0:
            ratio = ratio.where(~clipped(ratio, advantage, self.settings.clip), 0.0)
        return advantage * ratio


def advantages(reward: Tensor, group: Tensor, baseline: str, scale: str) -> Tensor:
    """Return (B,) rewards minus a baseline of their group, over its standard deviation (n − 1) if `scale` says so.

    `group` (B,) is the number of the prompt; the settings are those of a run, resolved.
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


def importance_ratios(fields: Fields, ratio: str) -> Tensor:
    """Return (B, T) ratios of the policy to the sampler, of each token or, if `ratio` is sequence, of its rollout."""
    log_ratio = (fields.logp - fields.old_logp).where(fields.mask, 0.0)
    if ratio == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    return log_ratio.exp()


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
        return value.detach().to(home, value.dtype if value.dtype == torch.int64 else torch.float64)

    given: dict[str, Any] = {name: at_home(value) for name, value in vars(fields).items()}
    given["advantage"] = advantages(given["reward"], given["group"], "mean", NONE)
    if logits is not None:
        policy, reference = (one.detach() for one in logits)
        current = torch.equal(fields.logp, fields.old_logp)
        given |= {"logits": policy, "ref_logits": reference, "old_logits": policy if current else _stale}
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
