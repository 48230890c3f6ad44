"""One gradient, left in the parameters' `.grad`: score, work out what each log-prob is pulled with, go backward."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kltest.finetune.faults import NotFiniteError
from kltest.finetune.objective import Fields, Objective
from kltest.finetune.processes import Processes
from kltest.language_models.language import Language
from kltest.language_models.rollouts import Rollouts
from kltest.language_models.scoring import Scores, score, score_in_parts


@dataclass(frozen=True)
class Followed:
    """What is told of a gradient: the joint batch's fields, this process's log-probs, and the KL that the term logs."""

    fields: Fields
    logp: Tensor
    logged: float | None


def accumulate(
    objective: Objective,
    policy: Language,
    reference: Language,
    rollouts: Rollouts,
    processes: Processes,
    *,
    longest: int,
    row_weights: Tensor | None = None,
) -> Followed:
    """Add this process's part of the gradient to `.grad`; `processes.sum_gradients` makes it the joint batch's.

    `rollouts` have rewards, the reference's log-probs where `needs_reference`, and the sampler's unless that is the
    policy itself. `row_weights` (B,) replace what rollouts count: probabilities, where they are enumerated.
    """
    temperature, size = objective.settings.temperature, objective.settings.micro_batch
    parts = list(rollouts.split(size))
    whole = None
    if len(parts) == 1:
        whole = score(policy, rollouts, temperature=temperature, logits=objective.takes_logits)
    logp = score_in_parts(policy, rollouts, size, temperature=temperature) if whole is None else whole.logp.detach()
    if not bool(torch.isfinite(logp.where(rollouts.mask, 0.0)).all()):
        worst = float(logp[rollouts.mask & ~torch.isfinite(logp)][0])
        raise NotFiniteError(f"the policy's log-prob of a token is {worst}: an update broke it; lower learning_rate")
    own = _fields(rollouts, logp)
    joint = Fields(**{name: processes.joint(value) for name, value in vars(own).items()})
    weights = objective.weights(joint, longest) if row_weights is None else row_weights
    pull = objective.pull(joint, weights)
    own_pull, own_weights = processes.own(pull.logp), processes.own(weights)
    logged: list[tuple[float | None, int]] = [(pull.logged, len(logp))]
    for rows in parts:
        scores = whole or score(policy, rollouts.rows(rows), temperature=temperature, logits=objective.takes_logits)
        surrogate = (own_pull[rows] * scores.logp).sum()
        if objective.takes_logits:
            split = len(parts) > 1 or processes.count > 1
            fields = Fields(**{name: value[rows] for name, value in vars(own).items()})
            more, value = _through_logits(
                objective, reference, rollouts.rows(rows), scores, fields, own_weights[rows], split=split
            )
            surrogate = surrogate + more
            logged.append((value, len(scores.logp)))
        surrogate.backward()
    return Followed(joint, logp, _mean(logged))


def needs_reference(objective: Objective) -> bool:
    """Whether the reference's log-probs of the sampled tokens are to be there beforehand."""
    return objective.kl is not None and not objective.takes_logits


def _fields(rollouts: Rollouts, logp: Tensor) -> Fields:
    assert rollouts.reward is not None
    return Fields(
        logp=logp,
        # Not looked at where it is not there: see needs_reference.
        ref_logp=logp if rollouts.ref_logp is None else rollouts.ref_logp,
        old_logp=logp if rollouts.old_logp is None else rollouts.old_logp,
        mask=rollouts.mask,
        tokens=rollouts.tokens,
        reward=rollouts.reward.to(logp),
        group=rollouts.group,
    )


def _mean(logged: list[tuple[float | None, int]]) -> float | None:
    """The mean over rows of what was logged of parts."""
    known = [(value, rows) for value, rows in logged if value is not None]
    return sum(value * rows for value, rows in known) / sum(rows for _, rows in known) if known else None


def _through_logits(
    objective: Objective,
    reference: Language,
    rollouts: Rollouts,
    scores: Scores,
    fields: Fields,
    weights: Tensor,
    *,
    split: bool,
) -> tuple[Tensor, float | None]:
    """The surrogate of a KL term that looks at all next tokens, and what it logs."""
    assert scores.logits is not None
    with torch.no_grad():
        other = score(reference, rollouts, temperature=objective.settings.temperature, logits=True)
    assert other.logits is not None
    fields = replace(fields, ref_logp=other.logp)
    pull = objective.pull_with_logits(fields, weights, (scores.logits, other.logits), split=split)
    surrogate = (pull.logp * scores.logp).sum()
    if pull.logits is not None:
        surrogate = surrogate + (pull.logits.to(scores.logits) * scores.logits).sum()
    return surrogate, pull.logged
