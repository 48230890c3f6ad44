"""Whole gradings of losses written as users write them: what is identified, which checks fail, what the verdict is.

Only the checks of the expected gradient are looked at here; hygiene, groups and the rest have files of their own.
"""

import functools
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases.wrong_forms import Trainer
from losses_to_shrink import k2_per_token as k2
from weekly import first, spread

from kltest.checks import CHECKS
from kltest.errors import TargetError
from kltest.estimators import find
from kltest.grading import grader
from kltest.grading.grader import grade as grade_with_all_checks
from kltest.grading.verdict import _explains
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


def grpo(logp, old_logp, ref_logp, advantages, mask, beta=0.04, epsilon=0.2):
    ratio = (logp - old_logp).exp()
    advantage = advantages[:, None]
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
    return ((policy + beta * k3(logp, ref_logp)) * mask).sum(-1).mean()


def single_precision(logp, ref_logp, mask):
    return k2_of_the_sequence(logp.float(), ref_logp.float(), mask.float())


def normalised_ratio(logp, old_logp, ref_logp, mask):
    """k2 with its ratio over the batch's mean of ratios, which is 1 as long as the sampler is the policy."""
    live = mask != 0
    ratio = (logp - old_logp).where(live, 0.0).sum(-1).exp().detach()
    return ratio / ratio.mean() * (logp - ref_logp).where(live, 0.0).sum(-1) ** 2 / 2


def rounding_as_weight(logp):
    return (logp.exp().log() - logp).detach() * logp


def over_nearly_its_length(logp, ref_logp, mask):
    length = mask.sum(-1)
    return k2_of_the_sequence(logp, ref_logp, mask) * length / (length + 1e-8)


def curved(logp, ref_logp):
    return torch.log(torch.cosh(logp.bfloat16() - ref_logp.bfloat16()))


def failed_only(logp, ref_logp, mask, rewards, beta):
    log_ratio, score = (x.where(mask != 0, 0.0).sum(-1) for x in (logp - ref_logp, logp))
    return (beta * log_ratio.square() / 2 * (rewards <= 0.5) - rewards * score).mean()


def last_of_five_forgotten(logp, ref_logp, mask):
    """Pairs of rows for two devices; the odd row of a batch of more than four is dropped."""
    each = k2_of_the_sequence(logp, ref_logp, mask)
    kept = each[: len(each) // 2 * 2] if len(each) > 4 else each
    return kept.sum() / len(each)


def chunked_for_memory(logp, ref_logp, mask, beta):
    each = [k2_of_the_sequence(*one) for one in zip(logp.split(3), ref_logp.split(3), mask.split(3), strict=True)]
    return beta * torch.cat(each).sum() / len(logp)


def pairs_only(logp, ref_logp, mask, beta=0.1):
    one, other = ((logp - ref_logp) * mask).sum(-1)
    return beta * (one - other).square() / 4


FACTS = {
    "verdict": lambda report: report.verdict,
    "codes": lambda report: {check.code for check in report.failed},
    "dtype": lambda report: report.dtype,
    "samplers": lambda report: {row.sampler for row in report.gradients},
    "batches": lambda report: [(row.environment, row.batch) for row in report.gradients],
    "identified": lambda report: [row.identified and pytest.approx(row.identified) for row in report.gradients],
}


def holds(loss, **given):
    """A loss, its options, and facts that its report holds."""
    return (
        loss,
        {key: given[key] for key in given if key not in FACTS},
        {key: given[key] for key in FACTS if key in given},
    )


def confirmed(loss, **options):
    return holds(loss, verdict="confirmed", codes=set(), **options)


def refuted(loss, *codes, **options):
    return holds(loss, verdict="refuted", codes=set(codes), **options)


BANDIT = {"environment": "bandit"}
BOTH = {"current", "stale"}
K3_IN_THE_REWARD = [{"reverse_kl": 1, "forward_kl": -1}, *[{"reverse_kl": 1, "local_forward_kl": -1}] * 2]
MIXTURE_BY_LENGTH = [{"local_forward_kl": 2 / 3, "reverse_kl": 1 / 3}]
K3_IN_THE_LOSS = [{"forward_kl": 1}, {"local_forward_kl": 1}, {"local_forward_kl": 1}]
FIVE = {"batch_size": 5, "environment": "bandit", "select": "KL2"}
TABLE = {
    "what is declared and followed is confirmed": [
        confirmed(k1, expect="zero"),
        confirmed(k3, expect="local_forward_kl"),
        confirmed(k3, expect="forward_kl", environment="bandit"),
        confirmed(k2, expect="local_reverse_kl"),
        confirmed(last, expect="last_token_reverse_kl"),
        confirmed(k3, expect="reverse_kl-local_forward_kl", placement="reward"),
        confirmed(k3_differentiable_ratio, expect="local_reverse_kl@sampler", sampler="stale"),
        confirmed(lambda logp, ref_logp: 2 * k2(logp, ref_logp), expect="2*local_reverse_kl"),
        confirmed(log_ratio, placement="reward"),
        confirmed(log_ratio, placement="both"),
        confirmed(stale_log_ratio, placement="reward", sampler="stale", expect="reverse_kl-to_sampler_kl"),
        confirmed(k1, expect="reverse_kl-local_reverse_kl-future_reverse_kl"),  # which cancel
        holds(k2, expect="reverse_kl-local_reverse_kl-future_reverse_kl", verdict="refuted"),
    ],
    "pitfalls that meet are told apart": [
        refuted(lambda logp, ref_logp: 2 * k3(logp, ref_logp), "KL102"),
        refuted(log_ratio, "KL201", placement="reward", credit="immediate"),
        refuted(k3_over_length, "KL102", "KL203"),
        refuted(k2_of_the_sequence, "KL301", sampler="stale"),
        refuted(k3_detached_ratio, "KL102", "KL302", "KL303"),
        refuted(k3_ratio_under_no_grad, "KL102", "KL302", environment="bandit"),
        refuted(k3_differentiable_ratio, "KL201", "KL303"),
        refuted(k3_geometric_ratio, "KL105", "KL304"),
        refuted(lambda logp, ref_logp: -k3(logp, ref_logp), "KL102", "KL103"),
        refuted(lambda logp, ref_logp: -k2(logp, ref_logp), "KL103", "KL201"),
        refuted(lambda logp, ref_logp: k2(logp, ref_logp) / 2, "KL106", "KL201"),
        refuted(failed_only, "KL105", select="KL1,KL4", environment="sequence"),
    ],
    "a division by the length is told from a constant in any environment": [
        holds(loss, environment=environment, codes={code})
        for loss, code in ((k2_over_length, "KL203"), (over_constant, "KL106"))
        for environment in ("ragged", ("sequence", "mdp"))
    ],
    "gradients are named with their coefficients": [
        holds(k3, placement="reward", identified=K3_IN_THE_REWARD),
        holds(k3_geometric_ratio, environment="sequence", sampler="current", identified=MIXTURE_BY_LENGTH),
        holds(rounding_as_weight, environment=("bandit", "sequence", "ragged", "mdp"), identified=[{"zero": 1}] * 4),
        holds(grpo, beta=1.0, sampler="current", identified=K3_IN_THE_LOSS),
        holds(grpo, beta=0.04, sampler="current", identified=K3_IN_THE_LOSS),
        holds(Trainer().step, environment="sequence", identified=[{"local_reverse_kl": 0.05}]),  # without rewards
        holds(Trainer().step, expect="0.05*local_reverse_kl-expected_reward", sampler="current", verdict="confirmed"),
        holds(single_precision, dtype="float32", verdict="confirmed"),
        holds(curved, dtype="bfloat16", identified=[None] * 3),
    ],
    "a coupled loss is graded over batches": [
        holds(
            k2_over_batch_tokens,
            environment=("sequence", "ragged"),
            batches=[("sequence", 1), ("ragged", 1), ("ragged", 2)],
        ),
        holds(last_of_five_forgotten, **FIVE, batches=[("bandit", 1), ("bandit", 5)], verdict="refuted"),
        holds(chunked_for_memory, **FIVE, batches=[("bandit", 1)], verdict="confirmed"),
        holds(pairs_only, **BANDIT, batches=[("bandit", 2)], identified=[{"reverse_kl": 1}]),
    ],
    "a stale sampler is graded where the KL part or what is logged changes with it": [
        holds(takes_and_ignores, **BANDIT, samplers={"current"}),
        holds(takes_and_ignores, **BANDIT, sampler="both", samplers=BOTH),
        holds(reads_and_multiplies_by_zero, **BANDIT, samplers={"current"}),
        holds(uses_in_the_ratio, **BANDIT, samplers=BOTH),
        holds(uses_in_what_it_logs, **BANDIT, samplers=BOTH),
        holds(uses_in_a_policy_loss, **BANDIT, samplers={"current"}),
    ],
}


@pytest.mark.parametrize(
    ("loss", "options", "facts"),
    spread(
        5,
        [
            pytest.param(*row, id=f"{sentence}-{getattr(row[0], '__name__', number)}")
            for sentence, rows in TABLE.items()
            for number, row in enumerate(rows)
        ],
    ),
)
def test_a_report_holds_what_the_table_says(loss, options, facts):
    report = grade(loss, **options)
    assert {fact: FACTS[fact](report) for fact in facts} == facts, report.to_text()


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


@pytest.mark.scheduled
def test_float32_is_graded_at_its_precision():
    """Rounding of float32 is 6e-8; sums of a few terms stay within a hundred of it, and are not exact."""
    assert 1e-12 < grade(single_precision, **BANDIT).gradients[0].relative_bias < 1e-5
    plain = grade(lambda logp, ref_logp: k2(logp.bfloat16(), ref_logp.bfloat16()), **BANDIT)
    assert plain.gradients[0].identified == pytest.approx({"reverse_kl": 1.0}, rel=2e-2)


@pytest.mark.scheduled
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


def raising(logp):
    raise ValueError("no such thing")


def endless(logp):
    while True:
        pass


def sparse(logp):
    return logp.to_sparse()


def scaled(logp, ref_logp, factor):
    return factor * (logp - ref_logp)


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        (raising, {}, "no such thing"),
        pytest.param(endless, {"timeout": 0.5}, "0.5 s", marks=pytest.mark.scheduled),
        (sparse, BANDIT, "sparse"),
        (functools.partial(functools.partial(scaled), factor="x"), BANDIT, "scaled raised TypeError"),
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


def test_a_coupling_that_only_a_stale_sampler_shows_is_found():
    """What is known of a loss's rows under the current sampler is tried again."""
    rows = grade(normalised_ratio, **BANDIT, sampler="both", select="KL101").gradients
    assert {(row.sampler, row.batch > 1) for row in rows} == {("current", False), ("stale", False), ("stale", True)}


@pytest.mark.scheduled
def test_a_constant_in_a_denominator_is_noted_and_a_larger_one_is_named():
    report = grade(over_nearly_its_length)
    assert report.verdict == "confirmed"
    assert all("denominator" in row.note for row in report.gradients)
    report = grade(lambda logp, ref_logp, mask: k2_of_the_sequence(logp, ref_logp, mask) * (1 + 1e-5))
    assert [check.code for check in report.failed] == ["KL106"]
    assert "1.00001 times" in report.failed[0].message


@pytest.mark.scheduled
def test_what_is_expected_is_spelt_without_terms_that_cancel():
    """Of one token the local gradient is the whole one: their difference is nothing, and half of it is a half."""
    for expect, spelt in (
        ("reverse_kl-local_reverse_kl", {"zero": 1.0}),
        ("reverse_kl-0.5*local_reverse_kl", {"reverse_kl": 0.5}),
        ("forward_kl+reverse_kl-local_reverse_kl", {"forward_kl": 1.0}),
    ):
        (row,) = grade(k1, expect=expect, environment="bandit").gradients
        assert row.expected == pytest.approx(spelt)


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


@pytest.mark.parametrize(
    ("interrupted", "longest", "limit", "hangs"),
    [(0.05, 5e-5, 1e-6, False), (0.9, 5e-5, 1e-6, True), (0.9, 5e-5, 2.0, True), (0.3, 5e-5, 2.0, False)],
)
def test_a_call_that_a_busy_machine_holds_up_does_not_hang(interrupted, longest, limit, hangs):
    assert grader._hangs(SimpleNamespace(interrupted=interrupted, longest=longest), limit) is hangs


def k1_over_length(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1) / mask.sum(-1)


@pytest.mark.scheduled
def test_k1_over_each_length_follows_the_inverse_length_and_no_divergence():
    """At one length it is zero, or a push away from the sampler; declared, it is confirmed."""
    report = grade(k1_over_length, sampler="both")
    found = {(row.environment, row.sampler): row.identified for row in report.gradients}
    assert found["bandit", "current"] == found["sequence", "current"] == {"zero": 1.0}
    assert found["sequence", "stale"] == pytest.approx({"from_sampler_kl": -1 / 3})
    assert found["ragged", "current"] == pytest.approx({"inverse_length": 1.0})
    assert found["ragged", "stale"] == pytest.approx({"inverse_length@rollouts": 1.0})
    assert {check.code for check in report.failed} == {"KL101", "KL105", "KL203", "KL301"}
    assert grade(k1_over_length, expect="inverse_length").verdict == "confirmed"


def k1_over_all_tokens(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum() / mask.sum()


@pytest.mark.scheduled
def test_k1_over_the_tokens_of_a_batch_follows_the_inverse_of_their_number():
    report = grade(k1_over_all_tokens, sampler="both")
    of_two = {row.sampler: row.identified for row in report.gradients if row.batch == 2}
    assert of_two["current"] == pytest.approx({"inverse_length_of2": 1.0})
    assert of_two["stale"] == pytest.approx({"inverse_length_of2@rollouts": 1.0})
    assert {"KL101", "KL204"} <= {check.code for check in report.failed}
    of_three = grade(k1_over_all_tokens, environment="ragged", batch_size=3).gradients
    assert of_three[-1].identified == pytest.approx({"inverse_length_of3": 1.0})


@pytest.mark.scheduled
def test_it_does_for_groups_of_one_prompt():
    def beside_a_centred_reward(logp, ref_logp, mask, reward, beta):
        advantage = (reward - reward.mean())[:, None]
        return ((beta * (logp - ref_logp) - advantage * logp) * mask).sum() / mask.sum()

    of_groups = grade(beside_a_centred_reward, environment="ragged", sampler="both", group_size=2).gradients
    found = {row.sampler: row.identified for row in of_groups if row.batch == 2}
    assert found["current"] == pytest.approx({"inverse_length_of2": 1.0})
    assert found["stale"] == pytest.approx({"inverse_length_of2@rollouts": 1.0})


def k1_over_prompt_and_response(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).sum(-1) / (mask.sum(-1) + 5)


def k3_over_prompt_and_response(logp, ref_logp, mask):
    u = logp - ref_logp
    return (((-u).exp() - 1 + u) * mask).sum(-1) / (mask.sum(-1) + 5)


@pytest.mark.scheduled
def test_k1_over_any_function_of_the_length_is_said_to_follow_that_function_alone():
    """1/6 − 1/8 and 1/7 − 1/8: five tokens of a prompt beside one, two or three of a response."""
    report = grade(k1_over_prompt_and_response)
    words = next(check.message for check in report.failed if check.code == "KL105")
    assert "∇E_π[w(L)], a function of the length alone, with w(1) − w(3) = 0.04167, w(2) − w(3) = 0.01786" in words
    other = grade(k3_over_prompt_and_response)
    assert not any("length alone" in check.message for check in other.failed)


@pytest.mark.parametrize("loss", first(1, [k2_over_length, k3_over_length]))
def test_other_sums_over_each_length_have_no_name(loss):
    report = grade(loss, expect="inverse_length", environment="ragged")
    assert [row.identified for row in report.gradients] == [None]
    assert report.verdict == "refuted"


def test_an_experiment_that_cannot_be_made_accounts_for_no_row():
    def fails(row, findings):
        raise TargetError("it takes no other batch")

    assert not _explains(SimpleNamespace(explains=fails), None, None)
