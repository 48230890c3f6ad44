"""Losses that couple the rollouts of a group: graded exactly over all groups, and what checks say of them and of β."""

import math

import numpy as np
import pytest
import torch
from cases.parts import k1, k2, score
from moments_plain import every_multiset, moments_by_hand
from weekly import first, spread

from kltest.environments import Instance, bandit
from kltest.errors import UsageError
from kltest.estimators import find, registry
from kltest.grading.grader import grade
from kltest.identify.instances import ENVIRONMENTS, MOST_GROUPS, _layered, instances
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.moments import exact_batches
from kltest.moments.batches import groups_of
from kltest.truth import gradient

# Sums of a few hundred float64 terms of size one, by two routes.
EXACT = 1e-11
# Losses of the zoo take standard deviations of one number, of which torch remarks that there is none.
pytestmark = pytest.mark.filterwarnings("ignore:std.*degrees of freedom")


group_mean, leave_one_out, group_std, tied_groups_masked = (
    find(name).function for name in ("group-mean", "leave-one-out", "group-std", "tied-groups-masked")
)


def kl_part(beta):
    """What β adds to group-std, over β."""

    def loss(logp, ref_logp, mask, reward, group):
        whole, without = (group_std(logp, ref_logp, mask, reward, group, b) for b in (beta, 0.0))
        return (whole - without) / beta

    return loss


def whole_batch_leave_one_out(logp, ref_logp, mask, reward):
    """Reads no group: one call for every group."""
    value = reward - k1(logp, ref_logp, mask)
    return -((value - (value.sum() - value) / (len(value) - 1)) * score(logp, mask)).mean()


def first_is_the_baseline(logp, ref_logp, mask):
    """Cares for the order of rollouts."""
    cost = k1(logp, ref_logp, mask)
    return ((cost - cost[0]) * score(logp, mask)).mean()


BY_HAND = [
    (group_mean, group_mean, {}),
    (tied_groups_masked, tied_groups_masked, {}),
    (group_std, kl_part(0.3), {"beta": 0.3}),
    (whole_batch_leave_one_out, whole_batch_leave_one_out, {}),
    (first_is_the_baseline, first_is_the_baseline, {}),
]


@pytest.mark.parametrize(("loss", "plain", "call"), spread(2, BY_HAND), ids=lambda item: getattr(item, "__name__", ""))
@pytest.mark.parametrize(
    ("kind", "size", "sampler"), first(1, [("ragged", 3, "stale"), ("bandit", 4, "current"), ("mdp", 2, "stale")])
)
def test_moments_over_groups_are_those_of_every_ordered_tuple(kind, size, sampler, loss, plain, call):
    # Of the process with pairs only the smaller one: 4096 tuples would take a second.
    instance = instances(kind, 3, 4 if kind == "mdp" else size)[0]
    expected, second = moments_by_hand(plain, instance, size, sampler)
    moments = exact_batches(bind(loss, Call(**call)), instance, sampler, size, grouped=True)
    assert np.abs(moments.gradient - expected).max() < EXACT
    assert moments.second_moment == pytest.approx(second, rel=1e-10)


@pytest.mark.parametrize("size", first(1, [2, 5]))
@pytest.mark.parametrize(
    ("loss", "factor"), [(group_mean, lambda n: 1 - 1 / n), (leave_one_out, lambda n: 1.0)], ids=["mean", "others"]
)
def test_the_factor_of_a_baseline(loss, factor, size):
    """(1 − 1/n) with the rollout itself in the mean, 1 without."""
    for kind in ENVIRONMENTS:
        instance = instances(kind, 1, size)[0]
        truth = gradient("reverse_kl", instance)
        found = exact_batches(bind(loss), instance, size=size, grouped=True).gradient
        assert np.abs(found - factor(size) * truth).max() < EXACT


OF_GROUPS = ("leave-one-out", "group-mean", "group-std", "tied-groups-masked")


@pytest.mark.scheduled
@pytest.mark.parametrize("name", OF_GROUPS)
def test_an_estimator_of_groups_has_the_gradient_that_its_spec_says(name):
    """As a note; where a SPEC names none, nothing is to be identified."""
    report = grade(name, environment="bandit,ragged", sampler="both", select="KL101")
    assert "It does not follow" not in " ".join(report.notes)
    spec = find(name).spec
    for row in report.gradients:
        if row.batch > 1 and spec.expectation(row.environment, row.sampler) is None:
            assert row.identified is None


def test_the_estimators_that_read_groups_are_all_here():
    reading = {n for n, e in registry().items() if "group" in bind(e.function, spec=e.spec).takes and e.spec.couples}
    assert {name for name in reading if registry()[name].function.__module__.startswith("kltest.")} == set(OF_GROUPS)


@pytest.mark.parametrize("size", first(1, [4, 2, 5, 16]))
@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_environments_of_groups_are_small_tie_and_tell_rows_from_tokens(kind, size):
    for instance in instances(kind, 5, size):
        paths, environment = instance.paths, instance.environment
        assert paths.shape[1] != size
        assert environment.name == kind
        reward = environment.returns(paths)
        assert set(reward) == {0.0, 1.0}
        prompts = [np.flatnonzero(paths.prompt == prompt) for prompt in range(len(environment.prompts))]
        if kind != "mdp":
            assert sum(math.comb(len(rows) + size - 1, size) for rows in prompts) <= MOST_GROUPS
        for sampler in ("current", "stale"):
            weights = instance.rollout_weights(sampler)
            for rows in prompts:
                assert 0.02 < weights[rows] @ reward[rows] / weights[rows].sum() < 0.98
        log_ratio = paths.along(instance.policy - instance.reference)
        assert np.abs(log_ratio).max() < 2


def test_two_turns_have_two_tokens_each_and_two_columns_of_tool_output_between_them():
    for instance in instances("turns", 0):
        assert (instance.paths.mask == [True, True, False, False, True, True]).all()


def test_a_layered_process_has_two_states_a_step():
    for horizon in (2, 3):
        assert _layered(horizon, 0).n_contexts == 2 * horizon


def test_a_loss_that_reads_rewards_and_treats_rows_apart_stays_in_the_ordinary_environments():
    def paid(logp, ref_logp, mask, reward, beta):
        return beta * k2(logp, ref_logp, mask) - reward * score(logp, mask)

    report = grade(paid, select="KL101")
    assert report.verdict == "confirmed"
    assert {(row.batch, row.rollouts) for row in report.gradients} == {(1, 4), (1, 27), (1, 15)}


@pytest.mark.parametrize("size", first(1, [3, 8]))
def test_the_size_of_a_group_is_what_was_asked_for(size):
    rows = [row for row in grade("group-mean", group_size=size, select="KL101").gradients if row.batch > 1]
    assert [row.batch for row in rows] == [size] * 3
    for row in rows:
        assert row.identified == pytest.approx({"reverse_kl": 1 - 1 / size})


@pytest.mark.scheduled
def test_a_loss_of_pairs_is_graded_in_pairs():
    """Losses of preference pairs take two completions of a prompt and no other number."""

    def of_pairs(logp, ref_logp, mask, reward):
        one, other = k1(logp, ref_logp, mask)
        apart = (one - other).detach() + 0.0 * reward[0]
        return apart * (score(logp, mask)[0] - score(logp, mask)[1]) / 2

    report = grade(of_pairs, environment="bandit", sampler="current")
    assert report.verdict == "confirmed", report.error
    assert [row.batch for row in report.gradients] == [2]


@pytest.mark.scheduled
def test_a_sum_over_the_rows_of_a_group_is_divided_by_them_and_said_to_be():
    def added(logp, ref_logp, mask, group):
        return leave_one_out(logp, ref_logp, mask, group).sum()

    for options in ({"environment": "bandit"}, {"environment": "sequence", "group_size": 2}):
        report = grade(added, select="KL101", **options)
        assert report.verdict == "confirmed"
        assert any("added up" in note for note in report.notes)
    assert not any("added up" in note for note in grade("leave-one-out", select="KL101").notes)


def refuting(report):
    """The codes that failed, warnings aside."""
    return {check.code for check in report.failed if check.code < "KL8"}


def failed(report, code):
    return next((check.message for check in report.failed if check.code == code), "")


def test_the_message_of_masking_has_the_probability_of_a_tie():
    message = failed(grade("tied-groups-masked", environment="bandit", select="KL401"), "KL401")
    instance = instances("bandit", 0, 4)[0]
    chances = np.exp(instance.policy[0])
    reward = instance.environment.returns(instance.paths)
    paid = float(chances @ reward)
    assert f"{paid**4 + (1 - paid) ** 4:.3g}" in message


def test_a_metric_that_reads_zero_in_evaluation_is_found_by_itself():
    def loss(logp, ref_logp, mask, rewards, group):
        kl = torch.where(mask.bool(), logp - ref_logp, 0.0).sum(-1)
        spread = torch.stack([(rewards[group == g] - rewards[group == g].mean()).abs().max() for g in group])
        return k2(logp, ref_logp, mask).mean(), {"kl": (kl * (spread > 0)).mean().detach()}

    report = grade(loss, select="KL4")
    assert "logged KL is zero" in failed(report, "KL404")
    assert not failed(report, "KL401")


@pytest.mark.parametrize(
    ("scale", "wrong", "beta"),
    first(
        2,
        [
            (lambda b: b * b, True, 10.0),
            (lambda b: min(b, 0.03), True, 0.04),
            (lambda b: 0.3, True, 1.0),
            (lambda b: b, False, 0.04),
            (lambda b: b, False, 10.0),
        ],
    ),
)
def test_a_coefficient_is_followed_at_any_value(scale, wrong, beta):
    def loss(logp, ref_logp, mask, kl_coef):
        return scale(kl_coef) * k2(logp, ref_logp, mask)

    report = grade(loss, beta=beta, environment="bandit")
    message = failed(report, "KL510")
    assert bool(message) == wrong
    assert refuting(report) == ({"KL510"} if wrong else set())


def test_without_a_coefficient_there_is_nothing_to_ignore():
    status = {check.code: check for check in grade("k2-loss-sequence", select="KL403,KL510").checks}
    for code in ("KL403", "KL510"):
        assert status[code].status == "skip"
        assert "no coefficient" in status[code].message


def test_the_change_by_a_split_is_that_of_the_parts():
    """Token-means of parts, averaged, beside that of the whole: done again with nothing but tensors."""

    def token_mean(logp, mask):
        return torch.where(mask.bool(), logp, 0.0).sum() / mask.sum()

    report = grade(token_mean, environment="bandit", select="KL206")
    lengths = np.array([1, 1, 2, 1, 2, 2, 1, 2])
    weights = 1 / lengths.sum()
    message = failed(report, "KL206")
    live = np.arange(2) < lengths[:, None]
    cuts = {"4 + 4": [np.arange(4), np.arange(4, 8)], "2 + 2 + 2 + 2": np.arange(8).reshape(4, 2)}
    cuts["4 + 4 "] = [np.arange(0, 8, 2), np.arange(1, 8, 2)]
    moved = {}
    for name, cut in cuts.items():
        accumulated = np.zeros(live.shape)
        for part in cut:
            accumulated[part] = live[part] / lengths[part].sum() * len(part) / len(lengths)
        moved[name] = np.linalg.norm(accumulated - live * weights) / np.linalg.norm(live * weights)
    worst = max(moved, key=moved.get)
    assert f"cut into {worst.strip()}" in message
    assert f"{moved[worst]:.3g} of their size" in message


def test_a_loss_for_one_group_a_call_cannot_be_cut():
    def centred(logp, ref_logp, mask, reward):
        shaped = k1(logp, ref_logp, mask) - reward
        return ((shaped - shaped.mean()) * score(logp, mask)).mean()

    (found,) = grade(centred, expect="reverse_kl-expected_reward", environment="bandit", select="KL206").checks
    assert found.status == "skip"
    assert "one group" in found.message


def test_too_many_groups_are_refused_with_their_number():
    with pytest.raises(UsageError, match="35 groups of 4 rollouts and at most 1"):
        exact_batches(bind(whole_batch_leave_one_out), instances("bandit", 0, 4)[0], size=4, grouped=True, most=1)


def test_groups_are_enumerated_once_their_order_aside():
    instance = instances("ragged", 0, 3)[0]
    found = list(groups_of(instance, "current", 3))
    assert len(found) == len(list(every_multiset(instance, 3)))
    assert math.fsum(chance for _, chance in found) == pytest.approx(1, rel=1e-12)
    assert len({tuple(rows) for rows, _ in found}) == len(found)


def test_a_loss_for_batches_of_one_size_is_not_said_to_be_a_sum():
    """Whether it adds up is seen by doubling a batch, which it does not take."""

    def of_three(logp, ref_logp):
        if len(logp) != 3:
            raise ValueError("three rows, please")
        cost = (logp - ref_logp).sum(-1)
        return ((cost - cost.mean()) ** 2 / 2).mean()

    moments = exact_batches(bind(of_three), Instance.draw(bandit(3), 0), size=3)
    assert not moments.added_up
    assert exact_batches(bind(lambda logp, ref_logp: 3 * of_three(logp, ref_logp)), Instance.draw(bandit(3), 0), size=3)


@pytest.mark.scheduled
def test_blocks_of_rows_are_groups_though_no_reward_is_read():
    def block(size):
        def loss(logp, ref_logp, mask, num_generations=size):
            logp, ref_logp = (part.where(mask != 0, 0.0).sum(-1) for part in (logp, ref_logp))
            costs = (logp - ref_logp).detach().view(-1, num_generations)
            others = (costs.sum(1, keepdim=True) - costs) / (num_generations - 1)
            return ((costs - others).flatten() * logp).mean()

        return loss

    for size in (4, 8):
        report = grade(block(size), environment="bandit", select="KL1,KL4")
        assert (report.verdict, report.error) == ("confirmed", "")
