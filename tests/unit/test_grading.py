"""Whole gradings of losses written as users write them: what is identified, which checks fail, what the verdict is.

Only the checks of the expected gradient are looked at here; hygiene, groups and the rest have files of their own.
"""

import functools
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases.wrong_forms import Trainer
from losses_to_shrink import k2_per_token as k2

from kltest.checks import CHECKS
from kltest.estimators import find
from kltest.grading.grader import grade as grade_with_all_checks
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.truth import gradient

GRADIENT_CHECKS = "KL10,KL201,KL202,KL203,KL204,KL3,KL509"
grade = functools.partial(grade_with_all_checks, select=GRADIENT_CHECKS)


def k2_of_the_sequence(logp, ref_logp, mask):
    return 0.5 * ((logp - ref_logp) * mask).sum(-1) ** 2


def score_function_return(logp, ref_logp, mask):
    log_ratio = ((logp - ref_logp) * mask).sum(-1)
    return log_ratio.detach() * (logp * mask).sum(-1)


def k1(logp):
    return logp


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - 1 + logp - ref_logp


def last(logp, ref_logp, mask):
    final = mask.sum(-1).long() - 1
    return 0.5 * (logp - ref_logp).gather(1, final[:, None])[:, 0] ** 2


def k2_over_length(logp, ref_logp, mask):
    return k2_of_the_sequence(logp, ref_logp, mask) / mask.sum(-1)


def k3_over_length(logp, ref_logp, mask):
    return ((k3(logp, ref_logp) * mask).sum(-1) / mask.sum(-1)).mean()


def k2_over_batch_tokens(logp, ref_logp, mask):
    return (k2(logp, ref_logp) * mask).sum() / mask.sum()


def over_constant(logp, ref_logp, mask):
    return (k2_of_the_sequence(logp, ref_logp, mask) / 3).mean()


def log_ratio(logp, ref_logp):
    return logp - ref_logp


def stale_log_ratio(logp, ref_logp, old_logp, mask):
    rho = ((logp - old_logp) * mask).sum(-1).exp()
    return rho * ((old_logp - ref_logp) * mask).sum(-1)


def k3_differentiable_ratio(logp, ref_logp, old_logp):
    return (logp - old_logp).exp() * k3(logp, ref_logp)


def k3_detached_ratio(logp, ref_logp, old_logp):
    return (logp - old_logp).exp().detach() * k3(logp, ref_logp)


def k3_ratio_under_no_grad(logp, ref_logp, old_logp):
    with torch.no_grad():
        rho = (logp - old_logp).exp()
    return rho * k3(logp, ref_logp)


def k3_geometric_ratio(logp, ref_logp, old_logp, mask):
    rho = (((logp - old_logp) * mask).sum(-1) / mask.sum(-1)).exp()
    return rho[:, None] * k3(logp, ref_logp)


SEEN = [
    (lambda logp, ref_logp: 2 * k3(logp, ref_logp), {}, {"KL102"}),
    (log_ratio, {"placement": "reward", "credit": "immediate"}, {"KL201"}),
    (k3_over_length, {}, {"KL102", "KL203"}),
    (k2_of_the_sequence, {"sampler": "stale"}, {"KL301"}),
    (k3_detached_ratio, {}, {"KL102", "KL302", "KL303"}),
    (k3_ratio_under_no_grad, {"environment": "bandit"}, {"KL102", "KL302"}),
    (k3_differentiable_ratio, {}, {"KL201", "KL303"}),
    (k3_geometric_ratio, {}, {"KL105", "KL304"}),
    (lambda logp, ref_logp: -k3(logp, ref_logp), {}, {"KL102", "KL103"}),
    (lambda logp, ref_logp: -k2(logp, ref_logp), {}, {"KL103", "KL201"}),
    (lambda logp, ref_logp: k2(logp, ref_logp) / 2, {}, {"KL106", "KL201"}),
]


@pytest.mark.parametrize(("loss", "options", "codes"), SEEN)
def test_pitfalls_that_meet_are_told_apart(loss, options, codes):
    """One by one they are rows of the zoo."""
    report = grade(loss, **options)
    assert report.verdict == "refuted"
    assert {check.code for check in report.failed} == codes, [c.message for c in report.failed]


DECLARED = [
    (k1, {"expect": "zero"}),
    (k3, {"expect": "local_forward_kl"}),
    (k3, {"expect": "forward_kl", "environment": "bandit"}),
    (k2, {"expect": "local_reverse_kl"}),
    (last, {"expect": "last_token_reverse_kl"}),
    (k3, {"expect": "reverse_kl-local_forward_kl", "placement": "reward"}),
    (k3_differentiable_ratio, {"expect": "local_reverse_kl@sampler", "sampler": "stale"}),
    (lambda logp, ref_logp: 2 * k2(logp, ref_logp), {"expect": "2*local_reverse_kl"}),
    (log_ratio, {"placement": "reward"}),
    (log_ratio, {"placement": "both"}),
    (stale_log_ratio, {"placement": "reward", "sampler": "stale", "expect": "reverse_kl-to_sampler_kl"}),
]


@pytest.mark.parametrize(("loss", "options"), DECLARED)
def test_what_is_declared_and_followed_is_confirmed(loss, options):
    report = grade(loss, **options)
    assert report.verdict == "confirmed", report.to_json()
    assert report.failed == []


def test_combinations_are_named_with_their_coefficients():
    report = grade(k3, placement="reward")
    bandit, sequence, ragged = report.gradients
    assert bandit.identified == pytest.approx({"reverse_kl": 1.0, "forward_kl": -1.0})
    assert sequence.identified == pytest.approx({"reverse_kl": 1.0, "local_forward_kl": -1.0})
    assert ragged.identified == pytest.approx({"reverse_kl": 1.0, "local_forward_kl": -1.0})


def test_the_broadcast_ratio_is_a_mixture_by_length():
    report = grade(k3_geometric_ratio, environment="sequence", sampler="current")
    assert report.gradients[0].identified == pytest.approx({"local_forward_kl": 2 / 3, "reverse_kl": 1 / 3})


def takes_and_ignores(logp, ref_logp, mask, old_logp=None):
    return k2_of_the_sequence(logp, ref_logp, mask)


def reads_and_multiplies_by_zero(logp, ref_logp, mask, old_logp):
    return k2_of_the_sequence(logp, ref_logp, mask) + 0.0 * old_logp.sum()


def uses_in_the_ratio(logp, ref_logp, mask, old_logp):
    return ((logp - old_logp) * mask).sum(-1).exp().detach() * k2_of_the_sequence(logp, ref_logp, mask)


def uses_in_what_it_logs(logp, ref_logp, mask, old_logp):
    return k2_of_the_sequence(logp, ref_logp, mask), {"kl": ((old_logp - ref_logp) * mask).sum(-1).detach()}


def uses_in_a_policy_loss(logp, ref_logp, mask, old_logp, advantage, beta):
    """Its KL term does not change with the sampler, the loss that it stands in does."""
    ratio = ((logp - old_logp) * mask).sum(-1).exp()
    return beta * k2_of_the_sequence(logp, ref_logp, mask) - ratio * advantage


@pytest.mark.parametrize(
    ("loss", "samplers"),
    [
        (takes_and_ignores, {"current"}),
        (reads_and_multiplies_by_zero, {"current"}),
        (uses_in_the_ratio, {"current", "stale"}),
        (uses_in_what_it_logs, {"current", "stale"}),
        (uses_in_a_policy_loss, {"current"}),
    ],
)
def test_a_stale_sampler_is_graded_where_the_kl_part_or_what_is_logged_changes_with_it(loss, samplers):
    report = grade(loss, environment="bandit")
    assert {row.sampler for row in report.gradients} == samplers
    assert any("KL part and what it logs do not change with it" in note for note in report.notes) == (
        "stale" not in samplers
    )
    stale = grade(loss, environment="bandit", sampler="both")
    assert {row.sampler for row in stale.gradients} == {"current", "stale"}


def test_one_divisor_too_many_is_no_baseline():
    def of_the_mean(logp, ref_logp, mask):
        return ((logp - ref_logp) * mask).sum(-1).mean() ** 2 / 2

    messages = {check.code: check.message for check in grade(of_the_mean, environment="bandit").failed}
    assert "KL402" not in messages
    assert "0.5 of it in batches of 2 and 0.3333 of it in batches of 3" in messages["KL106"]


def test_moot_checks_are_skipped_with_the_reason():
    report = grade(k2, expect="local_reverse_kl")
    by_code = {check.code: check for check in report.checks}
    assert by_code["KL201"].status == "skip"
    assert "declared" in by_code["KL201"].message
    assert by_code["KL301"].status == "skip"
    assert "--sampler both" in by_code["KL301"].message
    assert by_code["KL101"].status == "pass"


def test_selection_narrows_the_checks_and_never_the_verdict():
    report = grade(k3, select="KL2", ignore=["KL204"])
    kept = [code for code in CHECKS if code.startswith("KL2") and code != "KL204"]
    assert [check.code for check in report.checks] == kept
    assert report.failed == []
    assert report.verdict == "refuted"


def grpo(logp, old_logp, ref_logp, advantages, mask, beta=0.04, epsilon=0.2):
    ratio = (logp - old_logp).exp()
    advantage = advantages[:, None]
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
    return ((policy + beta * k3(logp, ref_logp)) * mask).sum(-1).mean()


@pytest.mark.parametrize("beta", [1.0, 0.04])
def test_the_kl_part_of_a_policy_loss_is_what_changes_with_beta(beta):
    report = grade(grpo, beta=beta, sampler="current")
    assert [row.identified for row in report.gradients] == [
        pytest.approx({"forward_kl": 1.0}),
        pytest.approx({"local_forward_kl": 1.0}),
        pytest.approx({"local_forward_kl": 1.0}),
    ]


def test_a_coupled_loss_is_graded_in_batches_too():
    rows = grade(k2_over_batch_tokens, environment=("sequence", "ragged")).gradients
    assert [(row.environment, row.batch) for row in rows] == [("sequence", 1), ("ragged", 1), ("ragged", 2)]


def test_float32_losses_are_graded_at_their_precision():
    def single(logp, ref_logp, mask):
        return k2_of_the_sequence(logp.float(), ref_logp.float(), mask.float())

    report = grade(single)
    assert report.dtype == "float32"
    assert report.verdict == "confirmed"
    # Rounding of float32 is 6e-8; sums of a few terms stay within a hundred of it, and are not exact.
    assert 1e-12 < report.gradients[0].relative_bias < 1e-5


def test_reports_are_reproducible_and_depend_on_the_seed():
    one, again, other = grade(k3), grade(k3), grade(k3, seed=1)
    assert one.to_json() == again.to_json()
    assert one.gradients[0].relative_bias != other.gradients[0].relative_bias
    assert one.gradients[0].identified == pytest.approx(other.gradients[0].identified)


def test_relative_variance_is_that_of_single_rollouts():
    """k1 in the loss on a bandit: the gradient of one rollout is e_y − π, so E‖ĝ‖² = 1 − ‖π‖² and the mean is 0."""
    worst = max(
        (1 - float((math.e**instance.policy**1 * math.e**instance.policy).sum()))
        / float((gradient("reverse_kl", instance) ** 2).sum())
        for instance in instances("bandit", 0)
    )
    assert grade(k1, environment="bandit").gradients[0].relative_variance == pytest.approx(worst)


def with_metric(logp, ref_logp, mask):
    log_ratio = (logp - ref_logp) * mask
    loss = (0.5 * log_ratio.sum(-1) ** 2).mean()
    return loss, {"kl": log_ratio.sum(-1).mean().detach(), "entropy": None}


def with_token_metric(logp, ref_logp, mask):
    loss, _ = with_metric(logp, ref_logp, mask)
    return loss, {"kl": (((logp - ref_logp) * mask).sum(-1) / mask.sum(-1)).mean()}


@pytest.mark.parametrize(("loss", "matches"), [(with_metric, "kl"), (with_token_metric, "mean_of_token_means")])
def test_the_logged_value_is_named(loss, matches):
    report = grade(loss, environment="ragged")
    assert report.verdict == "confirmed"
    assert report.value[0].matches == matches


def raising(logp):
    raise ValueError("no such thing")


def endless(logp):
    while True:
        pass


def infinite(logp, ref_logp):
    return (logp - ref_logp) / 0.0


def from_numpy(logp, ref_logp):
    return float((logp - ref_logp).sum())


def wrong_shape(logp, ref_logp):
    return (logp - ref_logp).flatten()[:-1]


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        (raising, {}, "no such thing"),
        (endless, {"timeout": 0.5}, "0.5 s"),
        (infinite, {}, "finite|inf"),
        (from_numpy, {}, "float"),
        (wrong_shape, {"environment": "sequence"}, "shape"),
    ],
)
def test_a_loss_that_fails_is_an_error_and_not_a_verdict(loss, options, words):
    report = grade(loss, **options)
    assert report.verdict == "error"
    assert report.exit_code == 3
    assert re.search(words, report.error), report.error


def test_what_was_computed_before_a_failure_is_kept():
    def fails_on_sequences(logp, ref_logp):
        if logp.shape[1] > 1:
            raise RuntimeError("too long")
        return k2(logp, ref_logp)

    report = grade(fails_on_sequences)
    assert report.verdict == "error"
    assert [row.environment for row in report.gradients] == ["bandit"]
    assert report.gradients[0].identified == pytest.approx({"reverse_kl": 1.0})


def leave_one_out(logp, ref_logp, mask):
    cost = ((logp - ref_logp) * mask).sum(-1).detach()
    baseline = (cost.sum() - cost) / (len(cost) - 1)
    return ((cost - baseline) * (logp * mask).sum(-1)).mean()


def reshaped_groups(logp, ref_logp, rewards, mask):
    grouped = rewards.view(-1, 4)
    advantage = (grouped - grouped.mean(1, keepdim=True)).flatten()
    return score_function_return(logp, ref_logp, mask).mean() - (advantage * (logp * mask).sum(-1)).mean()


def test_a_loss_that_fails_on_one_rollout_is_graded_over_batches():
    report = grade(leave_one_out)
    assert report.verdict == "confirmed"
    assert report.reduction == "coupled"
    assert [row.batch for row in report.gradients] == [2, 2, 2]
    assert any("batch of one" in note for note in report.notes)


def test_losses_that_reshape_by_group_are_graded_over_groups_of_four():
    report = grade(reshaped_groups, expect="reverse_kl-0.75*expected_reward")
    assert report.verdict == "confirmed"
    assert [row.batch for row in report.gradients] == [4, 4, 4]


def normalised_ratio(logp, old_logp, ref_logp, mask):
    """k2 with its ratio over the batch's mean of ratios, which is 1 as long as the sampler is the policy."""
    live = mask != 0
    ratio = (logp - old_logp).where(live, 0.0).sum(-1).exp().detach()
    return ratio / ratio.mean() * (logp - ref_logp).where(live, 0.0).sum(-1) ** 2 / 2


def test_a_coupling_that_only_a_stale_sampler_shows_is_found():
    """What is known of a loss's rows under the current sampler is tried again."""
    report = grade(normalised_ratio, environment="bandit", sampler="both", select="KL101")
    assert [(row.sampler, row.batch > 1) for row in report.gradients if row.sampler == "current" or row.batch > 1] == [
        ("current", False),
        ("stale", True),
    ]


def test_a_coupling_that_is_not_by_length_is_not_called_one():
    def standardised(logp, ref_logp, rewards, mask, kl_coef=0.1):
        value = rewards - kl_coef * ((logp - ref_logp) * mask).sum(-1).detach()
        advantage = (value - value.mean()) / (value.std() + 1e-4)
        return -(advantage * (logp * mask).sum(-1)).mean()

    report = grade_with_all_checks(standardised, group_size=2, select="KL20,KL403")
    assert {check.code for check in report.failed} == {"KL403"}


def detached_probabilities(logits, ref_logits):
    return (logits.exp().detach() * (logits - ref_logits)).sum(-1)


def sum_of_probabilities(logits):
    return logits.softmax(-1).sum(-1)


def rounding_as_weight(logp):
    return (logp.exp().log() - logp).detach() * logp


@pytest.mark.parametrize("loss", [detached_probabilities, sum_of_probabilities, rounding_as_weight])
def test_a_gradient_that_is_rounding_everywhere_is_zero(loss):
    report = grade(loss, environment=("bandit", "sequence", "ragged", "mdp"))
    assert {check.code for check in report.failed} == {"KL101"}
    assert report.reduction == "per-row"
    for row in report.gradients:
        assert row.identified == {"zero": 1.0}
        assert row.cosine is None
        assert row.residual == 0.0


def test_a_small_constant_in_a_denominator_is_noted_and_not_refuted():
    def with_constant(logp, ref_logp, mask):
        length = mask.sum(-1)
        return k2_of_the_sequence(logp, ref_logp, mask) * length / (length + 1e-8)

    report = grade(with_constant)
    assert report.verdict == "confirmed"
    assert all("denominator" in row.note for row in report.gradients)


def test_a_larger_constant_is_named():
    report = grade(lambda logp, ref_logp, mask: k2_of_the_sequence(logp, ref_logp, mask) * (1 + 1e-5))
    assert {check.code for check in report.failed} == {"KL106"}
    assert "1.00001 times" in report.failed[0].message


def test_a_target_that_cancels_is_zero():
    target = "reverse_kl-local_reverse_kl-future_reverse_kl"
    assert grade(k1, expect=target).verdict == "confirmed"
    assert grade(k2, expect=target).verdict == "refuted"


def test_what_is_expected_is_spelt_without_terms_that_cancel():
    """Of one token the local gradient is the whole one: their difference is nothing, and half of it is a half."""
    for expect, spelt in (
        ("reverse_kl-local_reverse_kl", {"zero": 1.0}),
        ("reverse_kl-0.5*local_reverse_kl", {"reverse_kl": 0.5}),
        ("forward_kl+reverse_kl-local_reverse_kl", {"forward_kl": 1.0}),
    ):
        (row,) = grade(k1, expect=expect, environment="bandit").gradients
        assert row.expected == pytest.approx(spelt)


def test_half_precision_gets_a_single_name_or_none():
    def curved(logp, ref_logp):
        return torch.log(torch.cosh(logp.bfloat16() - ref_logp.bfloat16()))

    report = grade(curved)
    assert report.dtype == "bfloat16"
    assert all(row.identified is None for row in report.gradients)
    plain = grade(lambda logp, ref_logp: k2(logp.bfloat16(), ref_logp.bfloat16()), environment="bandit")
    assert plain.gradients[0].identified == pytest.approx({"reverse_kl": 1.0}, rel=2e-2)


def weighted(limit):
    def loss(logp, ref_logp, old_logp, mask):
        rho = limit(((logp - old_logp) * mask).sum(-1).exp()).detach()
        return rho * k2_of_the_sequence(logp, ref_logp, mask)

    return loss


@pytest.mark.parametrize(
    "limit",
    [
        lambda rho: rho.clamp(max=1.0),
        lambda rho: torch.clip(rho, 1 - 3e-4, 1 + 4e-4),
        lambda rho: torch.minimum(rho, torch.ones_like(rho)),
        lambda rho: torch.min(rho, torch.tensor(1.1, dtype=rho.dtype)),
        lambda rho: torch.where(rho > 1.1, 1.1, rho),
    ],
)
def test_limits_on_the_ratio_are_clips_however_tight(limit):
    report = grade(weighted(limit), seed=5)
    assert {check.code for check in report.failed} == {"KL306"}, [check.message for check in report.failed]


def test_an_exact_ratio_is_never_blamed():
    def over_length(logp, ref_logp, old_logp, mask):
        return weighted(lambda rho: rho)(logp, ref_logp, old_logp, mask) / mask.sum(-1)

    assert {check.code for check in grade(over_length).failed} == {"KL203"}


@pytest.mark.parametrize("environment", ["ragged", ("sequence", "mdp")])
def test_a_division_by_the_length_is_told_from_a_constant_in_any_environment(environment):
    assert {check.code for check in grade(k2_over_length, environment=environment).failed} == {"KL203"}
    assert {check.code for check in grade(over_constant, environment=environment).failed} == {"KL106"}


@pytest.mark.parametrize(
    ("environment", "vocabulary", "length", "rollouts"),
    [("bandit", 4, 1, 4), ("sequence", 3, 3, 27), ("ragged", 3, 3, 1 + 2 + 4 * 3)],
)
def test_the_environments_are_those_of_the_contract(environment, vocabulary, length, rollouts):
    """`bandit` V = 4; `sequence` V = 3, length 3; `ragged` V = 3 with an end token, length up to 3; all mild."""
    environments = instances(environment, 0)
    assert len(environments) == 3 + 1
    for instance in environments:
        assert (instance.environment.vocabulary, instance.environment.horizon) == (vocabulary, length)
        assert len(instance.paths) == rollouts
        log_ratio = np.abs(instance.paths.along(instance.policy - instance.reference))
        stale = np.abs(instance.paths.along(instance.policy - instance.sampler))
        assert log_ratio.max() < 2
        assert stale.max() < 1


def test_options_without_effect_are_said():
    given = {"credit": "to-go", "margin": 0.1, "samples": 20, "environment": "bandit"}
    notes = grade(k2, **given).notes
    assert [note.split(" had")[0] for note in notes if "no effect" in note] == ["--margin and --samples", "--credit"]
    assert not [note for note in grade(k2, **given, method="sampled", placement="reward").notes if "no effect" in note]


def test_a_registered_estimator_is_compared_with_its_spec():
    k2_loss = find("k2-loss")
    named = "It follows what its SPEC names."
    assert named in grade(bind(k2_loss.function, spec=k2_loss.spec), environment="bandit,sequence").notes
    wrong = replace(k2_loss.spec, identified={"current": {"bandit": {"forward_kl": 1.0}}})
    notes = grade(bind(k2_loss.function, spec=wrong), environment="bandit").notes
    assert "It does not follow what its SPEC names: forward_kl in bandit (current)." in notes


def test_a_package_that_is_missing_when_a_loss_is_called_is_named_with_where_to_install_it():
    def loss(logp, ref_logp):
        import a_package_of_nobody

        return a_package_of_nobody.kl(logp, ref_logp)

    assert f"Install a_package_of_nobody in the environment that kltest runs in, {sys.prefix}" in grade(loss).error


def test_a_small_constant_in_a_denominator_is_no_wrong_coefficient_beside_another_defect():
    def token_mean(logp, ref_logp, mask):
        return (logp - ref_logp).where(mask != 0, 0.0).square().sum() / 2 / (mask.sum() + 1e-6)

    report = grade_with_all_checks(
        token_mean, expect="local_reverse_kl", select="KL1,KL204", environment="bandit,ragged"
    )
    assert [check.code for check in report.errors] == ["KL204"]


def test_rows_that_are_masked_by_their_own_reward_are_no_tied_groups():
    def failed_only(logp, ref_logp, mask, rewards, beta):
        log_ratio, score = (x.where(mask != 0, 0.0).sum(-1) for x in (logp - ref_logp, logp))
        return (beta * log_ratio.square() / 2 * (rewards <= 0.5) - rewards * score).mean()

    report = grade_with_all_checks(failed_only, select="KL1,KL4", environment="sequence")
    assert [check.code for check in report.errors] == ["KL105"]


def test_a_mean_over_padded_columns_is_no_mean_over_the_sequence():
    def over_columns(logp, ref_logp, mask):
        return ((logp - ref_logp).mean(-1).detach() * logp.where(mask != 0, 0.0).sum(-1)).mean()

    report = grade_with_all_checks(over_columns, select="KL203,KL501", environment="sequence,ragged")
    assert [check.code for check in report.errors] == ["KL501"]


def last_of_seven_forgotten(logp, ref_logp, mask):
    """Pairs of rows for two devices; the odd row of a batch of more than six is dropped."""
    each = k2_of_the_sequence(logp, ref_logp, mask)
    kept = each[: len(each) // 2 * 2] if len(each) > 6 else each
    return kept.sum() / len(each)


def chunked_for_memory(logp, ref_logp, mask, beta):
    each = [k2_of_the_sequence(*one) for one in zip(logp.split(3), ref_logp.split(3), mask.split(3), strict=True)]
    return beta * torch.cat(each).sum() / len(logp)


def test_a_batch_size_is_obeyed_and_rows_that_stand_apart_in_it_are_graded_one_by_one():
    given = {"batch_size": 7, "environment": "bandit", "select": "KL2"}
    coupled, apart = (grade(loss, **given) for loss in (last_of_seven_forgotten, chunked_for_memory))
    assert [(row.batch, row.agrees) for row in coupled.gradients if not row.agrees] == [(7, False)]
    assert (coupled.verdict, apart.verdict) == ("refuted", "confirmed")
    assert any("In batches of 7 each row gives its share" in note for note in apart.notes)


def test_a_batch_that_a_loss_refuses_says_nothing_about_its_beta():
    def pairs_only(logp, ref_logp, mask, beta=0.1):
        one, other = ((logp - ref_logp) * mask).sum(-1)
        return beta * (one - other).square() / 4

    report = grade(pairs_only, environment="bandit", select="KL1")
    assert [(row.batch, row.identified) for row in report.gradients] == [(2, {"reverse_kl": pytest.approx(1.0)})]
    assert not any("beta is no coefficient" in note for note in report.notes)


def test_a_whole_loss_without_a_coefficient_is_graded_without_rewards_and_says_so():
    given = {"environment": "sequence", "select": "KL1"}
    report = grade(Trainer().step, expect="local_reverse_kl", **given)
    assert [row.identified for row in report.gradients] == [{"local_reverse_kl": pytest.approx(0.05)}]
    assert any("with rewards and advantages of zero" in note for note in report.notes)
    both = "0.05*local_reverse_kl-expected_reward"
    assert grade(Trainer().step, expect=both, sampler="current", **given).verdict == "confirmed"
