"""A batch in which some rollouts have chosen log-ratios and the others are mild.

Every log-prob is at most 0, rows of logits are normalised, and the sampler is the policy, so that importance ratios are
1 and only u = logp − ref_logp is extreme. The mild rollouts are there for losses that couple rollouts.
"""

import torch
from torch import Tensor

from kltest.checks.batches import with_advantage
from kltest.identify.findings import Findings
from kltest.rollout import Rollout

LENGTH = 3
# Log-prob of the likelier of policy and reference; log-ratios of the mild rollouts, which have LENGTH tokens.
LIKELY = -0.5
MILD = (0.3, -0.4, 0.2, -0.1, 0.4, -0.2)


def companions(findings: Findings) -> int:
    """Number of mild rollouts that, with one more, make two groups of the size that the loss is graded with."""
    size = findings.measure.sizes.each[0] if findings.measure.sizes.grouped else 2
    return 2 * size - 1


def batch_of(log_ratios: list[float], companions: int, *, length: int) -> Rollout:
    """One rollout of `length` tokens for each log-ratio, which all its tokens have, then `companions` mild ones."""
    count = len(log_ratios)
    u = torch.zeros(count + companions, LENGTH, dtype=torch.float64)
    mask = torch.ones_like(u)
    u[:count] = torch.tensor(log_ratios, dtype=torch.float64)[:, None]
    u[:count, length:], mask[:count, length:] = 0.0, 0.0
    mild = torch.tensor(MILD).double().repeat(companions * LENGTH)
    u[count:] = mild[: companions * LENGTH].reshape(companions, LENGTH)
    # With the likelier of the two at −1/2 the other one's log-prob is legal.
    logp, ref_logp = LIKELY + u.clamp(max=0.0), LIKELY - u.clamp(min=0.0)
    rows = torch.arange(len(u))
    logits = _logits(logp, (0.5, 0.3, 0.2))
    return with_advantage(
        Rollout(
            {
                "logp": logp,
                "ref_logp": ref_logp,
                "old_logp": logp.clone(),
                "mask": mask,
                "tokens": torch.ones(u.shape, dtype=torch.int64),
                "logits": logits,
                "ref_logits": _logits(ref_logp, (0.2, 0.3, 0.5)),
                "old_logits": logits.clone(),
                "reward": (rows % 2).double(),
                "group": rows // ((companions + 1) // 2),
            }
        )
    )


def _logits(logp: Tensor, others: tuple[float, ...]) -> Tensor:
    """(B, T, V) normalised rows in which token 1 has this log-prob and the others share the rest."""
    left = torch.log(-torch.expm1(logp))[..., None] + torch.tensor(others).double().log()
    return torch.cat([left[..., :1], logp[..., None], left[..., 1:]], dim=-1)
