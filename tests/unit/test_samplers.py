"""Samplers of which a trainer knows less than it thinks: an engine, a truncated one, and weights that change midway."""

from __future__ import annotations

import json
import warnings
from functools import partial
from inspect import getsource

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from weekly import first, later

import kltest
from kltest.checks import CHECKS
from kltest.checks.off_policy.kl306_clipped_ratio import _between
from kltest.cli import app
from kltest.environments.samplers import drawn_by, kept_mass, kept_tokens
from kltest.errors import UsageError
from kltest.grading.grader import Grading
from kltest.grading.options import Options
from kltest.identify.case import Case
from kltest.identify.instances import instances
from kltest.loss.calling import bind
from kltest.moments import exact
from kltest.rollout import Rollout
from kltest.samplers import Truncation, check
from kltest.truth import gradient

CUT = "truncated:k=2"
run = partial(CliRunner().invoke, app)
LACKING = ("engine", "versions", CUT, f"{CUT},renormalised=no")


def summed(log_ratio, mask):
    return log_ratio.where(mask != 0, 0.0).sum(-1)


def no_ratio(logp, ref_logp, mask):
    return summed(logp - ref_logp, mask).square() / 2


def trainer_ratio(logp, ref_logp, old_logp, mask):
    return summed(logp - old_logp, mask).exp() * summed(logp - ref_logp, mask).detach()


def engine_ratio(logp, ref_logp, rollout_logprobs, mask):
    return summed(logp - rollout_logprobs, mask).exp() * summed(logp - ref_logp, mask).detach()


def both_ratios(logp, ref_logp, proximal_logprobs, vllm_logps, mask):
    weight = summed(proximal_logprobs - vllm_logps, mask).exp().detach()
    return weight * summed(logp - proximal_logprobs, mask).exp() * summed(logp - ref_logp, mask).detach()


def test_a_truncation_keeps_the_likeliest_tokens_and_always_one():
    log_probs = np.log([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]])
    kept = {name: kept_tokens(Truncation.named(f"truncated:{name}"), log_probs).sum(axis=1).tolist() for name in CUTS}
    assert kept == CUTS


# The nucleus of p = .8 of the first is .5 + .3; of its three likeliest, which hold .95, p = .9 asks for .855.
CUTS = {"k=2": [2, 2], "p=0.8": [2, 1], "p=0.81": [3, 1], "p=1": [4, 4], "p=0.001": [1, 1], "p=0.9,k=3": [3, 1]}


@pytest.mark.parametrize(
    "name", ["truncated", "truncated:", "truncated:k=0", "truncated:p=0", "truncated:p=2", "truncated:k=a", "bogus", ""]
)
def test_what_is_no_sampler_is_refused_by_name(name):
    with pytest.raises(UsageError, match=r"sampler"):
        check(name)
    assert run(["grade", "k3-loss", "--sampler", name]).exit_code == 2


def test_a_cut_that_cuts_nothing_is_refused():
    with pytest.raises(UsageError, match="leaves every token in environment 'sequence'"):
        kltest.grade("k3-loss", sampler="truncated:k=3", environment="sequence")


def test_versions_need_prefixes_that_say_how_long_they_are():
    with pytest.raises(UsageError, match="comes back to its states"):
        kltest.grade("k3-loss", sampler="versions", environment="mdp")


@pytest.mark.parametrize("sampler", ["current", "stale"])
def test_without_an_engine_of_its_own_all_three_fields_are_one(sampler):
    rollout = Rollout.of(instances("ragged", 0)[0], sampler=sampler)
    assert rollout.rollout_logp is rollout.prox_logp is rollout.old_logp
    moved = rollout.replace(old_logp=rollout.old_logp - 1)
    assert torch.equal(moved.rollout_logp, moved.old_logp)


def squared_to_sampler(logp, old_logp, mask):
    return summed((logp - old_logp) ** 2 / 2, mask)


def clipped_ratio(logp, ref_logp, old_logp, mask):
    return summed((logp - old_logp).exp().clamp(0.8, 1.2).detach() * (logp - ref_logp) ** 2 / 2, mask)


def stale_penalty(logp, ref_logp, old_logp, mask):
    return summed(logp - old_logp, mask).exp() * summed(old_logp - ref_logp, mask).detach()


@pytest.mark.parametrize(
    ("loss", "name"),
    first(
        2,
        [
            (squared_to_sampler, "rollout_logp"),
            (clipped_ratio, "prox_logp"),
            (stale_penalty, "rollout_logp"),
            (squared_to_sampler, "prox_logp"),
            (clipped_ratio, "rollout_logp"),
            (stale_penalty, "prox_logp"),
        ],
    ),
)
def test_a_loss_is_graded_alike_by_each_of_the_three_names(loss, name, tmp_path):
    """Its codes and names, and a program that shows the difference: all but the parameter's name."""
    found = []
    for field in ("old_logp", name):
        path = tmp_path / f"by_{field}.py"
        path.write_text("\n".join(map(getsource, (summed, loss))).replace("old_logp", field))
        report = kltest.grade(f"{path}:{loss.__name__}", expect="to_sampler_kl", sampler="both")
        assert report.verdict == "refuted"
        assert report.smallest.code, report.smallest.note
        rows = [[row.environment, row.sampler, row.identified, row.relative_bias] for row in report.gradients]
        found.append([rows, [(check.code, check.status) for check in report.checks]])
    assert found[0] == found[1]


@pytest.mark.parametrize("sampler", LACKING)
def test_the_trainer_takes_the_policy_for_the_sampler(sampler):
    instance = Case("sequence", sampler).instances[0]
    rollout = Rollout.of(instance, sampler=sampler)
    assert torch.equal(rollout.old_logp, rollout.logp.detach())
    assert rollout.prox_logp is rollout.old_logp
    chances = instance.rollout_weights(sampler)
    assert chances.sum() == pytest.approx(1, abs=1e-12)
    told = rollout.rollout_logp.sum(1).exp().numpy()[chances > 0]
    kept = kept_mass(instance)[1] if sampler.endswith("no") else 1.0
    assert told.sum() == pytest.approx(kept, abs=1e-12)
    assert sampler.endswith("no") or told == pytest.approx(chances[chances > 0], rel=1e-12)


def test_versions_change_in_the_middle_and_an_engine_is_a_tenth_as_far_as_the_stale_sampler():
    base = instances("sequence", 0)
    early, whole = drawn_by("versions", base)[0], base[0]
    first, middle, last = (np.unique(whole.paths.contexts[:, step]) for step in range(3))
    for contexts in (first, middle):
        assert np.array_equal(early.sampler[contexts], whole.sampler[contexts])
    assert np.array_equal(early.sampler[last], whole.policy[last])
    near, far = (np.abs(one.sampler - one.policy).max() for one in (drawn_by("engine", base)[0], whole))
    assert 0.05 * far < near < 0.15 * far


@pytest.mark.parametrize("sampler", first(1, ["engine", "versions"]))
@pytest.mark.parametrize(
    ("loss", "verdict", "codes"),
    [
        (trainer_ratio, "refuted", {"KL301"}),
        (engine_ratio, "confirmed", set()),
        *map(later, [(no_ratio, "refuted", {"KL301"}), (both_ratios, "confirmed", set())]),
    ],
)
def test_only_a_ratio_to_what_the_engine_told_is_right(loss, verdict, codes, sampler):
    report = kltest.grade(loss, sampler=sampler)
    assert report.verdict == verdict
    assert {row.sampler for row in report.gradients} == {sampler}
    named = "reverse_kl" if verdict == "confirmed" else "reverse_kl@rollouts"
    assert all(row.identified == {named: pytest.approx(1)} for row in report.gradients if row.environment != "bandit")
    failed = {check.code for check in report.errors}
    assert failed == codes | ({"KL703"} if codes and sampler == "engine" else set())


@pytest.mark.parametrize("loss", first(1, [engine_ratio, no_ratio, trainer_ratio]))
def test_no_ratio_brings_back_what_a_truncated_sampler_never_draws(loss):
    report = kltest.grade(loss, sampler=CUT)
    assert report.verdict == "refuted"
    failed = {check.code for check in report.errors}
    assert "KL703" in failed
    assert ("KL301" in failed) == (loss is not engine_ratio)
    assert any("rollouts that hold" in note for note in report.notes)


@pytest.mark.scheduled
def test_what_sums_over_every_next_token_is_told_by_its_prefixes():
    """Of a cut only the prefixes are left: every next token is seen in each of them; its noise is a number."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        report = kltest.grade("full-loss", sampler=CUT, expect="local_reverse_kl@sampler")
    assert report.verdict == "confirmed"


@pytest.mark.parametrize("sampler", LACKING)
def test_the_expected_gradient_is_the_sum_over_what_is_drawn(sampler):
    """By hand: Σ_y μ(y)·f(y)·∇log π(y), with the tables and the rollouts of the environment alone."""
    case = Case("sequence", sampler)
    instance = case.instances[0]
    policy = torch.from_numpy(instance.policy.copy()).requires_grad_()
    paths, told = instance.paths, torch.from_numpy(instance.told(sampler))
    at = torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens)
    log_policy = policy.log_softmax(1)[at].sum(1)
    chance = torch.from_numpy(instance.sampler)[at].sum(1).exp()
    cost = (torch.from_numpy(instance.policy - instance.reference))[at].sum(1)
    (chance * (log_policy - told[at].sum(1)).exp() * cost).sum().backward()
    found = exact(bind(engine_ratio), instance, sampler).gradient
    assert found == pytest.approx(policy.grad.numpy(), abs=1e-14)
    is_the_truth = np.abs(found - gradient("reverse_kl", instance)).max() < 1e-12
    assert is_the_truth == (sampler in ("engine", "versions"))


def test_the_command_line_tells_the_sampler_in_its_json(tmp_path):
    path = tmp_path / "report.json"
    found = run(["grade", "k3-loss", "--sampler", "engine", "--output", f"json:{path}"])
    assert found.exit_code == 1
    assert {row["sampler"] for row in json.loads(path.read_text())["gradients"]} == {"engine"}


def of_the_policy_alone(logp, ref_logp, old_logp, mask):
    if ((logp - old_logp).where(mask != 0, 0.0).abs() > 1e-4).any():
        raise RuntimeError("stale rollouts")
    return (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2


def test_a_loss_that_refuses_stale_rollouts_is_graded_without_them():
    report = kltest.grade(of_the_policy_alone, expect="reverse_kl")
    assert "--sampler current grades it for rollouts of the policy alone" in report.error
    report = kltest.grade(of_the_policy_alone, expect="reverse_kl", sampler="current")
    assert report.verdict == "confirmed"
    assert report.failed == []


def clipped_between(logp, ref_logp, old_logp, rollout_logp, mask):
    """Puts back with one bound what the other ratio takes without one."""
    ratio = summed(logp - old_logp, mask) + summed(old_logp - rollout_logp, mask).clamp(-1.5, 1.5)
    return ratio.exp().detach() * summed(logp - ref_logp, mask).square() / 2


def test_a_bound_on_the_distance_of_two_fields_of_samplers_is_found_where_it_acts():
    findings = Grading.of("", Options.of(environment="bandit", sampler="stale")).measured(clipped_between)
    found = _between(findings)
    assert found is not None
    assert found.level == "warning"
    assert "are 2.0 apart at each token" in found.message


def clipped_and_stale(logp, ref_logp, old_logp, mask):
    return summed(logp - old_logp, mask).exp().clamp(0.8, 1.2) * summed(old_logp - ref_logp, mask)


def test_behind_a_clipped_ratio_a_stale_penalty_is_named_too():
    """What is clipped has no name; without the bounds it is the gradient less that of the KL to the sampler."""
    findings = Grading.of("", Options.of(environment="bandit", sampler="stale")).measured(clipped_and_stale)
    (row,) = findings.rows
    assert row.identified is None
    assert CHECKS["KL305"].explains(row, findings)
