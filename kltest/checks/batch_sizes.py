"""Dependence of the expected gradient on the batch size, in a bandit."""

from dataclasses import replace

from kltest.errors import KltestError
from kltest.identify.case import target
from kltest.identify.findings import Findings, Row
from kltest.identify.instances import instances

PAIR_AND_TRIPLE = (2, 3)


def share_by_size(row: Row, findings: Findings) -> dict[int, float]:
    """Share of the declared gradient that is left in batches of two and of three, in a bandit.

    A baseline that contains the rollout and a divisor that is taken twice both leave one half of it in batches of two;
    in batches of three the first leaves two thirds and the second one third. Empty if the loss takes no batch of one
    of these sizes.
    """
    shares = {}
    for size in PAIR_AND_TRIPLE:
        instance = instances("bandit", findings.seed, size if findings.measure.sizes.grouped else None)[0]
        wanted = target(findings.expect, instance, row.sampler)
        try:
            found = findings.measure.expected(replace(row, batch=size), instance).gradient
        except KltestError:
            return {}
        if not wanted.any():
            return {}
        shares[size] = float((found * wanted).sum() / (wanted**2).sum())
    return shares
