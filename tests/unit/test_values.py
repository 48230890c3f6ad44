"""The logged KL: its value, what else it depends on, the places that keep it, and changes after it was recorded."""

import numpy as np
import pytest
import torch
from cases.parts import k2, live, penalty
from cases.right_values import sampled_k3
from weekly import first

from kltest.grading.grader import grade
from kltest.identify.instances import instances
from kltest.identify.values import _weights_tokens_alike
from kltest.loss.calling import bind

FAMILY = ("KL601", "KL602", "KL603", "KL604")


def codes(report):
    return {check.code for check in report.failed if not check.warns}


def message(report, code):
    return next(check.message for check in report.checks if check.code == code)


def by_hand(environment, sampler):
    """(Σu, L, probability) of every rollout of the instances, from the tables alone."""
    for instance in instances(environment, 0):
        paths = instance.paths
        tables = {"pi": instance.policy, "ref": instance.reference, "mu": instance.behaviour(sampler)}
        summed = {
            name: np.array(
                [table[c[m], t[m]].sum() for c, t, m in zip(paths.contexts, paths.tokens, paths.mask, strict=True)]
            )
            for name, table in tables.items()
        }
        yield summed["pi"] - summed["ref"], paths.mask.sum(axis=1), np.exp(summed["mu"]), np.exp(summed["pi"])


@pytest.mark.parametrize("environment", first(2, ["bandit", "sequence", "ragged"]))
@pytest.mark.parametrize("sampler", ["current", "stale"])
def test_bias_and_standard_deviation_of_the_plain_log_ratio(environment, sampler):
    def loss(logp, ref_logp, mask):
        return penalty(logp, ref_logp, mask), {"kl": live(logp - ref_logp, mask).sum(-1)}

    row = grade(loss, environment=environment, sampler=sampler, select="KL1").value[0]
    biases, spreads = [], []
    for total, _, weights, policy in by_hand(environment, sampler):
        kl = policy @ total
        biases.append(abs(weights @ total / kl - 1))
        spreads.append(np.sqrt(weights @ (total - weights @ total) ** 2) / kl)
    if sampler == "current":
        assert row.matches == "kl"
        assert row.relative_bias < 1e-12
        assert row.relative_std == pytest.approx(max(spreads), rel=1e-10)
    else:
        # Relative to the nearest of the three numbers, which need not be the KL of whole rollouts.
        assert row.matches is None
        assert row.relative_bias > 1e-3
        if environment == "bandit":
            assert row.relative_bias == pytest.approx(max(biases), rel=1e-10)
            assert row.relative_std == pytest.approx(max(spreads), rel=1e-10)


def test_a_token_mean_of_k3_is_judged_by_what_it_tends_to_and_a_mean_of_means_keeps_its_bias():
    def of_the_batch(logp, ref_logp, mask):
        return penalty(logp, ref_logp, mask), {"kl": sampled_k3(logp, ref_logp, mask).sum() / mask.sum()}

    def of_each(logp, ref_logp, mask):
        rows = sampled_k3(logp, ref_logp, mask).sum(-1) / mask.sum(-1)
        return penalty(logp, ref_logp, mask), {"kl": rows.mean()}

    batch, each = (grade(loss, environment="ragged", select="KL6") for loss in (of_the_batch, of_each))
    assert [batch.value[0].matches, each.value[0].matches] == ["kl_per_token"] * 2
    assert batch.value[0].relative_bias < 1e-12
    biases = []
    for instance in instances("ragged", 0):
        paths, weights = instance.paths, instance.rollout_weights("current")
        u = np.where(paths.mask, (instance.policy - instance.reference)[paths.contexts, paths.tokens], 0.0)
        k3 = (np.exp(-u) - 1 + u).sum(axis=1)
        length = paths.mask.sum(axis=1)
        truth = (weights @ u.sum(axis=1)) / (weights @ length)
        assert weights @ k3 == pytest.approx(weights @ u.sum(axis=1))
        biases.append(abs(weights @ (k3 / length) / truth - 1))
    assert each.value[0].relative_bias == pytest.approx(max(biases), rel=1e-9)
    assert codes(batch) == codes(each) == set()


@pytest.mark.parametrize("seed", range(2))
def test_a_token_mean_is_seen_to_be_one_whatever_the_signs_of_its_rows(seed):
    """Halfway between k1 and k3, which is negative if the reference is a little likelier."""

    def of_the_batch(logp, ref_logp, mask):
        halfway = live(logp - ref_logp, mask) + torch.expm1(live(ref_logp - logp, mask)) / 2
        return penalty(logp, ref_logp, mask), {"kl": halfway.sum() / mask.sum()}

    (row,) = grade(of_the_batch, environment="ragged", select="KL6", seed=seed).value
    assert row.matches == "kl_per_token"
    assert row.relative_bias < 1e-12


def one_at_a_time(logp, ref_logp, mask):
    assert len(logp) == 1
    return penalty(logp, ref_logp, mask), {"kl": sampled_k3(logp, ref_logp, mask).sum() / mask.sum()}


METRICS = [
    (lambda k3, mask: k3.sum() / mask.sum(), True),
    (lambda k3, mask: (k3.sum(-1) / mask.sum(-1)).mean(), False),
    (lambda k3, mask: k3.sum(-1).mean(), False),
    (lambda k3, mask: k3.sum(), False),
]


@pytest.mark.parametrize(("metric", "by_tokens"), METRICS)
def test_whether_tokens_count_alike_shows_in_two_rollouts(metric, by_tokens):
    def logs(logp, ref_logp, mask):
        return penalty(logp, ref_logp, mask), {"kl": metric(sampled_k3(logp, ref_logp, mask), mask)}

    assert _weights_tokens_alike(bind(logs), instances("ragged", 0)[0]) == by_tokens


def test_what_takes_one_rollout_a_call_weighs_no_tokens_of_two():
    assert not _weights_tokens_alike(bind(one_at_a_time), instances("ragged", 0)[0])


@pytest.mark.scheduled
def test_a_loss_value_that_is_no_kl_is_no_defect():
    report = grade(k2)
    assert report.value[0].matches is None
    assert [check.status for check in report.checks if check.code in FAMILY] == ["skip"] * 4
    assert codes(report) == set()


def test_a_returned_running_mean_is_graded_by_what_it_comes_to():
    class Running:
        def __init__(self):
            self.total, self.calls = 0.0, 0

        def __call__(self, logp, ref_logp, mask):
            self.total += live(logp - ref_logp, mask).sum(-1).mean().item()
            self.calls += 1
            return penalty(logp, ref_logp, mask), {"kl": self.total / self.calls}

    report = grade(Running(), environment="bandit", select="KL6")
    assert codes(report) == set()
    assert [check.status for check in report.checks if check.code in FAMILY] == ["pass", *["skip"] * 3]
    assert "depends on earlier calls" in message(report, "KL602")


def test_what_moves_with_padding_is_told_only_where_there_is_some():
    def unmasked_squares(logp, ref_logp, mask):
        return penalty(logp, ref_logp, mask), {"kl": (logp - ref_logp).square().sum(-1).mean() / 2}

    report = grade(unmasked_squares, select="KL6")
    assert codes(report) == {"KL601", "KL604"}
    assert "ragged" in message(report, "KL604")
    assert "bandit" not in message(report, "KL604")
    unpadded = grade(unmasked_squares, environment="bandit,sequence", select="KL604")
    assert next(check.status for check in unpadded.checks if check.code == "KL604") == "skip"


@pytest.mark.parametrize("factor", [-1.0, -1 / 3])
def test_the_factor_is_told(factor):
    def scaled(logp, ref_logp, mask):
        return penalty(logp, ref_logp, mask), {"kl": factor * live(logp - ref_logp, mask).sum(-1).mean()}

    assert f"{factor:.6g} · E[Σu] in bandit".replace("-", "−") in message(grade(scaled, select="KL602"), "KL602")
