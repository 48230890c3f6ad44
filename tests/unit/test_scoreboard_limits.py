"""Limits of batches, for losses whose limits and rates follow by hand, and for wrong ones, which are refused."""

from functools import cache

import numpy as np
import pytest
from weekly import first

from kltest.identify.graded import kl_part
from kltest.identify.measure import Measure
from kltest.loss.outcome import Call
from kltest.loss.resolve import bind
from kltest.samples.blocks import Interval
from kltest.scoreboard import limits as limits_module
from kltest.scoreboard.limits import EXACT, SAMPLED, _rate, keeps_groups_apart, limits
from kltest.scoreboard.rows import BATCH, MARGIN

REVERSE = {"reverse_kl": 1.0}


def score(logp, mask, advantage):
    return (advantage.detach() * (logp * mask).sum(1)).mean()


def whitened(logp, ref_logp, mask):
    """Costs less their mean over their spread in the batch. Both settle at the rate 1/B: ∇KL over the cost's spread."""
    cost = ((logp - ref_logp) * mask).sum(1)
    return score(logp, mask, (cost - cost.mean()) / (cost.std(unbiased=False) + 1e-6))


def whitened_with_reward(logp, ref_logp, mask, reward, beta):
    """The same of the reward less the KL: in the limit both have the one factor."""
    gain = reward - beta * ((logp - ref_logp) * mask).sum(1).detach()
    return score(logp, mask, -(gain - gain.mean()) / (gain.std(unbiased=False) + 1e-6))


def leave_one_out(logp, ref_logp, mask):
    """The mean of the others is independent of a rollout's own score: ∇KL in every batch."""
    cost = ((logp - ref_logp) * mask).sum(1)
    others = (cost.sum() - cost) / max(len(cost) - 1, 1)
    return score(logp, mask, cost - others)


def batch_mean(logp, ref_logp, mask):
    """The mean has a share 1/B of a rollout's own cost: (1 − 1/B)·∇KL."""
    cost = ((logp - ref_logp) * mask).sum(1)
    return score(logp, mask, cost - cost.mean())


def token_mean(logp, ref_logp, mask):
    """E[Σu·g / ΣL] → E[Σu·g]/E[L], the next-token part over the mean length, since ΣL/B settles."""
    return ((logp - ref_logp).square() / 2 * mask).sum() / mask.sum()


def k1_token_mean(logp, ref_logp, mask):
    """E[Σg / ΣL] → 0: a score is independent of all lengths but its own, which is 1/B of them."""
    return ((logp - ref_logp) * mask).sum() / mask.sum()


def grows(logp, ref_logp, mask):
    """Never converges: the share of the forward KL's next-token part rises with log B."""
    u, share = logp - ref_logp, 0.1 * np.log(len(logp))
    return ((u.square() / 2 + share * ((-u).exp() - 1 + u)) * mask).sum(1).mean()


def another(logp, ref_logp, mask):
    """Starts near the next-token part of one KL and comes to that of the other, as 1/B."""
    u, share = logp - ref_logp, 1 / len(logp)
    return ((share * u.square() / 2 + (1 - share) * ((-u).exp() - 1 + u)) * mask).sum(1).mean()


def nearly(logp, ref_logp, mask):
    """Planted: in the limit 3 % of the norm are of no name, which a rate of 1/B from small batches would deny."""
    u = (logp - ref_logp) * mask
    return (u.square() / 2 * mask).sum() / mask.sum() + (-0.004 * (9 * u).cos() * mask).sum(1).mean()


def row_mean(logp, ref_logp, mask):
    """k3 over each row's own tokens: as in grading, without a name where lengths differ.

    Two names fit it in each instance, for rollouts of at most two tokens have few gradients: with other shares in each.
    """
    u = logp - ref_logp
    return (((-u).exp() - 1 + u) * mask).sum(1).div(mask.sum(1)).mean()


def measured(function):
    loss = kl_part(bind(function, Call("loss", None, None, {})), REVERSE, 0)
    measure = Measure(loss, REVERSE, frozenset(loss.takes))
    return {each["environment"]: each for each in limits(loss, measure, BATCH, "float64")}


def middles(limit, name):
    return [sum(ends) / 2 for ends in limit["terms"][name]]


found = cache(measured)


@pytest.mark.parametrize(
    ("function", "names", "off"),
    first(
        1,
        [
            (token_mean, {"local_reverse_kl"}, ("ragged",)),
            (whitened, {"reverse_kl"}, ("sequence", "ragged")),
            (leave_one_out, {"reverse_kl"}, ()),
            (batch_mean, {"reverse_kl"}, ()),
            (k1_token_mean, set(), ("ragged",)),
            (another, {"local_forward_kl"}, ("sequence", "ragged")),
        ],
    ),
)
def test_the_limit_and_its_rate_are_those_derived_by_hand(function, names, off):
    for environment, limit in found(function).items():
        assert set(limit["terms"]) == names, environment
        # Zero where nothing is left in any batch, None where there is no limit.
        assert limit["rate"] is not None, environment
        assert (limit["rate"] > 0) == (environment in off), environment
        assert set(limit["sampled"]) == {str(size) for size in SAMPLED}
        assert {str(size) for size in EXACT[:2]} <= set(limit["exact"])
        assert limit["sampled"][str(SAMPLED[-1])][2] <= MARGIN


@pytest.mark.scheduled
def test_coefficients_of_limits_are_those_derived_by_hand():
    for environment in ("sequence", "ragged"):
        assert middles(found(leave_one_out)[environment], "reverse_kl") == pytest.approx([1.0, 1.0], abs=1e-6)
        # Of the largest batches: 1 − 1/128, in four digits.
        assert middles(found(batch_mean)[environment], "reverse_kl") == pytest.approx([127 / 128] * 2, abs=5e-5)
        limit = found(token_mean)[environment]
        per_token = [c * length for c, length in zip(middles(limit, "local_reverse_kl"), limit["lengths"], strict=True)]
        assert per_token == pytest.approx([1.0, 1.0], rel=0.02)  # what is left is some 0.2/B of 128
        # A spread differs from policy to policy.
        one, other = middles(found(whitened)[environment], "reverse_kl")
        assert abs(one - other) > 0.05 * abs(one)


@pytest.mark.scheduled
def test_whitening_keeps_the_proportion_of_reward_and_kl():
    for limit in measured(whitened_with_reward).values():
        assert set(limit["terms"]) == {"reverse_kl", "expected_reward"}
        _, low, high = limit["beside_reward"]
        assert low <= 1 <= high
        assert high - low < 0.2
        assert limit["rate"] > 0


@pytest.mark.scheduled
def test_what_moves_on_or_comes_to_nothing_named_has_no_limit():
    assert [limit["rate"] for limit in found(grows).values()] == [None, None]
    assert found(nearly)["ragged"]["rate"] is None


def test_two_names_in_other_shares_in_each_instance_are_no_limit():
    of_rows = measured(row_mean)
    assert set(of_rows["sequence"]["terms"]) == {"local_forward_kl"}
    assert of_rows["ragged"]["terms"] is None


def test_a_wrong_rate_is_refused_and_a_right_one_is_not():
    """Fitted to batches of 2 to 4 alone, then held against intervals at 8, 32 and 128."""

    def held(law, drawn, width=0.2):
        around = {size: Interval(drawn(size), drawn(size) * (1 - width), drawn(size) * (1 + width)) for size in SAMPLED}
        return _rate({size: law(size) for size in EXACT}, around, 1e-7)

    def inverse(size):
        return 0.4 / size

    assert held(inverse, inverse) == pytest.approx(0.4)
    assert held(inverse, lambda size: 0.4 / size + 0.02) is None
    # It vanishes, more slowly.
    assert held(lambda size: 0.4 * size**-0.5, lambda size: 0.4 * size**-0.5) is None
    assert held(lambda size: 0.3, lambda size: 0.3) is None
    # Wrong at 128 alone.
    assert held(inverse, lambda size: 0.4 / size if size < SAMPLED[-1] else 0.04) is None
    # An interval that is too wide refutes nothing.
    assert held(inverse, lambda size: 0.4 / size + 0.02, width=1.0) == pytest.approx(0.4)


def test_a_coefficient_that_still_moves_is_seen(monkeypatch):
    """Without that test two names that always fit would pass for a limit whatever their shares do."""
    monkeypatch.setattr(limits_module, "_moved", lambda before, now: False)
    assert measured(grows)["sequence"]["rate"] == 0


def test_groups_that_do_not_touch_each_other_are_told_from_a_batch():
    def within_groups(logp, ref_logp, mask, group):
        cost, same = ((logp - ref_logp) * mask).sum(1).detach(), (group[:, None] == group[None, :]).double()
        return score(logp, mask, cost - same @ cost / same.sum(1))

    def over_all(logp, ref_logp, mask, group):
        return batch_mean(logp, ref_logp, mask) + 0 * group.sum()

    assert keeps_groups_apart(bind(within_groups, Call("loss", None, None, {})))
    assert not keeps_groups_apart(bind(over_all, Call("loss", None, None, {})))
