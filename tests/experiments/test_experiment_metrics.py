"""The metrics experiment: its numbers derived again, its claims able to fail, its parts apart."""

import numpy as np
import pytest
import torch
from trial import Trial

TRIAL = Trial("metrics")
(RUNS,) = TRIAL.modules("experiment")
SMALL = ("beta=0.1",)


@pytest.fixture(scope="module")
def rows():
    return TRIAL.computed(*SMALL)


def test_rewards_made_in_place_change_what_was_recorded():
    """Two rollouts by hand: −β·u at every token, the reward added to the last live one."""
    logged, lengths, reward = torch.tensor([[0.5, -1.0], [1.0, 0.0]]), torch.tensor([2, 1]), torch.tensor([2.0, 3.0])
    RUNS.token_rewards(logged, lengths, reward, 0.5)
    assert logged.tolist() == [[-0.25, 0.5 + 2.0], [-0.5 + 3.0, 0.0]]


@pytest.mark.scheduled
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
    objective = float((chances * (reward - 0.1 * u)).sum())
    assert first["objective"] == pytest.approx(objective, rel=1e-11)


@pytest.mark.scheduled
def test_claims_agree_and_each_can_fail(rows):
    TRIAL.may_lack_parts(rows)
    TRIAL.claims_can_fail(rows)
