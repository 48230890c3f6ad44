"""One gradient, accumulated in the parameters' `.grad`: score, differentiate at the log-probs, go backward."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kltest.errors import KltestError
from kltest.finetune.models import Models
from kltest.finetune.objective import Fields, Objective
from kltest.language_models.generation import Rollouts
from kltest.language_models.scoring import score, score_in_parts


class NotFiniteError(KltestError):
    """A gradient or log-prob is NaN or infinite."""


def accumulate(
    objective: Objective,
    models: Models,
    rollouts: Rollouts,
    *,
    longest: int,
    row_weights: Tensor | None = None,
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
    # Where a row's gradient needs its own log-probs alone, the policy is scored once, part by part.
    once = len(parts) == 1 or objective.separable
    logp = rollouts.sampled_logp.clone()  # (B, T) of the sampled tokens; until a part is scored, the sampler's
    logged: list[tuple[float | None, int]] = []
    whole = rollouts.ended(models.policy.end) | (objective.settings.truncated != "mask")
    for number, rows in enumerate(parts):
        part = rollouts.rows(rows)
        # 1. Log-probs of the part, or of all parts.
        scores = scored(models.policy, part)
        if once:
            logp[rows] = scores.logp.detach()
        elif number == 0:
            logp = score_in_parts(models.policy, rollouts, size, temperature=temperature)
        # 2. The gradient at the log-probs, for the whole batch: advantages and couplings need all of its rows.
        if once or number == 0:
            _check_finite(logp, rollouts.mask)
            fields = Fields.of(rollouts, logp)
            weights = objective.weights(fields, longest) if row_weights is None else row_weights  # (B,)
            weights = weights.where(whole, 0.0)
            found = objective.gradient(fields, weights)
            at_logp = found.logp.where(whole[:, None], 0.0)
        # 3. Backward through the model: ∇ Σ g·log π with g constant.
        surrogate = (at_logp[rows] * scores.logp).sum()
        if scores.logits is not None:
            with torch.no_grad():
                other = scored(models.reference, part)
            assert other.logits is not None
            of_part = replace(Fields.of(part, logp[rows]), ref_logp=other.logp)
            log_probs = scores.logits, other.logits
            kl = objective.kl_gradient(of_part, weights[rows], log_probs, split=len(parts) > 1)
            along = (kl.logp * scores.logp).sum()
            if kl.logits is not None:
                along = along + (kl.logits.to(scores.logits) * scores.logits).sum()
            surrogate = surrogate + along
            logged.append((kl.logged, len(part)))
        surrogate.backward()
    return logp, _mean([*logged, (found.logged, len(logp))])


def _check_finite(logp: Tensor, mask: Tensor) -> None:
    if not bool(torch.isfinite(logp.where(mask, 0.0)).all()):
        worst = float(logp[mask & ~torch.isfinite(logp)][0])
        raise NotFiniteError(f"the policy's log-prob of a token is {worst}: an update broke it; lower learning_rate")


def _mean(logged: list[tuple[float | None, int]]) -> float | None:
    """The mean over rows of what parts logged."""
    known = [(value, rows) for value, rows in logged if value is not None]
    return sum(value * rows for value, rows in known) / sum(rows for _, rows in known) if known else None
