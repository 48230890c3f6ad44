"""The coefficients experiment: fixed points, frontier and noise by hand, and claims that can fail."""

import math
from itertools import product

import mpmath
import numpy as np
import pytest
from scipy.optimize import brentq
from trial import CHECKOUT, Trial
from weekly import first

from kltest.reproduce.experiment import compute_all

TRIAL = Trial("coefficients")
MODULE, ANALYSIS = TRIAL.modules("experiment", "claims")


def exact(estimator, beta, environment="bandit", **changed):
    one = {"part": "exact", "environment": environment, "estimator": estimator, "beta": beta, "seed": 0}
    return {**one, "steps": 900, "learning_rate": 2.0, **changed}


def bandit():
    """(V,) reference probabilities and rewards of the first bandit."""
    which = MODULE.problem("bandit", 0)
    return np.exp(which.reference[0]), which.environment.reward[0]


def optimal(beta):
    reference, reward = bandit()
    powers = reference * np.exp((reward - reward.max()) / beta)
    return powers / powers.sum()


@pytest.mark.parametrize("beta", [0.3, 1.0, 30.0])
def test_the_frontier_and_its_inverse_on_the_bandit(beta):
    """π* ∝ ref·e^(R/β); interpolation between twenty points a decade is good to far better than 1e-3."""
    reference, reward = bandit()
    best = optimal(beta)
    kl, earned = float(best @ np.log(best / reference)), float(best @ reward)
    curve = MODULE.frontier("bandit", 0)
    assert curve.at(beta) == pytest.approx((kl, earned), rel=1e-11)
    assert curve.same_kl(kl) == pytest.approx(beta, rel=1e-3)
    assert curve.same_kl(100.0) is None


def test_where_k3_in_the_loss_ends_on_the_bandit_and_what_it_costs():
    """π = β·ref/(λ − R) with the λ that sums to 1, by bisection; so R_max − E R = β·(1 − ref/π) of the best arm."""
    reference, reward = bandit()
    beta, top = 0.3, reward.argmax()
    level = brentq(lambda x: (beta * reference / (x - reward)).sum() - 1, reward.max() + 1e-12, reward.max() + 10)
    policy = beta * reference / (level - reward)
    ((row,),) = compute_all(CHECKOUT, "coefficients", [exact("k3-loss", beta)])
    assert row["kl"] == pytest.approx(float(policy @ np.log(policy / reference)), rel=1e-9)
    assert reward.max() - row["reward"] == pytest.approx(beta * (1 - reference[top] / policy[top]), rel=1e-9)
    assert row["kl_to_optimum"] == pytest.approx(float(policy @ np.log(policy / optimal(beta))), rel=1e-9)
    assert row["kl_to_predicted"] < 1e-20


@pytest.mark.parametrize("environment", MODULE.ANSWERS)
@pytest.mark.parametrize("seed", range(3))
def test_the_coefficient_of_k3_is_that_of_the_interpolated_frontier(environment, seed):
    """At a β where both can be had; the frontier's twenty points a decade are good to 1e-4."""
    policy = MODULE.predicted(environment, MODULE.ANSWERS[environment], 0.3, seed)
    by_curve = MODULE.frontier(environment, seed).same_kl(MODULE.measured(environment, seed, policy)[0])
    assert MODULE.coefficient(environment, seed, 0.3) == pytest.approx(by_curve, rel=1e-4)


@mpmath.workdps(1000)
def test_the_law_of_k3_for_small_coefficients_in_a_thousand_digits():
    """Both KLs as they are defined agree at the β' found; and it goes to its limit as fast as the terms left out.

    β·ref_v/Δ_v against e^(−Δ/β') give Δ/β' = log(1/β) + log(ref_2/(ref_*·Σ ref_v/Δ_v)) + O(1/log(1/β)).
    """
    reference, reward = (list(map(mpmath.mpf, values)) for values in bandit())
    (_, best), *others = sorted((max(reward) - one, r) for one, r in zip(reward, reference, strict=True))

    def missing(*policy):
        policy = [1 - mpmath.fsum(policy), *policy]
        kl = mpmath.fsum(p * mpmath.log(p / r) for p, (_, r) in zip(policy, [(0, best), *others], strict=True))
        return -mpmath.log(best) - kl

    left, limit = [], mpmath.log(others[0][1] / best / mpmath.fsum(r / gap for gap, r in others))
    for beta in (1e-4, 1e-64, 1e-256):
        level = beta * best
        for _ in range(300):  # λ less the largest reward; each time it is β² nearer
            level = beta * best / (1 - mpmath.fsum(beta * r / (level + gap) for gap, r in others))
        found = MODULE.coefficient("bandit", 0, beta)
        powers = [r / best * mpmath.exp(-gap / found) for gap, r in others]
        optimal = [power / (1 + mpmath.fsum(powers)) for power in powers]
        ended = [beta * r / (level + gap) for gap, r in others]
        # Δ/β' is up to 600, and in float64 1e-13 off.
        assert float(missing(*optimal) / missing(*ended)) == pytest.approx(1, abs=1e-9)
        log = mpmath.log(1 / mpmath.mpf(beta))
        left.append(float((others[0][0] / found - log - limit) * log))
    assert left[2] == pytest.approx(left[1], rel=0.05)
    (rows,) = compute_all(CHECKOUT, "coefficients", [{"part": "limit", "environment": "bandit", "seed": 0}])
    assert TRIAL.agree_where_run(rows)
    assert not TRIAL.agree_where_run([{**row, "law": row["law"] * math.sqrt(1.1)} for row in rows])
    assert MODULE.law("bandit", 0, 1e-64) == pytest.approx(float(others[0][0]) / math.log(1e64))


@pytest.mark.scheduled
def test_ends_in_the_mdp_whose_states_know_the_time():
    """The right one and the local one by a recursion of their own, both reached, and not the same."""
    which, beta = MODULE.problem("mdp", 0), 1.0
    environment = which.environment
    ((right,), (local,)) = compute_all(
        CHECKOUT, "coefficients", [exact(name, beta, "mdp") for name in ("k1-reward", "full-loss")]
    )
    for row, soft in ((right, True), (local, False)):
        value, divergence = np.zeros(environment.n_contexts), np.zeros(environment.n_contexts)
        for context in reversed(range(environment.n_contexts)):
            following, chance = environment.successors[context], environment.probabilities[context]
            onward = (np.where(following >= 0, value[following], 0.0) * chance).sum(axis=1)
            later = (np.where(following >= 0, divergence[following], 0.0) * chance).sum(axis=1)
            scores = environment.reward[context] + onward - (beta * later if soft else 0.0)
            policy = np.exp(which.reference[context] + scores / beta)
            policy /= policy.sum()
            value[context] = policy @ (environment.reward[context] + onward)
            divergence[context] = policy @ (np.log(policy) - which.reference[context] + later)
        assert row["kl"] == pytest.approx(divergence[0], rel=1e-8)
        assert row["reward"] == pytest.approx(value[0], rel=1e-8)
    assert right["coefficient_by_kl"] == pytest.approx(beta, rel=1e-3)
    assert abs(local["coefficient_by_kl"] / beta - 1) > 2e-3


@pytest.mark.parametrize("estimator", ["k1-reward", "k1-both", "rao-blackwell", "leave-one-out"])
@pytest.mark.parametrize("batch", [2, 3])
def test_the_noise_at_the_optimum_by_brute_force(estimator, batch):
    """Every ordered batch on the bandit, one update's ascent direction each."""
    reference, reward = bandit()
    beta = 0.7
    policy = optimal(beta)
    u, scores = np.log(policy / reference), np.eye(len(policy)) - policy
    truth = (policy * u) @ scores
    first, second = np.zeros(len(policy)), 0.0
    for arms in product(range(len(policy)), repeat=batch):
        chance, rows = policy[list(arms)].prod(), list(arms)
        earned = reward[rows] - (beta * u[rows] if estimator == "leave-one-out" else 0.0)
        advantage = (earned - earned.mean()) * batch / (batch - 1)
        penalty = {
            "k1-reward": u[rows, None] * scores[rows],
            "k1-both": (u[rows, None] + 1) * scores[rows],
            "rao-blackwell": np.tile(truth, (batch, 1)),
            "leave-one-out": np.zeros((batch, len(policy))),
        }[estimator]
        direction = (advantage[:, None] * scores[rows] - beta * penalty).mean(axis=0)
        first += chance * direction
        second += chance * direction @ direction
    # At π* the expected direction is zero, and all is noise.
    assert np.abs(first).max() < 1e-14
    assert MODULE.noise("bandit", estimator, beta, batch) == pytest.approx(batch * second, rel=1e-11, abs=1e-25)
    assert (second < 1e-25) == (estimator == "leave-one-out")


@pytest.mark.scheduled
def test_all_five_fixed_points_are_reached_and_apart():
    configurations = [{"part": "fixed-points", "estimator": name, "seed": 0} for name in MODULE.IN_FIXED_POINTS]
    rows = [row for found in compute_all(CHECKOUT, "coefficients", configurations) for row in found]
    assert all(row["kl_to_predicted"] < 1e-8 for row in rows)
    ends = {row["estimator"]: row["kl_to_optimum"] for row in rows}
    assert ends["k1-reward"] < 1e-12
    assert min(kl for name, kl in ends.items() if name not in ("k1-reward", "k2-loss-sequence")) > 1e-6
    claims = ANALYSIS.claims(ANALYSIS.tidy(rows))
    assert [claim.agrees for claim in claims[:5]] == [True] * 5
    astray = [{**row, "kl_to_predicted": 1e-4 if row["estimator"] == "k3-loss" else 0.0} for row in rows]
    assert [claim.agrees for claim in ANALYSIS.claims(astray)[:5]] == [True, True, False, True, True]


BETAS = (0.1, 1.0, 3.0, 100.0, 1000.0)
TOKENS = {"length-normalised": lambda beta: 1 / 3, "last-token": lambda beta: 0.1 / beta}
DRIFTS = dict.fromkeys((*MODULE.LOCAL, "k3-loss", "k3-loss-sequence"), lambda beta: 1 + 0.5 / (1 + beta))
EVERYWHERE = {
    **dict.fromkeys(("none", "k1-loss"), lambda beta: 0.01 / beta),
    **dict.fromkeys(("k2-reward", "k3-reward"), lambda beta: 0.1 / beta),
}
BANDIT = dict.fromkeys(("k3-loss", "k3-loss-sequence"), lambda beta: {0.1: 2.0, 1.0: 0.9, 3.0: 0.8}.get(beta, 1.0))


def made_up(estimator, environment, beta):
    """A row as exact training leaves it, the coefficient that holds the policy said by a rule of thumb."""
    rules = EVERYWHERE | (BANDIT if environment == "bandit" else TOKENS | DRIFTS)
    coefficient = beta * rules.get(estimator, lambda beta: 1.0)(beta)
    diverged = estimator == "k3-reward" and beta <= 3
    row = {
        "part": "exact",
        "environment": environment,
        "estimator": estimator,
        "beta": beta,
        "seed": 0,
        "shortfall": 0.0,
    }
    row |= {"kl": coefficient**-2, "gain": 1 / coefficient, "coefficient_by_kl": coefficient, "kl_to_predicted": 0.0}
    row |= {"predicted_kl": coefficient**-2, "predicted_coefficient": coefficient}
    return {**row, "diverged": diverged, "collapsed": diverged}


def made_up_rows():
    return [
        made_up(estimator, environment, beta)
        for estimator, environment, beta in product(MODULE.ESTIMATORS, ANALYSIS.ENVIRONMENTS, BETAS)
    ]


PLANTED = {
    # What is planted, and the words of the claim that it must refute.
    "regularise as asked, for every environment": lambda row: (
        row["estimator"] == "rao-blackwell" and row["environment"] == "mdp"
    ),
    "every loss whose weight is u": lambda row: row["estimator"] == "full-loss" and row["environment"] == "bandit",
    "divided by the length": lambda row: row["estimator"] == "length-normalised" and row["environment"] == "sequence",
    "regularise as asked at the largest": lambda row: row["estimator"] == "k3-loss" and row["environment"] == "mdp",
}


@pytest.mark.parametrize("words", first(1, PLANTED))
def test_a_planted_coefficient_refutes_its_claim(words):
    rows = made_up_rows()
    before = TRIAL.verdicts(rows)
    assert {claim for claim, agrees in before.items() if agrees is False} == set()
    changed = ("kl", "predicted_kl", "coefficient_by_kl", "predicted_coefficient")
    planted = [{**row, **{name: 1.5 * row[name] for name in changed}} if PLANTED[words](row) else row for row in rows]
    refuted = {claim for claim, agrees in TRIAL.verdicts(planted).items() if agrees is False}
    assert [claim for claim in refuted if words in claim], refuted


def test_an_end_elsewhere_than_predicted_is_not_called_right():
    rows = made_up_rows()
    for row in rows:
        if row["estimator"] == "k1-reward" and row["beta"] == 100:
            row["coefficient_by_kl"] *= 1.1
    assert ANALYSIS.held(rows, "mdp", "k1-reward").kind == "astray"
    assert False in TRIAL.verdicts(rows).values()


def test_a_collapse_refutes_that_there_are_none():
    rows = made_up_rows()
    rows[[row["estimator"] for row in rows].index("k1-reward")]["collapsed"] = True
    refuted = [claim for claim, agrees in TRIAL.verdicts(rows).items() if agrees is False]
    assert [claim.partition(" never ")[0] for claim in refuted] == [
        "what follows ∇KL, the local gradient or forward KL"
    ]


def settles(estimator, batch, bias, noise, found=1.0):
    row = {
        "part": "budget",
        "environment": "sequence",
        "estimator": estimator,
        "batch_size": batch,
        "learning_rate": 1.0,
    }
    kl = found * (bias + noise / (4 * batch))
    row |= {"seed": 0, "kl_to_optimum": kl, "at_end": kl, "standard_error": 0.0}
    return row | {"predicted_bias": bias, "noise": noise}


def test_where_a_biased_estimator_stops_being_nearer():
    """Noise 8/(4B) against bias .05 and noise 2/(4B): equal where 6/(4B) = .05, at B = 30."""
    sizes = (4, 8, 16, 32, 64, 128)
    rows = [settles("k1-both", size, 0.0, 8.0) for size in sizes] + [
        settles("k3-loss", size, 0.05, 2.0) for size in sizes
    ]
    found, foreseen = ANALYSIS.crossing(rows, "k3-loss", "k1-both")
    assert found == foreseen == pytest.approx(30, rel=0.02)  # the curves are chords between sizes, on logarithms
    nearer = "biased estimators end nearer"
    assert [agrees for claim, agrees in TRIAL.verdicts(rows).items() if claim.startswith(nearer)] == [True]
    swapped = [{**row, "kl_to_optimum": 1 / row["kl_to_optimum"]} for row in rows]
    assert [agrees for claim, agrees in TRIAL.verdicts(swapped).items() if claim.startswith(nearer)] == [False]
    doubled = [{**row, "kl_to_optimum": 2 * row["kl_to_optimum"]} for row in rows]
    formula = "where noisy training settles is known"
    assert [agrees for claim, agrees in TRIAL.verdicts(rows).items() if claim.startswith(formula)] == [True]
    assert [agrees for claim, agrees in TRIAL.verdicts(doubled).items() if claim.startswith(formula)] == [False]


def bounded(**changed):
    one = {"part": "bound", "environment": "late", "beta": 1.0, "seed": 0, **changed}
    ((row,),) = compute_all(CHECKOUT, "coefficients", [one])
    return row


def test_what_the_fixed_point_lacks_by_the_optimum_and_by_the_frontier():
    row, which = bounded(), MODULE.problem("late", 0)
    kl, reward = MODULE.measured("late", 0, MODULE.predicted("late", "k2-loss", 1.0, 0))
    best = MODULE.measured("late", 0, MODULE.best("late", 1.0, 0))
    assert row["objective"] == pytest.approx(best[1] - best[0] - reward + kl, rel=1e-10)
    floor = MODULE.measured("late", 0, which.reference)[1]
    assert row["gain"] == pytest.approx(best[1] - best[0] - floor, rel=1e-11)
    same = MODULE.measured("late", 0, MODULE.best("late", row["coefficient"], 0))
    assert same[0] == pytest.approx(kl, rel=1e-6)
    assert row["at_same_kl"] == pytest.approx(same[1] - reward, abs=1e-6)
    assert row["earned"] == pytest.approx(reward - floor, rel=1e-11)


def test_only_last_tokens_are_paid_and_of_the_sparse_rollouts_one():
    for label, paid in (("late", 27), ("sparse", 1)):
        which = MODULE.problem(label, 1)
        *_, last = which.environment.reachable()
        assert not which.environment.reward[~last].any()
        assert (which.environment.reward != 0).sum() == paid


REFUTED = {
    # What is planted, and the words of the claim that it must refute.
    "times what it lacks": {"bennett": 1e3},
    "Var(K)/2": {"second_order": 1.2},
    "at every β": {"at_same_kl": 100.0},
    "misses a share": {"at_same_kl": 100.0},
}


@pytest.mark.parametrize("words", REFUTED)
def test_a_planted_gap_refutes_its_claim(words):
    rows = [bounded(beta=beta) for beta in (0.1, 1.0, 3.0, 10.0)]
    own = {claim: agrees for claim, agrees in TRIAL.verdicts(rows).items() if agrees is not None}
    assert len(own) == 4
    assert all(own.values())
    planted = [{**row, **{name: row[name] * factor for name, factor in REFUTED[words].items()}} for row in rows]
    assert [claim for claim, agrees in TRIAL.verdicts(planted).items() if agrees is False and words in claim]


def test_a_bound_below_the_gap_is_refuted():
    rows = [{**row, "bennett": 0.999 * row["objective"]} for row in (bounded(),)]
    assert [claim for claim, agrees in TRIAL.verdicts(rows).items() if agrees is False and "Bennett" in claim]
