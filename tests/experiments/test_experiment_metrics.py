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


@pytest.mark.parametrize(
    ("words", "part", "change"),
    [
        ("made in place", "mutation", {"read": 1.0}),
        ("recorded before", "mutation", {"recorded": 1.0}),
        ("before the first update", "mutation", {"read": 0.0}),
        ("comparison of bits", "mutation", {"identical": True}),
        ("neither the gradient", "mutation", {"policy": None}),
        ("meets its target", "controller", {"kl": 0.3}),
        ("runs away", "controller", {"kl": 0.2}),
        ("by k2", "controller", {"kl": 0.2}),
        ("by k2", "controller", {"metric": 0.21}),
        ("by β·KL", "controller", {"kl": 0.2}),
        ("with the prefix ratio is", "reweighted", {"prefix ratio": 1.0}),
        ("with the token's ratio k3", "reweighted", {"token ratio, k3": 1.0}),
        ("it is not the KL", "reweighted", {"kl": 1.0, "no ratio": 1.0}),
        ("times an advantage", "reweighted", {"advantage": 1.0}),
        ("masked where rewards tie", "masked", {"closed_form_error": 1e-6}),
        ("in evaluation groups of", "masked", {"read": 0.1}),
        ("in groups of 2", "masked", {"read": 0.1}),
        ("in groups of 2", "masked", {"reference_success": 0.05}),
        ("averaged over padded", "padding", {"mean over zeros": 1.0}),
        ("reads the padding", "padding", {"mean over garbage": 1.0}),
        ("k1 and k3 have the KL", "logged", {"mean": 1.0}),
        ("k2 has not", "logged", {"mean": 1.0}),
        ("near the reference, KL below", "logged", {"std": 1.0}),
        ("and is noisier where", "logged", {"std": 1.0}),
        ("none of E", "logged", {"over_own_length": None}),
        ("it is E[Σu/L] + ", "logged", {"correction": 1.0}),
        ("no divergence: it comes", "logged", {"over_own_length": 1.0}),
    ],
)
def test_a_planted_result_is_told(rows, words, part, change):
    """None stands for what it should differ from: another policy, the KL per token."""

    def planted(row):
        if row["part"] != part:
            return row
        instead = str(row["copied"]) if part == "mutation" else row.get("kl_per_token")
        return {**row, **{name: instead if value is None else value for name, value in change.items()}}

    TRIAL.tells(rows, words, [planted(row) for row in rows])
