"""KL402: the baseline contains the rollout that it is subtracted from."""

from __future__ import annotations

from math import isclose

from kltest.checks.check import Check
from kltest.counterexample.demonstration import Demonstration, SmallWorld, of_gradients
from kltest.identify.findings import Combination, Findings, Row, local_form, without_sampler


def explains(row: Row, findings: Findings) -> bool:
    if row.batch < 2:
        return False
    share = 1 - 1 / row.batch
    is_shrunk = shrunk(row.identified, row.expected, share) or shrunk(
        without_sampler(row.identified), local_form(row.expected), share
    )
    # Half of it is also what one divisor too many leaves of batches of two; then less is left of larger ones.
    return is_shrunk and (row.batch > 2 or not divided_again(row, findings))


def divided_again(row: Row, findings: Findings) -> bool:
    """Whether batches of three get less of the declared gradient than batches of two."""
    from kltest.checks.groups.groups import share_by_size

    shares = share_by_size(row, findings)
    return bool(shares) and shares[3] < shares[2]


def shrunk(identified: Combination | None, expected: Combination, share: float) -> bool:
    """Whether some terms are there in full and at least one is `share` of what is expected."""
    if identified is None or set(identified) != set(expected) or "zero" in identified:
        return False
    ratios = [identified[name] / expected[name] for name in expected]
    small = [isclose(ratio, share, rel_tol=1e-3) for ratio in ratios]
    return any(small) and all(
        is_small or isclose(r, 1, rel_tol=1e-3) for r, is_small in zip(ratios, small, strict=True)
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


WORLD = SmallWorld(policy=[(0.8, 0.2)], reference=[(0.5, 0.5)])


def demonstrate() -> Demonstration:
    return of_gradients(WORLD, {"as written": with_self, "mended": without_self}, batch=4)


CHECK = Check(
    code="KL402",
    name="self-inclusive-baseline",
    title="The baseline contains the rollout itself, which takes 1/n of the gradient away",
    what=(
        "The group's mean is subtracted as a baseline with the rollout's own value in it. A baseline must not depend "
        "on the sample that it is subtracted from: here 1/n of it does, and the expected gradient is (1 − 1/n) of the "
        "declared one."
    ),
    why=(
        "The coefficient that is applied is (1 − 1/n)·β: half of it in groups of two, three quarters in groups of "
        "four. Changing the group's size changes the strength of the penalty."
    ),
    example=(
        "Two actions, π = (0.8, 0.2), ref = (0.5, 0.5), groups of four; derivatives with respect to the first "
        "probability. The truth is ln 4 = 1.386294; with the mean of all four as the baseline it is three quarters of "
        "that, 1.039721."
    ),
    fix="Subtract the mean of the other rollouts, or multiply what is left by n/(n − 1), which is the same.",
    sources=(
        "Kool, van Hoof & Welling 2019, Buy 4 REINFORCE Samples, Get a Baseline for Free!",
        "Ahmadian et al. 2024 (RLOO), arXiv 2402.14740",
    ),
    wrong=with_self,
    mended=without_self,
    demonstrate=demonstrate,
    explains=explains,
)
