"""Second route: before a disagreement is reported, compute both sides of it again in another way."""

import numpy as np
import torch

from kltest.environments import Instance
from kltest.errors import KltestError
from kltest.identify.case import Case, size, target
from kltest.identify.findings import Combination, when_current
from kltest.loss.calling import Loss
from kltest.moments import Moments
from kltest.moments.differentiate import leaf_gradients
from kltest.moments.moments import Reduction
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout
from kltest.truth import gradient_again

# The two routes to one number differ by rounding only; anything more is a defect of kltest's.
ROUTES_AGREE = 1e-9


class DisagreementError(KltestError):
    """Two independent routes to one exact number differ: a defect of kltest, not of the loss."""


def compare(loss: Loss, case: Case, moments: Moments, declared: Combination) -> None:
    """Compute the declared gradient and the loss's expected gradient again by autograd, on the case's first instance.

    Raises:
        DisagreementError: One of the two differs from the first route by more than rounding.
    """
    instance = case.instances[0]
    declared = when_current(declared) if case.sampler == "current" else declared
    wanted = target(declared, instance, case.sampler)
    again = sum(c * gradient_again(name, instance) for name, c in declared.items())
    scale = max(float(np.linalg.norm(wanted)), size(instance))
    if np.linalg.norm(wanted - again) > ROUTES_AGREE * scale:
        raise DisagreementError("the declared gradient comes out differently by dynamic programming and by autograd")
    gradient_of_table = through_table(loss, instance, case.sampler, moments.reduction, case.seed)
    scale = max(float(np.sqrt(moments.second_moment)), size(instance))
    limit = max(ROUTES_AGREE, TOLERANCES[moments.dtype].gradient) * scale
    if np.linalg.norm(moments.gradient - gradient_of_table) > limit:
        raise DisagreementError(
            f"the expected gradient of {loss.name} comes out differently through a table of logits: does it "
            "give different results for the same input?"
        )


def through_table(loss: Loss, instance: Instance, sampler: str, reduction: Reduction, padding: int) -> np.ndarray:
    """Return the (C, V) expected gradient, chained to a table of logits by autograd.

    The first route called each rollout alone. Here they are called in one batch if the loss treats its rows apart.
    """
    paths, weights = instance.paths, torch.from_numpy(instance.rollout_weights(sampler))
    table = torch.from_numpy(instance.policy).requires_grad_()
    log_probs = table.log_softmax(dim=1)
    everything = Rollout.of(instance, sampler=sampler, padding=padding)
    total = table.sum() * 0
    rows = np.arange(len(paths))
    for part in np.split(rows, len(rows)) if reduction == "coupled" else [rows]:
        rollout = everything.take(part)
        objective = loss(rollout).objective * (1 if reduction == "sum" else len(part))
        live = torch.from_numpy(paths.mask[part])
        contexts, tokens = (torch.from_numpy(field[part]) for field in (paths.contexts, paths.tokens))
        weight = (weights[part][:, None] * live)[live]
        for name, received in leaf_gradients(loss, objective, rollout).items():
            value = log_probs[contexts, tokens] if name == "logp" else log_probs[contexts]
            each = (received * value)[live]
            total = total + weight @ (each if name == "logp" else each.sum(dim=-1))
    return torch.autograd.grad(total, table)[0].numpy()
