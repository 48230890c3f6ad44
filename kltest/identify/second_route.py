"""Second route: before a disagreement is reported, both sides of it are computed again in another way."""

from collections.abc import Callable

import numpy as np
import torch

from kltest.errors import KltestError
from kltest.identify.case import Case, size, target
from kltest.identify.combinations import Combination, when_current
from kltest.moments import Moments
from kltest.moments.differentiate import RowGradients
from kltest.moments.tolerances import TOLERANCES
from kltest.rollout import Rollout
from kltest.truth import gradient_again

Call = Callable[[Rollout], RowGradients]
# The two routes to one number differ by rounding only; anything more is a defect of kltest's.
ROUTES_AGREE = 1e-9


class DisagreementError(KltestError):
    """Two independent routes to one exact number differ: a defect of kltest, not of the loss."""


def compare(call: Call, case: Case, moments: Moments, declared: Combination) -> None:
    """Compute the declared gradient and that of a loss, whose calls these are, again on the case's first instance.

    The expected gradient of whole batches is not computed again: it has far more terms.

    Raises:
        DisagreementError: One of the two differs from the first route by more than rounding.
    """
    instance = case.instances[0]
    declared = when_current(declared) if case.sampler == "current" else declared
    terms = [c * gradient_again(name, instance) for name, c in declared.items()]
    limit = ROUTES_AGREE * max(size(instance), *(float(np.linalg.norm(term)) for term in terms))
    if not np.linalg.norm(target(declared, instance, case.sampler) - sum(terms)) <= limit:
        raise DisagreementError("the declared gradient comes out differently by dynamic programming and by autograd")
    if moments.batch > 1:
        return
    limit = max(ROUTES_AGREE, TOLERANCES[moments.dtype].gradient) * max(moments.second_moment**0.5, size(instance))
    if not np.linalg.norm(moments.gradient - through_table(call, case, moments)) <= limit:
        raise DisagreementError(
            "the expected gradient comes out differently through a table of logits: does the loss give different "
            "results for the same input?"
        )


def through_table(call: Call, case: Case, moments: Moments) -> np.ndarray:
    """Return the (C, V) expected gradient, chained to a table of logits by autograd.

    The first route called each rollout alone. Here they are called in one batch if the loss treats its rows apart.
    """
    instance = case.instances[0]
    paths, weights = instance.paths, torch.from_numpy(instance.rollout_weights(case.sampler))
    table = torch.from_numpy(instance.policy.copy()).requires_grad_()
    contexts, tokens = torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens)
    everything = table.log_softmax(dim=1)[contexts]
    at = {"logits": everything, "logp": everything.gather(2, tokens[:, :, None])[:, :, 0]}
    batch, total = Rollout.of(instance, sampler=case.sampler, padding=case.seed), table.sum() * 0
    rows = np.arange(len(paths))
    for part in np.split(rows, len(rows)) if moments.reduction == "coupled" else [rows]:
        share = weights[part] * (1 if moments.reduction == "sum" else len(part))
        for name, received in call(batch.take(part)).by_leaf.items():
            total = total + share @ (torch.from_numpy(received) * at[name][part]).flatten(1).sum(dim=1)
    return torch.autograd.grad(total, table)[0].numpy()
