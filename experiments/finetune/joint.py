"""The penalty of a step that keeps reward and penalty in one piece: one ratio in front of the return less its baseline.

The reward of a stale run has the ratio of the sequence in front of it, less the mean of the other rollouts' rewards.
With this term the step is that ratio times R − β·Σu less the mean of the others'.
"""

from torch import Tensor

from kltest.estimators.groups import leave_one_out


def joint(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    """Return ρ_(1:L)·(Σu − the others' mean)·Σlog π, the first two factors detached. Gradient: ∇KL. (B, T) → (B,)."""
    ratio = ((logp - old_logp) * mask).sum(dim=1).exp().detach()
    return ratio * leave_one_out(logp, ref_logp, mask, group)
