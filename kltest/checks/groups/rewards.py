"""Rewards that small environments do not have: large ones, and groups of which few rollouts are solved.

A penalty that reads no reward of 0 or 1 may read others: where a reward model is saturated, or a prompt is hard.
"""

from contextlib import suppress
from dataclasses import replace

import numpy as np

from kltest.checks.batches import GroupFixture, group_fixture, limit, norm
from kltest.checks.check import Found
from kltest.errors import KltestError
from kltest.identify.findings import Findings, shared
from kltest.loss.placement import ROW_FIELDS

# Rewards of 0 and 1 are multiplied by these; rollouts of the larger groups that are tried.
FACTORS = (-1.0, 0.1, 10.0, -10.0)
LARGER = 16


@shared
def rewards(findings: Findings) -> Found | None:
    """Report rewards with which the KL part differs, if it is the same with those of 0 and 1 in each order."""
    if not findings.observed.uses & ROW_FIELDS or not findings.agree:
        return None
    fixture = group_fixture(findings)
    sizes = [fixture.size]
    if findings.measure.sizes.grouped or not findings.measure.sizes.requested:
        sizes.append(LARGER)
    for size in sizes:
        group = replace(fixture, size=size)

        def part(given: list[float], group: GroupFixture = group) -> np.ndarray:
            return group.kl_part(group.rollout(group.different, given))

        usual = group.untied
        with suppress(KltestError):  # it takes no group of this size
            before = part(usual)
            small = limit(findings) * norm(before)
            if norm(part([1 - one for one in usual]) - before) > small:
                return None
            few = [[float(place < solved) for place in range(size)] for solved in range(1, size)]
            for given in [*([factor * one for one in usual] for factor in FACTORS), *few]:
                if (off := norm(part(given) - before)) > small:
                    shown = ", ".join(f"{one:g}" for one in given)
                    return Found(
                        f"With the rewards {shown} of {size} rollouts of a prompt the KL part of the gradient differs "
                        f"by {off / (norm(before) or 1.0):.2g} of what it is where every other reward is 1; nothing "
                        "else changes."
                    )
    return None
