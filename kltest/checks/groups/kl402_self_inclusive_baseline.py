"""KL402: the baseline contains the rollout that it is subtracted from."""

from math import isclose

from kltest.checks.batches import share_by_size
from kltest.checks.sequences.lengths import influence
from kltest.identify.findings import Combination, Findings, Row, local_form, when_current
from kltest.moments.tolerances import Tolerances


def explains(row: Row, findings: Findings) -> bool:
    """Return True for the expected gradient times 1 − 1/B, in batches of B rows whose costs are its baseline."""
    if row.batch < 2:
        return False
    share, found = 1 - 1 / row.batch, when_current(row.identified)
    expected = when_current(row.expected)
    is_shrunk = _shrunk(found, expected, share) or _shrunk(found, local_form(expected), share)
    # A baseline is made of the other rollouts' costs; a divisor that is off by one is not.
    if not is_shrunk or not influence(findings).log_ratios:
        return False
    if row.batch > 2:
        return True
    # One divisor too many also leaves half of the declared gradient in batches of two, but less of it in larger ones.
    shares = share_by_size(row, findings)
    return not shares or shares[3] >= shares[2]


def _shrunk(identified: Combination, expected: Combination, share: float) -> bool:
    """Return True if at least one term is `share` of the expected one and the others are there in full."""
    if not identified or set(identified) != set(expected) or "zero" in identified:
        return False
    ratios = [identified[name] / expected[name] for name in expected]
    small = [isclose(ratio, share, rel_tol=Tolerances.factor) for ratio in ratios]
    return any(small) and all(
        is_small or isclose(r, 1, rel_tol=Tolerances.factor) for r, is_small in zip(ratios, small, strict=True)
    )


def with_self(logp, ref_logp, mask):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    score = logp.where(mask != 0, 0.0).sum(-1)
    return ((cost - cost.mean()) * score).mean()


def without_self(logp, ref_logp, mask):
    cost = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).detach()
    score = logp.where(mask != 0, 0.0).sum(-1)
    others = (cost.sum() - cost) / (len(cost) - 1)
    return ((cost - others) * score).mean()
