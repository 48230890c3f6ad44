"""One gradient, accumulated in the parameters' `.grad`: score, differentiate at the log-probs, go backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kltest.finetune.errors import NotFiniteError
from kltest.finetune.objective import Fields, Objective
from kltest.finetune.processes import Processes
from kltest.language_models.language import LanguageModel
from kltest.language_models.rollouts import Rollouts
from kltest.language_models.scoring import Scores, score, score_in_parts


@dataclass(frozen=True)
class UpdateInfo:
    """Inputs of an update.

    Attributes:
        fields: The joint batch of all processes.
        logp: (B, T) this process's log-probs.
        logged: The KL that the term logs, in nats a rollout; None if it logs nothing.
    """

    fields: Fields
    logp: Tensor
    logged: float | None


def accumulate(
    objective: Objective,
    policy: LanguageModel,
    reference: LanguageModel,
    rollouts: Rollouts,
    processes: Processes,
    *,
    longest: int,
    row_weights: Tensor | None = None,
) -> UpdateInfo:
    """Add this process's part of the gradient to `.grad`; `processes.sum_gradients` makes it that of the joint batch.

    Args:
        objective: Rewards and KL term.
        policy: The model whose parameters get the gradient.
        reference: The frozen reference.
        rollouts: This process's rewarded rollouts; with the reference's log-probs if `needs_reference`, and with the
            sampler's unless that is the policy itself.
        processes: The processes that share the run.
        longest: Most tokens of a rollout.
        row_weights: (B,) weights instead of the objective's, as probabilities of enumerated rollouts.

    Raises:
        NotFiniteError: A log-prob of the policy is not finite.
    """
    temperature, size = objective.settings.temperature, objective.settings.micro_batch
    parts = list(rollouts.split(size))
    # 1. Log-probs (B, T) of the sampled tokens; a single part keeps its graph for the backward pass.
    whole = None
    if len(parts) == 1:
        whole = score(policy, rollouts, temperature=temperature, logits=objective.takes_logits)
    logp = score_in_parts(policy, rollouts, size, temperature=temperature) if whole is None else whole.logp.detach()
    if not bool(torch.isfinite(logp.where(rollouts.mask, 0.0)).all()):
        worst = float(logp[rollouts.mask & ~torch.isfinite(logp)][0])
        raise NotFiniteError(f"the policy's log-prob of a token is {worst}: an update broke it; lower learning_rate")
    # 2. The gradient at the log-probs, for the joint batch: advantages and couplings need all of its rows.
    own = _fields(rollouts, logp)
    joint = Fields(**{name: processes.joint(value) for name, value in vars(own).items()})
    weights = objective.weights(joint, longest) if row_weights is None else row_weights  # (B,)
    found = objective.gradient(joint, weights)
    at_logp, own_weights = processes.own(found.logp), processes.own(weights)
    # 3. Backward through the model, part by part: ∇ Σ g·log π with g constant.
    logged: list[tuple[float | None, int]] = [(found.logged, len(logp))]
    for rows in parts:
        scores = whole or score(policy, rollouts.rows(rows), temperature=temperature, logits=objective.takes_logits)
        surrogate = (at_logp[rows] * scores.logp).sum()
        if objective.takes_logits:
            split = len(parts) > 1 or processes.count > 1
            fields = Fields(**{name: value[rows] for name, value in vars(own).items()})
            more, value = _through_logits(
                objective, reference, rollouts.rows(rows), scores, fields, own_weights[rows], split=split
            )
            surrogate = surrogate + more
            logged.append((value, len(scores.logp)))
        surrogate.backward()
    return UpdateInfo(joint, logp, _mean(logged, processes))


def needs_reference(objective: Objective) -> bool:
    """True if the reference's log-probs of the sampled tokens must be known before the update."""
    return objective.kl is not None and not objective.takes_logits


def _fields(rollouts: Rollouts, logp: Tensor) -> Fields:
    assert rollouts.reward is not None
    return Fields(
        logp=logp,
        # A placeholder if the reference is not needed.
        ref_logp=logp if rollouts.ref_logp is None else rollouts.ref_logp,
        old_logp=logp if rollouts.old_logp is None else rollouts.old_logp,
        mask=rollouts.mask,
        tokens=rollouts.tokens,
        reward=rollouts.reward.to(logp),
        group=rollouts.group,
    )


def _mean(logged: list[tuple[float | None, int]], processes: Processes) -> float | None:
    """The mean over the rows of all processes."""
    known = [(value, rows) for value, rows in logged if value is not None]
    if not known:
        return None
    mean = sum(value * rows for value, rows in known) / sum(rows for _, rows in known)
    if processes.count == 1:
        return mean
    return float(processes.joint(torch.tensor([mean], dtype=torch.float64, device=processes.device)).mean())


def _through_logits(
    objective: Objective,
    reference: LanguageModel,
    rollouts: Rollouts,
    scores: Scores,
    fields: Fields,
    weights: Tensor,
    *,
    split: bool,
) -> tuple[Tensor, float | None]:
    """The surrogate of a KL term that reads the log-probs of all next tokens, and the KL that it logs."""
    assert scores.logits is not None
    with torch.no_grad():
        other = score(reference, rollouts, temperature=objective.settings.temperature, logits=True)
    assert other.logits is not None
    fields = replace(fields, ref_logp=other.logp)
    found = objective.gradient_with_logits(fields, weights, (scores.logits, other.logits), split=split)
    surrogate = (found.logp * scores.logp).sum()
    if found.logits is not None:
        surrogate = surrogate + (found.logits.to(scores.logits) * scores.logits).sum()
    return surrogate, found.logged
