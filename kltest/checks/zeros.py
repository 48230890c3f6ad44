"""Log-probs of exactly 0 that are taken for padding or for missing ones.

In float32 the log-prob of a token with a probability above 1 − 6e-8 is 0. Such a token has no gradient of its own, but
what the others say of it is a cost of the choices before it. So the first token of each rollout gets a log-prob of 0,
and one that is a billionth less: the gradient at other tokens is the same, unless 0 is a special number.
"""

from contextlib import suppress

import numpy as np
import torch

from kltest.checks.batches import apart, gradient_of, usual_batch
from kltest.checks.check import Found
from kltest.errors import KltestError
from kltest.identify.findings import Findings, shared

NEXT_TO_ZERO = -1e-9
# Share of a gradient by which it jumps; what goes with the square root of a log-prob moves by less.
JUMP = 1e-3
OF = {"logp": "the policy", "ref_logp": "the reference", "old_logp": "the sampler"}


@shared
def zeros(findings: Findings) -> Found | None:
    """Report a gradient at other tokens that jumps where the log-prob of one is exactly 0."""
    if findings.loss.instead is not None or not findings.agree:
        return None
    batch, loss = usual_batch(findings), findings.measure.experiment().loss
    for name in sorted(OF.keys() & findings.observed.uses, key=list(OF).index):
        found = []
        with suppress(KltestError):
            for value in (0.0, NEXT_TO_ZERO):
                field = batch.peek(name).detach().clone()
                field[:, 0] = torch.tensor(value, dtype=field.dtype)
                found.append(gradient_of(loss, batch.replace(**{name: field}))[:, 1:])
        if len(found) < 2 or not all(np.isfinite(one).all() for one in found):
            continue
        if (off := apart(*found)) > JUMP:
            return Found(
                f"Where the log-prob of the first token under {OF[name]} is exactly 0, as that of a sure token in "
                f"float32, the gradient at later tokens differs by {off:.2g} of its size from that where it is "
                f"{NEXT_TO_ZERO:g}."
            )
    return None
