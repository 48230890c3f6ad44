"""The objective of a run and its gradient: first at the log-probs of the sampled tokens, then at the weights.

A loss of rewards and a KL term depends on the model through the log-probs of the sampled tokens (or, for some KL
terms, of all next tokens). Its gradient there is computed first, for the whole batch, and then pulled back through the
model. Micro-batches therefore do not change it. With advantages A_i, weights w_i (1/B; grpo: over the rollout's length)
and importance ratios c_t, the surrogate to be minimised is

    Σ_i w_i Σ_t [ −A_i c_t + β ∂(KL term)_i/∂log π_t ] · log π_t

with everything but the last factor constant. The KL term is any target that `kltest grade` takes: it is called with a
`Rollout` and differentiated with respect to that.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from kltest.errors import KltestError, UsageError
from kltest.finetune.models import Models
from kltest.finetune.settings import AUTO, NONE, Settings
from kltest.language_models.generation import Rollouts
from kltest.language_models.scoring import score, score_in_parts
from kltest.loss.calling import Loss
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments.differentiate import leaf_gradients
from kltest.names import LOGITS
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

    @property
    def log_ratio(self) -> Tensor:
        """(B, T) of each token, policy to sampler; 0 where padded."""
        return (self.logp - self.old_logp).where(self.mask, 0.0)

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
    """Reward part and KL term of a run's settings; without `reward` the KL term alone, without its coefficient.

    Attributes:
        kl: The KL term, None if there is none.
        takes_logits: True if it reads the log-probs of all next tokens.
        needs_reference: True if the reference's log-probs of the sampled tokens must be known before the update.
    """

    def __init__(self, settings: Settings, *, reward: bool = True) -> None:
        self.settings = settings = settings.resolved
        self.with_reward, self.beta = reward, settings.beta if reward else 1.0
        self.grpo = settings.algorithm == "grpo"
        self.kl: Loss | None = None
        if settings.kl != NONE and self.beta:
            placement, credit = (None if one == AUTO else one for one in (settings.placement, settings.credit))
            call = Call(placement, credit, None, settings.kl_options)  # type: ignore[arg-type]
            self.kl = resolve(settings.kl, call)
        self.takes_logits = self.kl is not None and bool(self.kl.takes & LOGITS)
        self.needs_reference = self.kl is not None and not self.takes_logits

    def weights(self, fields: Fields) -> Tensor:
        """Return the weights (B,) of rollouts in the batch."""
        lengths = fields.mask.sum(dim=1).clamp(min=1).to(fields.logp)
        return 1 / (len(lengths) * (lengths if self.grpo else torch.ones_like(lengths)))

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
        advantage = advantages(fields.reward, fields.group, grpo=self.grpo)[:, None]
        log_ratio = fields.log_ratio
        if not self.grpo:
            return advantage * log_ratio.sum(dim=1, keepdim=True).exp().expand_as(log_ratio)
        return advantage * log_ratio.exp().where(~self.clipped(fields), 0.0)

    def clipped(self, fields: Fields) -> Tensor:
        """Return (B, T), true at tokens where PPO's clipped objective has no gradient."""
        advantage = advantages(fields.reward, fields.group, grpo=True)[:, None]
        clip, ratio = self.settings.clip or math.inf, fields.log_ratio.exp()
        return ((advantage > 0) & (ratio > 1 + clip)) | ((advantage < 0) & (ratio < 1 - clip))


def advantages(reward: Tensor, group: Tensor, *, grpo: bool) -> Tensor:
    """Return (B,) rewards minus the mean of the others of their group; grpo: of all, over the standard deviation.

    `group` (B,) is the number of the prompt. The standard deviation is that with n − 1.
    """
    centred, rows = _centred(reward, group)
    others = (rows - 1).clamp(min=1)
    if grpo:
        return centred / ((_summed(centred.square(), group) / others).sqrt() + SCALE)
    # x − mean of the n − 1 others = n/(n − 1)·(x − mean of all); without others it is x.
    return torch.where(rows > 1, centred * rows / others, reward)


def _centred(reward: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(B,) rewards minus the mean of their group, and (B,) its size."""
    rows = _summed(torch.ones_like(reward), group)
    return reward - _summed(reward, group) / rows, rows


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
    given["advantage"], _ = _centred(given["reward"], given["group"])
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


class NotFiniteError(KltestError):
    """A gradient or log-prob is NaN or infinite."""


def accumulate(
    objective: Objective, models: Models, rollouts: Rollouts, *, row_weights: Tensor | None = None
) -> tuple[Tensor, float | None]:
    """Add the gradient of a batch to `.grad`.

    Rollouts are rewarded, and have the reference's log-probs if the objective needs them, and the sampler's unless that
    is the policy itself. `row_weights` (B,) stand instead of the objective's, as probabilities of enumerated rollouts.

    Returns:
        (B, T) log-probs of the policy; and the KL that the term logs, in nats a rollout, None if it logs nothing.

    Raises:
        NotFiniteError: A log-prob of the policy is not finite.
    """
    temperature, size = objective.settings.temperature, objective.settings.micro_batch
    scored = partial(score, temperature=temperature, logits=objective.takes_logits)
    parts = list(rollouts.split(size))
    # 1. Log-probs of the policy. A single part is scored once; of several no graph is kept.
    single = scored(models.policy, rollouts) if len(parts) == 1 else None
    # (B, T)
    logp = single.logp.detach() if single else score_in_parts(models.policy, rollouts, size, temperature=temperature)
    if not bool((finite := torch.isfinite(logp) | ~rollouts.mask).all()):
        worst = float(logp[~finite][0])
        raise NotFiniteError(f"the policy's log-prob of a token is {worst}: an update broke it; lower learning_rate")
    # 2. The gradient at the log-probs, for the whole batch: advantages and couplings need all of its rows.
    fields = Fields.of(rollouts, logp)
    weights = objective.weights(fields) if row_weights is None else row_weights  # (B,)
    found = objective.gradient(fields, weights)
    logged = [(found.logged, len(logp))]
    for rows in parts:
        part = rollouts.rows(rows)
        # 3. Backward through the model: ∇ Σ g·log π with g constant.
        scores = single or scored(models.policy, part)
        surrogate = (found.logp[rows] * scores.logp).sum()
        if scores.logits is not None:
            with torch.no_grad():
                other = scored(models.reference, part)
            assert other.logits is not None
            of_part = replace(Fields.of(part, logp[rows]), ref_logp=other.logp)
            log_probs = scores.logits, other.logits
            kl = objective.kl_gradient(of_part, weights[rows], log_probs, split=len(parts) > 1)
            surrogate = surrogate + (kl.logp * scores.logp).sum()
            if kl.logits is not None:
                surrogate = surrogate + (kl.logits.to(scores.logits) * scores.logits).sum()
            logged.append((kl.logged, len(part)))
        surrogate.backward()
    known = [(value, rows) for value, rows in logged if value is not None]
    return logp, sum(value * rows for value, rows in known) / sum(rows for _, rows in known) if known else None
