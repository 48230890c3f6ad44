"""The metrics experiment: its numbers derived again, its claims able to fail, its parts apart."""

import itertools
import math

import numpy as np
import pytest
import torch
from trial import Trial, row_of

TRIAL = Trial("metrics")
(RUNS,) = TRIAL.modules("runs")
SMALL = ("beta=0.1", "staleness=0.5,3.0", "group_size=1,2,4", "success=0.1,0.5,0.8", "padded_length=4,9")


@pytest.fixture(scope="module")
def rows():
    return TRIAL.computed(*SMALL)


def test_claims_agree_and_those_without_rows_are_not_run(rows):
    TRIAL.may_lack_parts(rows)


def test_rewards_made_in_place_change_what_was_recorded():
    """Two rollouts by hand: −β·u at every token, the reward added to the last live one."""
    logp, ref_logp = torch.tensor([[-1.0, -2.0], [-0.5, 9.0]]), torch.tensor([[-1.5, -1.0], [-1.5, -9.0]])
    mask, reward = torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([2.0, 3.0])
    shaped = [[-0.25, 0.5 + 2.0], [-0.5 + 3.0, 0.0]]
    for copied, read in ((True, [[0.5, -1.0], [1.0, 0.0]]), (False, shaped)):
        found, metrics = RUNS.token_rewards(logp, ref_logp, mask, reward, 0.5, copied)
        assert found.tolist() == shaped
        assert metrics["kl"].tolist() == read


def test_the_run_is_gradient_ascent_on_the_objective(rows):
    """One step of plain ascent on E[R] − β·KL by autograd over all rollouts gives the KL after it."""
    problem = RUNS.problem_of(0)
    environment = problem.environment
    paths = environment.enumerate()
    contexts, tokens, live = (torch.from_numpy(part) for part in (paths.contexts, paths.tokens, paths.mask))
    reference = torch.from_numpy(problem.log_reference)
    reward = torch.from_numpy(environment.returns(paths))

    def parts(logits):
        logp = logits.log_softmax(-1)[contexts, tokens].where(live, 0.0).sum(dim=1)
        u = logp - reference[contexts, tokens].where(live, 0.0).sum(dim=1)
        return logp.exp(), u

    logits = torch.from_numpy(np.array(problem.start, dtype=float)).requires_grad_()
    chances, u = parts(logits)
    (chances * (reward - 0.1 * u)).sum().backward()
    with torch.no_grad():
        chances, u = parts(logits + logits.grad)
    first = next(row for row in rows if row["part"] == "mutation" and row["step"] == 1)
    # Float64, by two routes.
    assert first["kl"] == pytest.approx(float((chances * u).sum()), rel=1e-11)
    assert first["reward"] == pytest.approx(float((chances * reward).sum()), rel=1e-11)


@pytest.mark.parametrize("size", [2, 4])
def test_masked_metrics_by_brute_force(rows, size):
    """Every ordered group of the two kinds of answers; the wrong ones keep their proportions, so log-ratios are two."""
    right, reference = 0.1, 0.5
    chance = {True: right, False: 1 - right}
    u = {True: math.log(right / reference), False: math.log((1 - right) / (1 - reference))}
    read = sum(
        math.prod(chance[one] for one in group) * sum(u[one] for one in group) / size
        for group in itertools.product((True, False), repeat=size)
        if len(set(group)) > 1
    )
    row = row_of(rows, part="masked", group_size=size, success=right)
    assert row["read"] == pytest.approx(read, rel=1e-11)
    assert row["kl"] == pytest.approx(sum(chance[one] * u[one] for one in u), rel=1e-11)
    assert read < 0


def test_each_claim_can_fail(rows):
    TRIAL.claims_can_fail(rows)
