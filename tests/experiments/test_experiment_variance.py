"""The variance experiment: the pair by hand, recursions by rollouts, the floor, and wrong results called wrong."""

import itertools
import math

import numpy as np
import pytest
from trial import CHECKOUT, Trial, row_of

from kltest.environments import Instance, sequence
from kltest.truth import gradient

TRIAL = Trial("variance")
ascents = CHECKOUT.load("experiments", "paths").ascents
experiment, analysis = TRIAL.modules("experiment", "claims")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """All parts; of the bandit's training only what three claims need least: its start, and made-up ends."""
    found = TRIAL.computed(
        "part=pair,rates,ladder,mixtures,freedom,noise,budget,language,reward",
        "budgeted=100",
        "reference=0.1,0.25,0.5,0.9",
        "vocabulary=2,8",
        "length=2,6",
        "distance=0.1,3.0",
        "environments=1000",
        "compared=10",
        "lam=-0.5,0.0,1.0,2.0",
    )
    path = {"part": "bandit", "what": "path", "step": 0, "rule": "1", "rate": 5.0, "kl": 2.4302}
    return [*found, *_ends(), {**path, "low": 2.4302, "high": 2.4302}]


def _ends() -> list[dict]:
    """As published, so that claims about the bandit can be judged without 4,800 updates; one real run is below."""
    wanted = {5.0: (0.46, 0.47, 0.32, 0.325), 10.0: (4.5, 4.5, 0.29, 0.26), 20.0: (4.9, 4.9, 4.9, 0.30)}
    end = {"part": "bandit", "what": "end", "runs": 32, **analysis.STUDY}
    return [
        {**end, "run": run, "rule": rule, "rate": rate, "kl": kl}
        for rate, medians in wanted.items()
        for rule, kl in zip(("0", "value", "1", "gradient"), medians, strict=True)
        for run in range(32)
    ]


def test_the_published_pair_by_hand(rows):
    """Rao–Blackwell's value is a constant, and after a 1 also d = 0.98·log 99: variance d²/4."""
    row = row_of(rows, part="pair", reference=0.25)
    d = 0.98 * math.log(99)
    first = {0: math.log(0.5 / 0.25), 1: math.log(0.5 / 0.75)}
    values = [(0.5, first[0]), (0.5 * 0.99, first[1] + math.log(99)), (0.5 * 0.01, first[1] - math.log(99))]
    kl = sum(chance * value for chance, value in values)
    assert row["kl"] == pytest.approx(kl, rel=1e-12)
    assert row["kl"] == pytest.approx((first[0] + first[1]) / 2 + d / 2, rel=1e-12)
    assert row["rao_blackwell"] == pytest.approx(d**2 / 4, rel=1e-12)
    assert row["monte_carlo"] == pytest.approx(sum(p * (value - kl) ** 2 for p, value in values), rel=1e-12)
    assert (round(row["kl"], 5), round(row["monte_carlo"], 5), round(row["rao_blackwell"], 5)) == (
        2.39545,
        3.31591,
        5.06974,
    )


def test_the_best_mixture_is_least_along_the_line_between_the_two(rows):
    instance = experiment.published_pair(0.25)
    row = row_of(rows, part="pair", reference=0.25)
    u = instance.policy - instance.reference
    kl = (np.exp(instance.policy) * u).sum(axis=1)
    values, chances = [], []
    for first, second in itertools.product((0, 1), repeat=2):
        chances.append(math.exp(instance.policy[0, first] + instance.policy[1 + first, second]))
        values.append((u[0, first] + u[1 + first, second], kl[0] + kl[1 + first]))
    sampled, blackwell = np.array(values).T

    def variance(share: float) -> float:
        value = share * sampled + (1 - share) * blackwell
        return float(np.cov(value, aweights=chances, bias=True))

    assert variance(row["share"]) == pytest.approx(row["mixture"], rel=1e-12)
    assert all(variance(row["share"] + step) > row["mixture"] for step in (-0.01, 0.01))


def one_by_one(environments, environment: int, name: str) -> tuple[np.ndarray, float]:
    """Mean and total variance of a gradient, rollout by rollout, each formula written out in logits."""
    policy, reference = environments.tables(environment)
    instance = Instance.of(sequence(policy.shape[1], environments.length), policy, reference)
    p, u = np.exp(policy), policy - reference
    w, kl = np.exp(-u), (p * u).sum(axis=1)
    ahead = exact_ahead(instance, kl)
    each, chances = [], []
    for contexts, tokens in zip(instance.paths.contexts, instance.paths.tokens, strict=True):
        steps = list(zip(contexts, tokens, strict=True))
        total = np.zeros_like(p)
        for at, (c, y) in enumerate(steps):
            g = np.eye(p.shape[1])[y] - p[c]
            slope = p[c] * (u[c] - kl[c])
            k3 = [w[s] - 1 + u[s] for s in steps]
            onward = sum(p[c, v] * ahead[c, v] * (np.eye(p.shape[1])[v] - p[c]) for v in range(p.shape[1]))
            total[c] += {
                "return": g * sum(u[s] for s in steps),
                "to go": g * sum(u[s] for s in steps[at:]),
                "k3 in both": g * sum(k3) + (1 - w[c, y]) * g,
                "k3 in both, to go": g * sum(k3[at:]) + (1 - w[c, y]) * g,
                "rao-blackwell": slope + g * sum(kl[later] for later, _ in steps[at + 1 :]),
                "critic": slope + g * ahead[c, y],
                "bootstrapped": g * (u[c, y] + ahead[c, y]),
                # What is left to chance is which prefixes are visited: no better with gradients at those alone.
                "floor": slope + onward,
            }[name]
        each.append(total)
        chances.append(math.exp(sum(policy[s] for s in steps)))
    mean = sum(chance * one for chance, one in zip(chances, each, strict=True))
    return mean, sum(chance * ((one - mean) ** 2).sum() for chance, one in zip(chances, each, strict=True))


def exact_ahead(instance: Instance, kl: np.ndarray) -> np.ndarray:
    """(C, V) the expected KL of all prefixes that a token leads to."""
    following = instance.environment.successors[:, :, 0]
    ahead = np.zeros(following.shape)
    for _ in range(instance.environment.horizon):
        value = kl + (np.exp(instance.policy) * ahead).sum(axis=1)
        ahead = np.where(following >= 0, value[following], 0.0)
    return ahead


@pytest.fixture(scope="module")
def environments():
    return experiment.Environments.draw(2, 3, 3, 1.0, np.random.default_rng(1), 1.5)


@pytest.mark.parametrize(
    "name", ["return", "to go", "k3 in both", "k3 in both, to go", "rao-blackwell", "critic", "bootstrapped"]
)
def test_recursions_by_rollouts(environments, name):
    forms = {
        "return": lambda: experiment.sampled(environments, credit="return"),
        "to go": lambda: experiment.sampled(environments, credit="to-go"),
        "k3 in both": lambda: experiment.sampled(environments, 1.0, credit="return", both=True),
        "k3 in both, to go": lambda: experiment.sampled(environments, 1.0, credit="to-go", both=True),
        "rao-blackwell": lambda: experiment.rao_blackwell(environments),
        "critic": lambda: experiment.rao_blackwell(environments, critic=True),
        "bootstrapped": lambda: experiment.bootstrapped(environments),
    }
    form = forms[name]()
    for environment in range(2):
        mean, variance = one_by_one(environments, environment, name)
        policy, reference = environments.tables(environment)
        truth = gradient("reverse_kl", Instance.of(sequence(3, 3), policy, reference))
        # Sums of 27 terms of order one.
        np.testing.assert_allclose(mean, truth, atol=1e-13)
        assert environments.noise(form).variance[environment] == pytest.approx(variance, rel=1e-11)
        assert environments.squared_gradient(form)[environment] == pytest.approx((truth**2).sum(), rel=1e-11)


def test_the_floor_is_the_noise_of_knowing_everything_about_a_visited_prefix(environments):
    """It is reached, and it is Σ ‖G‖²/d − ‖G‖² with G the true gradient at a prefix that is visited with chance d."""
    noise = environments.noise(experiment.rao_blackwell(environments))
    for environment in range(2):
        _, variance = one_by_one(environments, environment, "floor")
        assert noise.visits[environment] == pytest.approx(variance, rel=1e-11)
        policy, reference = environments.tables(environment)
        instance = Instance.of(sequence(3, 3), policy, reference)
        truth = gradient("reverse_kl", instance)
        chance = np.zeros(len(policy))
        weights = instance.rollout_weights("current")
        np.add.at(chance, instance.paths.contexts, np.repeat(weights[:, None], 3, axis=1))
        floor = ((truth**2).sum(axis=1) / chance).sum() - (truth**2).sum()
        assert noise.visits[environment] == pytest.approx(floor, rel=1e-11)


@pytest.mark.parametrize("by_prefix", [True, False])
def test_the_best_baseline_is_where_any_other_is_worse(environments, by_prefix):
    from dataclasses import replace

    for form in (experiment.sampled(environments, credit="to-go"), experiment.rao_blackwell(environments)):
        best = environments.with_baseline(form, by_prefix=by_prefix)
        least = environments.noise(best).variance
        assert (least < environments.noise(form).variance).all()
        for step in (-0.01, 0.01):
            moved = replace(best, own=[own + step for own in best.own])
            assert (environments.noise(moved).variance > least).all()
            assert environments.squared_gradient(moved) == pytest.approx(environments.squared_gradient(form), rel=1e-11)


def test_to_go_and_return_are_alike_under_their_best_baselines_by_prefix(environments):
    noise = [
        environments.noise(
            environments.with_baseline(experiment.sampled(environments, credit=credit), by_prefix=True)
        ).variance
        for credit in ("to-go", "return")
    ]
    np.testing.assert_allclose(noise[0], noise[1], rtol=1e-11)


def test_a_mixture_is_no_noisier_than_its_parts_and_moving_its_weights_makes_it_so():
    generator = np.random.default_rng(2)
    weights = generator.dirichlet(np.ones(20))
    score = generator.standard_normal((20, 4))
    score -= weights @ score
    base = generator.standard_normal((20, 4))
    other = generator.standard_normal((20, 4))
    other += weights @ base - weights @ other
    variance, shares = experiment.mixture([base, other], score, weights)

    def noise(each: np.ndarray) -> float:
        return float(weights @ ((each - weights @ each) ** 2).sum(axis=1))

    def best(share: float) -> float:
        mixed = share * base + (1 - share) * other
        size = weights @ (score**2).sum(axis=1)
        return noise(mixed - (weights @ (mixed * score).sum(axis=1)) / size * score)

    assert shares.sum() == pytest.approx(1)
    assert variance == pytest.approx(best(shares[0]), rel=1e-10)
    assert variance < min(best(shares[0] + 0.05), best(shares[0] - 0.05), noise(base), noise(other))


def test_differences_of_unbiased_estimators_have_mean_zero_in_every_environment():
    """The predicted ones do: baselines, and for references that are seen at the sampled token alone, w − 1."""
    chances = np.array(experiment.CHANCES[3])
    for table in experiment._references():
        w = np.array(table) / experiment.FRACTIONS / chances
        assert chances @ (w - 1) == pytest.approx(0, abs=1e-15)
    assert {(row["dimension"], row["predicted"]) for row in experiment.counts()} == {
        (number, number) for number in (3, 39, 9, 26)
    }


def test_the_two_coefficients_by_hand():
    one = experiment.instance()
    p, u = np.exp(one.policy[0]), (one.policy - one.reference)[0]
    w = np.exp(-u)
    norms = ((np.eye(1000) - p) ** 2).sum(axis=1)
    found = experiment.coefficients()
    covariance = p @ ((u - p @ u) * (w - p @ w))
    assert found["value"] == pytest.approx(-covariance / (p @ (w - p @ w) ** 2), rel=1e-9)
    assert found["gradient"] == pytest.approx(1 + p @ (u * norms) / (p @ norms), rel=1e-9)
    assert p @ u == pytest.approx(2.43, abs=0.005)


@pytest.mark.parametrize("rule", ["1", "gradient"])
def test_training_is_the_updates_written_out(rule):
    """Same uniforms, chosen by the same cumulative chances; the gradient (u + 1 − λ)(e_y − π) in plain numpy."""
    found = experiment.training({"rule": rule, "rate": 5.0, "steps": 20, "batch_size": 16, "runs": 2})
    reference, start = (table[0] for table in experiment.tables())
    reference = reference - np.logaddexp.reduce(reference)
    for run in range(2):
        generator = np.random.default_rng(run)
        logits = start.copy()
        for _ in range(20):
            log_p = logits - np.logaddexp.reduce(logits)
            p, u = np.exp(log_p), log_p - reference
            norms = 1 - 2 * p + (p**2).sum()
            lam = 1.0 if rule == "1" else 1 + p @ (u * norms) / (p @ norms)
            arms = np.searchsorted(p.cumsum()[:-1], generator.random(16), side="right")
            push = np.bincount(arms, (u[arms] + 1 - lam) / 16, 1000)
            logits = logits - 5.0 * (push - p * push.sum())
        log_p = logits - np.logaddexp.reduce(logits)
        (end,) = (row["kl"] for row in found if row["what"] == "end" and row["run"] == run)
        assert end == pytest.approx(np.exp(log_p) @ (log_p - reference), rel=1e-8)


def of_rule(environments, environment: int, exact: dict[int, float]) -> np.ndarray:
    """Variances of value, token-level gradient and gradient rollout by rollout; `exact` is c by context."""
    policy, reference = environments.tables(environment)
    instance = Instance.of(sequence(policy.shape[1], environments.length), policy, reference)
    p, u = np.exp(policy), policy - reference
    kl = (p * u).sum(axis=1)
    chances, found = [], []
    for contexts, tokens in zip(instance.paths.contexts, instance.paths.tokens, strict=True):
        cost = [exact[c] * kl[c] + (1 - exact[c]) * u[c, y] for c, y in zip(contexts, tokens, strict=True)]
        local, whole = np.zeros_like(p), np.zeros_like(p)
        for at, (c, y) in enumerate(zip(contexts, tokens, strict=True)):
            g = np.eye(p.shape[1])[y] - p[c]
            local[c] = exact[c] * p[c] * (u[c] - kl[c]) + (1 - exact[c]) * u[c, y] * g
            whole[c] = local[c] + g * sum(cost[at + 1 :])
        chances.append(math.exp(policy[contexts, tokens].sum()))
        found.append([np.array([sum(cost)]), local.ravel(), whole.ravel()])
    totals = []
    for part in zip(*found, strict=True):
        mean = sum(chance * one for chance, one in zip(chances, part, strict=True))
        totals.append(sum(chance * ((one - mean) ** 2).sum() for chance, one in zip(chances, part, strict=True)))
    return np.array(totals)


@pytest.mark.parametrize("rule", ["nowhere", "everywhere", "random", "threshold"])
def test_variances_are_linear_in_the_rule(environments, rule):
    """By recursion, by enumeration, and by a loop over rollouts with each formula written out."""
    of_value = experiment.gains(environments)["value"]
    generator = np.random.default_rng(3)
    exact = {
        "nowhere": [np.zeros_like(level) for level in of_value],
        "everywhere": [np.ones_like(level) for level in of_value],
        "random": [generator.integers(0, 2, level.shape).astype(float) for level in of_value],
        "threshold": experiment.threshold(of_value),
    }[rule]
    for environment in range(2):
        by_loop = of_rule(environments, environment, dict(enumerate(np.concatenate([c[environment] for c in exact]))))
        assert experiment.variances(environments, environment, exact) == pytest.approx(by_loop, rel=1e-11)
        assert experiment.predicted(environments, environment, exact) == pytest.approx(by_loop, rel=1e-11)


def test_no_choice_of_prefixes_is_less_noisy_than_the_threshold():
    """All 2⁷ choices in an environment with negative gains."""
    environments = experiment.Environments.draw(1, 2, 3, 10.0, np.random.default_rng(8), 4.0)
    gains = experiment.gains(environments)
    assert min(level.min() for level in gains["value"]) < 0
    sizes = [level.shape[1] for level in environments.kl]
    least = np.inf
    for bits in itertools.product((0.0, 1.0), repeat=sum(sizes)):
        exact = np.split(np.array(bits)[None], np.cumsum(sizes)[:-1], axis=1)
        least = np.minimum(least, experiment.variances(environments, 0, exact))
    for at, gain in enumerate(gains.values()):
        assert experiment.variances(environments, 0, experiment.threshold(gain))[at] == pytest.approx(
            least[at], rel=1e-10
        )


def test_a_rule_that_sees_the_token_is_biased_by_its_covariance():
    """One decision of three tokens: exact where |u| is largest, a token of chance 0.2, for half of its visits."""
    policy, reference = np.log([[[0.2, 0.3, 0.5]]]), np.log([[[0.02, 0.38, 0.6]]])
    environments = experiment.Environments([policy], [reference])
    u, p = (policy - reference)[0, 0], np.exp(policy)[0, 0]
    kl = p @ u
    assert experiment.biased(environments, 0.1)[0] == pytest.approx(0.1 * (kl - u[0]) / kl, rel=1e-12)


def test_variances_with_a_reward_by_a_loop_over_rollouts():
    """The objective and its gradient, each formula written out in logits."""
    logits, (problem, *_) = experiment._paths("reference", 0)
    (row, *_) = experiment.of_path({"start": "reference", "made": 16, "seed": 0})
    instance, beta = Instance.of(problem.environment, logits[16, 0], problem.reference), experiment.PATHS["beta"]
    p, u = np.exp(instance.policy), instance.policy - instance.reference
    kl = (p * u).sum(axis=1)
    chances, values, gradients, scores = [], ([], []), ([], []), []
    for contexts, tokens in zip(instance.paths.contexts, instance.paths.tokens, strict=True):
        steps = list(zip(contexts, tokens, strict=True))
        earned = sum(problem.environment.reward[step] for step in steps)
        chances.append(math.exp(sum(instance.policy[step] for step in steps)))
        score, sampled, exact = (np.zeros_like(p) for _ in range(3))
        for at, (c, y) in enumerate(steps):
            g = np.eye(p.shape[1])[y] - p[c]
            score[c] = g
            sampled[c] = g * (earned - beta * sum(u[step] for step in steps[at:]))
            exact[c] = g * (earned - beta * sum(kl[later] for later, _ in steps[at + 1 :])) - beta * p[c] * (
                u[c] - kl[c]
            )
        scores.append(score.ravel())
        for kept, one in zip(gradients, (sampled, exact), strict=True):
            kept.append(one.ravel())
        for kept, cost in zip(values, (sum(u[step] for step in steps), sum(kl[c] for c in contexts)), strict=True):
            kept.append([earned - beta * cost])
    chances, scores = np.array(chances), np.array(scores)

    def noise(each) -> float:
        return float(chances @ ((each - chances @ each) ** 2).sum(axis=1))

    def least(each) -> float:
        best, *_ = np.linalg.lstsq(
            (np.sqrt(chances)[:, None] * scores).reshape(-1, 1), (np.sqrt(chances)[:, None] * each).ravel(), rcond=None
        )
        return noise(each - best * scores)

    for name, measure, pair in (("value", noise, values), ("gradient", least, gradients)):
        sampled, exact = (measure(np.array(one)) for one in pair)
        assert row[name] == pytest.approx(exact / sampled, rel=1e-9)


def test_after_one_small_step_exact_kls_add_twice_the_squared_gradient():
    """2·β·η·‖∇E[R]‖² to the objective's variance, to first order in the step η."""
    rate, beta = 1e-5, experiment.PATHS["beta"]
    _, problems = experiment._paths("reference", 0)
    problem = problems[1]
    (_, after) = ascents([problem], 1, beta=beta, learning_rate=rate)[:, 0]
    instance = Instance.of(problem.environment, after, problem.reference)
    reward = problem.environment.returns(instance.paths)
    weights = instance.rollout_weights("current")
    row = experiment._ratios(problem, after)
    added = (row["value"] - 1) * (weights @ (reward - weights @ reward) ** 2)
    size = (gradient("expected_reward", instance) ** 2).sum()
    assert added == pytest.approx(2 * beta * rate * size, rel=1e-3)


def test_the_record_is_consistent():
    """Exact KLs everywhere remove what the two variances differ by; shares of a positive gain grow with the budget."""
    rows = experiment.recorded()
    seeds = sorted({row["seed"] for row in rows})
    assert seeds == list(range(len(seeds)))
    for seed in seeds:
        mine = [row for row in rows if row["seed"] == seed]
        last = max((row for row in mine if row["what"] == "training"), key=lambda row: row["update"])
        everywhere = row_of(mine, what="value", rule="variance", share=1.0)["removed"]
        # Two estimates from the same rollouts: the covariance is a mean in one of them.
        assert everywhere == pytest.approx(1 - last["exact"] / last["sampled"], abs=0.06)
        assert row_of(mine, what="logits", rule="entropy", share=1.0)["removed"] == 1
        for rule in ("variance", "entropy"):
            shares = [row["removed"] for row in mine if row["what"] == "logits" and row["rule"] == rule]
            assert shares == sorted(shares)
            assert shares[0] > 0


def test_claims_agree_and_each_can_fail(rows):
    assert TRIAL.agree(rows)
    TRIAL.claims_can_fail(rows)
