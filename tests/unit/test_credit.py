"""Discounted credit: the parts of the gradient by a second route, and every pattern of factors read back."""

import itertools

import numpy as np
import pytest
import torch
from weekly import first

import kltest
from kltest.identify.identification import solve
from kltest.identify.instances import instances
from kltest.truth import gradient
from kltest.truth.gradients import credit_pairs


def by_enumeration(instance, t, s):
    """E_π[g_t u_s] as a sum over all rollouts, differentiated by autograd through nothing but log π of one token."""
    logits = torch.from_numpy(instance.policy.copy()).requires_grad_()
    paths = instance.paths
    both = paths.mask[:, t] & paths.mask[:, s]
    chances = np.exp(paths.log_probability(instance.policy))
    u = (instance.policy - instance.reference)[paths.contexts[:, s], paths.tokens[:, s]]
    weight = torch.from_numpy(np.where(both, chances * u, 0.0))
    score = logits.log_softmax(1)[torch.from_numpy(paths.contexts[:, t]), torch.from_numpy(paths.tokens[:, t])]
    return torch.autograd.grad((weight * score).sum(), logits)[0].numpy()


@pytest.mark.parametrize("environment", ["bandit", "sequence", "ragged", "mdp"])
@pytest.mark.parametrize("seed", [0, 1])
def test_pairs_equal_the_sum_over_rollouts(environment, seed):
    instance = instances(environment, seed)[0]
    pairs = credit_pairs(instance)
    assert set(pairs) == {(t, s) for t, s in itertools.product(range(instance.environment.horizon), repeat=2) if t <= s}
    for (t, s), part in pairs.items():
        # Sums of at most a few hundred terms of order one.
        np.testing.assert_allclose(part, by_enumeration(instance, t, s), atol=1e-14)
    whole = sum(pairs.values())
    np.testing.assert_allclose(whole, gradient("reverse_kl", instance), atol=1e-14)
    own = sum(part for (t, s), part in pairs.items() if t == s)
    np.testing.assert_allclose(own, gradient("local_reverse_kl", instance), atol=1e-14)


def test_solve_finds_all_coefficients_and_refuses_what_is_no_combination():
    drawn = instances("sequence", 0)
    columns = {name: [gradient(name, i) for i in drawn] for name in ("reverse_kl", "forward_kl", "entropy")}
    mixed = [2 * r - f + 0.25 * e for r, f, e in zip(*columns.values(), strict=True)]
    assert solve(mixed, columns) == pytest.approx({"reverse_kl": 2, "forward_kl": -1, "entropy": 0.25}, rel=1e-9)
    assert solve([gradient("chi_square", i) for i in drawn], columns) is None
    assert solve([*mixed[:-1], mixed[-1] + 1e-3], columns) is None
    again = {**columns, "twice": [2 * part for part in columns["reverse_kl"]]}
    assert solve(mixed, again) is None


def credited(factor):
    """A loss whose token t answers for the log-ratio of token s with `factor(t, s)`, for arrays of both."""

    def loss(logp, ref_logp, mask):
        live = mask.bool()
        log_ratio = torch.where(live, logp - ref_logp, 0.0).detach()
        steps = np.arange(mask.shape[1])
        earlier, later = np.meshgrid(steps, steps, indexing="ij")
        factors = np.triu(factor(earlier, np.maximum(earlier, later)) * 1.0)
        return (torch.where(live, logp, 0.0) * (log_ratio @ torch.from_numpy(factors).T)).sum(-1)

    return loss


@pytest.mark.parametrize(
    ("factor", "words"),
    first(
        1,
        [
            (lambda t, s: 0.8 ** (s - t), "0.8^k"),
            (lambda t, s: 0.8**s, "is credited with 0.8^t·0.8^k"),
            (lambda t, s: 0.8**t, "is credited with 0.8^t"),
            (lambda t, s: s - t <= 1, "credited with 1, 1, 0"),
            (lambda t, s: np.where(s == t, 1.0, 0.3), "every later log-ratio is credited with 0.3"),
            (lambda t, s: 1 / (1 + s - t), "1, 0.5, 0.3333"),
        ],
    ),
)
def test_every_pattern_is_read_from_the_gradient(factor, words):
    report = kltest.grade(credited(factor), environment="sequence,ragged,mdp")
    assert [check.code for check in report.failed if not check.code.startswith("KL8")] == ["KL205"]
    assert report.failed[0].message.count(words) == 3


@pytest.mark.parametrize(
    "factor", first(1, [lambda t, s: s == t, lambda t, s: np.ones(s.shape), lambda t, s: 0.9**t * (s == t)])
)
def test_full_credit_own_credit_and_weighted_own_credit_are_no_discount(factor):
    assert "KL205" not in {check.code for check in kltest.grade(credited(factor)).failed}


@pytest.mark.scheduled
def test_a_discount_shows_behind_prefix_ratios_too():
    def loss(logp, ref_logp, old_logp, mask):
        ratio = (logp - old_logp).where(mask != 0, 0.0).cumsum(-1).exp().detach()
        rest = ratio * (logp - ref_logp).detach().where(mask != 0, 0.0)
        for step in reversed(range(rest.shape[1] - 1)):
            rest[:, step] += 0.9 * rest[:, step + 1]
        return (rest * logp).where(mask != 0, 0.0)

    report = kltest.grade(loss)
    assert [check.code for check in report.failed if not check.code.startswith("KL8")] == ["KL205"]
    assert (
        "sequence (stale): the log-ratio k tokens after token t, counted from 0, is credited with 0.9^k"
        in report.failed[0].message
    )
