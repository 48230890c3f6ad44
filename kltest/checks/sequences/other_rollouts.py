"""Influence of the other rollouts of a batch on one rollout's KL term: through their lengths, or their log-ratios."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kltest.checks.check import shared
from kltest.checks.group_fixture import group_fixture, limit, norm
from kltest.identify.findings import Findings
from kltest.identify.instances import instances
from kltest.rollout import Rollout, elsewhere

VARYING = "ragged"


class Influence(NamedTuple):
    """If a rollout's KL term changes with the lengths of the others, or with the reference's log-probs of them."""

    lengths: bool
    log_ratios: bool


@shared
def influence(findings: Findings) -> Influence:
    """Exchange the rollouts beside one, and their log-probs under the reference; nothing else in the batch changes."""
    fixture = replace(group_fixture(findings), instance=instances(VARYING, findings.seed)[0])
    shortest, middle, longest = (int(np.argmax(fixture.instance.paths.lengths == length)) for length in (1, 2, 3))

    def own(rollout: Rollout) -> np.ndarray:
        return fixture.kl_part(rollout)[0]

    def beside(other: int) -> Rollout:
        return fixture.rollout([middle, *[other] * (fixture.size - 1)], fixture.untied)

    long = beside(longest)
    moved = {}
    for name in ("ref_logp", "ref_logits"):
        moved[name] = long.peek(name).detach().clone()
        moved[name][1:] = elsewhere(moved[name][1:])
    base = own(long)
    others = own(beside(shortest)), own(long.replace(**moved))
    return Influence(*(norm(other - base) > limit(findings) * norm(base) for other in others))
