"""The policy part of a loss, its KL term left out: what advantage, ratio, mask and normalisation follow together."""

from __future__ import annotations

import json
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from weekly import later, spread

import kltest
from kltest.adapters import find
from kltest.checks import CHECKS
from kltest.checks.policy.objectives import asymmetry
from kltest.cli import app
from kltest.errors import InvalidEnvironmentError, UsageError
from kltest.grading.grader import Grading
from kltest.grading.options import Options
from kltest.identify.instances import instances
from kltest.truth import OF_POLICY, gradient, gradient_again, of_group
from kltest.truth.utilities import group_weight
from tests.written.policy import LOSSES, discounted

run = partial(CliRunner().invoke, app)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("deviation", [None, 0, 1])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
def test_the_weight_of_a_success_rate_is_the_sum_over_all_groups(rate, size, deviation):
    """A policy of two actions, the first a success: Σ over ordered groups of their chance and of mean(A·score)."""
    total = 0.0
    for group in product((1.0, 0.0), repeat=size):
        reward = np.array(group)
        advantage = reward - reward.mean()
        if deviation is not None:
            spread = reward.std(ddof=deviation)
            advantage = advantage / spread if spread else advantage
        score = np.where(reward == 1, 1 / rate, -1 / (1 - rate))  # of log p and log(1 − p), in p
        chance = np.prod(np.where(reward == 1, rate, 1 - rate))
        total += chance * (advantage * score).mean()
    assert group_weight(rate, size, deviation=deviation) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("deviation", [0, 1])
def test_a_deviation_leaves_a_constant_in_groups_of_two_and_three_only(size, deviation):
    weights = [group_weight(rate, size, deviation=deviation) for rate in (0.05, 0.3, 0.5, 0.9)]
    assert (max(weights) - min(weights) < 1e-12) == (size < 4)


def test_a_large_group_follows_the_arcsine_of_the_root():
    """U′ = 1/√(p(1 − p)) is that of 2·arcsin √p."""
    assert group_weight(0.3, 500, deviation=0) == pytest.approx((0.3 * 0.7) ** -0.5, rel=1e-2)


def test_without_a_deviation_a_group_leaves_one_share_out():
    assert group_weight(0.3, 4, deviation=None) == pytest.approx(0.75)


@pytest.mark.parametrize("name", spread(4, [*OF_POLICY, *of_group(3), *of_group(4)]))
@pytest.mark.parametrize("environment", ["bandit", "ragged", "mdp"])
def test_the_names_of_a_policy_part_by_two_routes(name, environment):
    for instance in instances(environment, 0, 4)[:2]:
        found = gradient(name, instance)
        assert found == pytest.approx(gradient_again(name, instance), abs=1e-13)
        assert np.abs(found).max() > 1e-4


def test_success_rates_are_of_rewards_of_zero_and_one():
    with pytest.raises(InvalidEnvironmentError, match="rewards are not 0 or 1"):
        gradient("success_utility_of4", instances("bandit", 0)[0])
    with pytest.raises(UsageError, match="is of groups"):
        kltest.grade(LOSSES[0][0], expect="success_utility_of4")


def test_the_slope_of_a_utility_weighs_each_prompt_by_its_own_success_rate():
    """By hand: Σ_x P(x)·w(p_x)·∇p_x, with ∇p_x that of the reward where no other prompt is ever drawn."""
    instance = instances("mdp", 0, 4)[0]
    environment = instance.environment
    rates = environment.expected_returns(instance.policy)
    total = np.zeros(instance.policy.shape)
    for prompt, share in enumerate(environment.prompts):
        paths = instance.paths
        chance = np.exp(paths.log_probability(instance.policy)) * environment.returns(paths) * (paths.prompt == prompt)
        onto = np.zeros(instance.policy.shape)
        np.add.at(onto, (paths.contexts, paths.tokens), chance[:, None] * paths.mask)
        slope = onto - np.exp(instance.policy) * onto.sum(axis=1, keepdims=True)
        total += group_weight(rates[prompt], 4, deviation=0) * slope
        assert share > 0
    assert len(environment.prompts) > 1
    assert gradient("success_utility_of4", instance) == pytest.approx(total, abs=1e-13)


# At every push the first, and those of one environment: they are quick, and fail every code but KL906.
QUICK = [row if row is LOSSES[0] or "environment" in row[1] else later(row) for row in LOSSES]


@pytest.mark.parametrize(("loss", "options", "verdict", "codes", "words"), QUICK)
def test_a_policy_part_is_named_as_derived(loss, options, verdict, codes, words):
    report = kltest.grade(loss, part="policy", **options)
    assert (report.verdict, {check.code for check in report.errors}) == (verdict, set(codes))
    told = " ".join([*(check.message for check in report.checks), *(str(row.identified) for row in report.gradients)])
    assert all(word in told for word in words)


@pytest.mark.parametrize("code", [code for code in CHECKS if code.startswith("KL9")])
def test_every_policy_code_has_losses_that_fail_it(code):
    """Differently written ones, and none of them the example that the check itself carries."""
    assert len({row[0] for row in LOSSES if code in row[3]} - {CHECKS[code].wrong}) >= 2


@pytest.mark.scheduled
def test_kl_and_policy_codes_never_mix():
    of_kl, of_policy = (kltest.grade(LOSSES[1][0], part=part) for part in ("kl", "policy"))
    assert {check.code for check in of_policy.checks} == {code for code in CHECKS if code.startswith("KL9")}
    assert not {check.code for check in of_kl.checks} & {check.code for check in of_policy.checks}


def whole(logp, ref_logp, reward, mask, beta):
    """E[R] − β·KL by the score function: what a KL penalty in the reward is meant to follow."""
    live = mask != 0
    cost = (logp - ref_logp).where(live, 0.0).sum(-1).detach()
    return -(reward - beta * cost) * logp.where(live, 0.0).sum(-1)


def test_all_of_a_loss_is_the_reward_less_its_kl_term():
    report = kltest.grade(whole, part="all")
    assert report.verdict == "confirmed"
    assert report.gradients[-1].identified == {"reverse_kl": pytest.approx(-1), "expected_reward": pytest.approx(1)}
    half = kltest.grade(whole, part="all", arguments={"beta": 0.5}, expect="expected_reward-0.5*reverse_kl")
    assert half.verdict == "confirmed"
    assert kltest.grade(whole, part="policy").gradients[-1].identified == {"expected_reward": pytest.approx(1)}


def test_k3_in_the_whole_loss_pulls_the_other_way():
    def with_k3(logp, ref_logp, reward, mask, beta):
        log_ratio = ref_logp - logp
        k3 = log_ratio.exp() - log_ratio - 1
        return (beta * k3 - reward.unsqueeze(-1) * logp).where(mask != 0, 0.0).sum(-1)

    report = kltest.grade(with_k3, part="all")
    assert report.verdict == "refuted"
    assert report.gradients[-1].identified == {
        "local_forward_kl": pytest.approx(-1),
        "expected_reward": pytest.approx(1),
    }


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("k3-loss", {}, "has no policy part"),
        (lambda logp, ref_logp, reward: reward * (logp - ref_logp).sum(-1), {}, "takes no coefficient"),
        later((whole, {"placement": "reward"}, "was placed in the reward")),
    ],
)
def test_what_has_no_policy_part_is_refused_by_name(target, options, words):
    with pytest.raises(UsageError, match=words):
        kltest.grade(target, part="policy", **options)


@pytest.mark.scheduled
def test_the_asymmetry_is_that_of_the_jacobian():
    """By hand: the field Σ_y π(y)·Σ_t ½^(L−t)·R·g_t at the logits of a sequence, and its Jacobian by autograd."""
    instance = instances("sequence", 0)[0]
    paths, shape = instance.paths, instance.policy.shape
    at = torch.from_numpy(paths.contexts), torch.from_numpy(paths.tokens)
    reward = torch.from_numpy(instance.environment.returns(paths))
    left = 0.5 ** torch.arange(paths.shape[1] - 1, -1, -1).double()

    def field(logits):
        log_policy = logits.reshape(shape).log_softmax(1)
        weight = (log_policy[at].sum(1).exp() * reward).unsqueeze(1) * left
        onto = torch.zeros(shape, dtype=torch.float64).index_put(at, weight, accumulate=True)
        return (onto - log_policy.exp() * onto.sum(1, keepdim=True)).reshape(-1)

    jacobian = torch.autograd.functional.jacobian(field, torch.from_numpy(instance.policy.reshape(-1)))
    wanted = float((jacobian - jacobian.T).norm() / jacobian.norm())
    grading = Grading.of("discounted", Options.of(part="policy", environment="sequence"))
    findings = grading.measured(discounted)
    assert asymmetry(findings, findings.rows[0]) == pytest.approx(wanted, rel=0.5)
    assert wanted > 0.1


def test_the_command_line_grades_a_part(tmp_path):
    source = tmp_path / "policy.py"
    source.write_text("def loss(logp, reward, mask):\n    return -(reward[:, None] * logp * mask).sum(-1)\n")
    found = run(["grade", f"{source}:loss", "--part", "policy", "--output", f"json:{tmp_path}/report.json"])
    assert found.exit_code == 0, found.output
    assert json.loads((tmp_path / "report.json").read_text())["expect"] == "expected_reward"
    assert run(["grade", "k3-loss", "--part", "policy"]).exit_code == 2
    assert run(["grade", "k3-loss", "--part", "reward"]).exit_code == 2


def test_a_setting_that_is_given_its_advantages_has_no_policy_part_and_says_why(tmp_path):
    (tmp_path / "adapter.py").write_text(
        "from kltest.adapters import Adapter, Setting\n"
        "given = Setting.of('tests.written.policy:with_a_given_advantage', name='own/loss')\n"
        "ADAPTER = Adapter(name='own', distribution='torch', version='1', installs=(), module='torch', homepage='',\n"
        "    settings=(given, given.variant(name='scored', policy=('tests.written.policy:centred', {}))))\n"
    )
    place = f"{tmp_path}/adapter.py"
    refused = run(["grade", f"{place}:own/loss", "--part", "policy"])
    assert refused.exit_code == 2
    assert "what the library makes of rewards" in " ".join(refused.output.split())
    scored = run(["grade", f"{place}:own/loss/scored", "--part", "policy", "--environment", "bandit"])
    assert scored.exit_code == 1, scored.output
    assert "0.75·∇E_π[R]" in scored.output


def test_trl_scores_whole_groups_for_its_policy_part():
    settings = find("trl").known
    for name in ("grpo/defaults", "grpo/loss_type=dr_grpo", "rloo/defaults"):
        whole = settings[name].for_part("policy")
        assert whole.target.endswith(":grouped")
        assert whole.arguments["trainer"] == name[:4].upper()
        assert settings[name].for_part("kl") is settings[name]
    with pytest.raises(UsageError, match="--part kl grades its KL term"):
        settings["gkd/defaults"].for_part("all")
