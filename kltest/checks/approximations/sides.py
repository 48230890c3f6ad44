"""Sides: whose likeliest tokens a loss distinguishes, and whose it says; ranks of two sides in place of tokens."""

import numpy as np
import torch

from kltest.checks.approximations.heads import head_of, sees_all_tokens
from kltest.environments import Instance, bandit
from kltest.errors import KltestError
from kltest.identify.findings import Findings, shared
from kltest.moments.differentiate import at_leaves
from kltest.moments.tolerances import TOLERANCES
from kltest.names import SUPPORT_SIZE, says_top_k, whose
from kltest.rollout import Rollout, elsewhere
from kltest.truth import support_named

WORDS = {"": "policy", "ref_": "reference"}


@shared
def other_side(findings: Findings) -> str:
    """Return in words that the support is another side's than a parameter, or the function, says; "" if it is not."""
    if (said := _said(findings)) is None:
        return ""
    rows = [findings.measure.alone(environment, "current") for environment in ("bandit", "sequence")]
    names = [support_named(name.partition("@")[0]) for row in rows if row for name in row.identified or ()]
    found = {"reference" if one.whose == "top" else "policy" for one in names if one}
    if not found and (head := head_of(findings)):
        found = {head.by}
    other = found - {WORDS[said]}
    return f"The support is said to be the {WORDS[said]}'s, and is the {other.pop()}'s." if other else ""


def _said(findings: Findings) -> str | None:
    """The prefix of the side that a parameter, the name of the ids or the function's own name says; None if unsaid."""
    support, name = findings.loss.support, findings.loss.name.rpartition(":")[2]
    if support is not None and support.said:
        return support.of
    of = whose(name) if says_top_k(name) else None
    return of if of in WORDS else None


@shared
def rank_by_rank(findings: Findings) -> bool:
    """Return True if the gradient stays the same whichever tokens the reference's log-probs belong to.

    The k likeliest of each side are then compared rank by rank, as `logits.topk(k).values` of both are.
    """
    if not sees_all_tokens(findings) or not {"logits", "ref_logits"} <= findings.observed.uses:
        return False
    instance = Instance.draw(bandit(SUPPORT_SIZE + 2), findings.seed)
    batch = Rollout.of(instance, padding=findings.seed)
    ref = batch.peek("ref_logits").detach()
    try:
        same, moved, other = (
            at_leaves(findings.loss, findings.loss(rollout).objective, rollout)
            for rollout in (batch.replace(ref_logits=table) for table in (ref, ref.roll(1, -1), elsewhere(ref)))
        )
    except KltestError:
        return False
    limit = TOLERANCES[findings.observed.dtype].head

    def alike(one: list[torch.Tensor]) -> bool:
        return all(np.allclose(a, b, rtol=0, atol=limit * float(a.abs().max())) for a, b in zip(same, one, strict=True))

    return alike(moved) and not alike(other)
