"""Sampled training: its mean is the exact gradient, its draws are each run's own, and numpy ends at the same logits."""

import numpy as np
import pytest
from training_problems import problem
from weekly import first, spread

from kltest.environments import bandit
from kltest.environments.policies import table
from kltest.training import Problem, Run, train

ENVIRONMENTS = ("bandit", "prompts", "many arms", "sequence", "ragged", "mdp")


def numpy_run(run: Run, steps: int, batch: int, group: int | None = None) -> np.ndarray:
    """The logits of one run, rollout by rollout, from the same uniforms: token k2 as a loss, leave-one-out baseline."""
    environment, logits = run.problem.environment, run.problem.start.copy()
    reference, horizon = run.problem.log_reference, environment.horizon
    generator = np.random.default_rng(run.seed)
    for _ in range(steps):
        log_policy = table(logits)
        several, branching = len(environment.prompts) > 1, environment.branches > 1
        for_prompts = generator.random(batch) if several else np.zeros(batch)
        for_steps = [generator.random(batch) for _ in range(horizon + (horizon - 1) * branching)]
        paths, earned, prompts = [], np.zeros(batch), np.zeros(batch, dtype=int)
        for row in range(batch):
            uniform = for_prompts[row - row % group if group else row]
            prompts[row] = np.searchsorted(environment.prompts.cumsum()[:-1], uniform, side="right")
            context, path = int(environment.start[prompts[row]]), []
            for step in range(horizon):
                draw = for_steps[step * (1 + branching)][row]
                token = int(np.searchsorted(np.exp(log_policy[context]).cumsum()[:-1], draw, side="right"))
                path.append((context, token))
                earned[row] += environment.reward[context, token]
                if step == horizon - 1:
                    break
                arrivals = environment.probabilities[context, token].cumsum()[:-1]
                where = np.searchsorted(arrivals, for_steps[2 * step + 1][row], side="right") if branching else 0
                context = int(environment.successors[context, token, where])
                if context < 0:
                    break
            paths.append(path)
        member = np.arange(batch) // group if group else prompts
        gradient = np.zeros_like(logits)
        for row, path in enumerate(paths):
            others = [other for other in range(batch) if member[other] == member[row] and other != row]
            advantage = earned[row] - (earned[others].mean() if others else 0.0)
            for context, token in path:
                weight = advantage - run.beta * (log_policy[context, token] - reference[context, token])
                score = -np.exp(log_policy[context])
                score[token] += 1
                gradient[context] += weight * score / batch
        logits = logits + run.learning_rate * gradient
    return logits


@pytest.mark.parametrize("group", spread(4, [None, 4]))
@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_plain_numpy_ends_at_the_same_logits(environment, group):
    runs = [Run(problem(environment, seed), "k2-loss", beta=0.3, learning_rate=0.5, seed=seed) for seed in range(2)]
    ended = train(runs, steps=12, batch_size=8, group_size=group, optima=False).logits
    for run, logits in zip(runs, ended, strict=True):
        # Rounding of 1e-16 an update, carried along by a few dozen of order 1.
        assert np.abs(logits - numpy_run(run, 12, 8, group)).max() < 1e-11


ESTIMATORS = ("k2-loss", "k1-reward", "k3-loss", "full-loss", "group-mean", "group-std", "rao-blackwell", None)


@pytest.mark.parametrize(
    "settings", first(1, [{"batch_size": 8, "group_size": 4}, {"batch_size": 8}, {"batch_size": None}])
)
@pytest.mark.parametrize("environment", spread(2, ENVIRONMENTS))
def test_a_run_ends_at_the_same_bits_in_any_company(environment, settings):
    runs = [
        Run(problem(environment, seed % 3), ESTIMATORS[seed % 8], beta=0.1 + seed % 5, learning_rate=0.1, seed=seed)
        for seed in range(56 if environment != "many arms" else 16)
    ]
    options = {"steps": 4, "record": 2, "inner_steps": 2, "ratio": "token", **settings}
    together = train(runs, **options)
    same_bits(together, list(range(len(runs))), train(runs, chunk=3, **options))
    picked = [5, 13, 2, 0, 9, 8, 1]
    same_bits(together, picked, train([runs[row] for row in picked], **options))
    for row in (0, 3, 7, 11):
        same_bits(together, [row], train([runs[row]], **options))


def test_a_thousand_runs_are_each_as_if_alone():
    runs = [Run(problem("sequence", seed % 7), "k3-loss", learning_rate=0.3, seed=seed) for seed in range(1000)]
    together = train(runs, steps=3, batch_size=5)
    for row in (0, 499, 998, 999):
        same_bits(together, [row], train([runs[row]], steps=3, batch_size=5))


def same_bits(together, rows, other):
    assert np.array_equal(together.logits[rows], other.logits)
    for name in ("reward", "kl", "entropy", "kl_to_optimum", "gap", "gradient_norm", "logged"):
        assert np.array_equal(getattr(together, name)[:, rows], getattr(other, name), equal_nan=True), name


def test_a_seed_is_a_run_of_its_own():
    runs = [Run(problem("sequence"), "k2-loss", seed=seed) for seed in (0, 0, 1)]
    logits = train(runs, steps=2, batch_size=4).logits
    assert np.array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], logits[2])


@pytest.mark.parametrize("name", spread(6, ["k2-loss", "k1-reward-to-go", "full-loss", "leave-one-out"]))
@pytest.mark.parametrize("environment", ["bandit", "prompts", "sequence", "ragged", "mdp"])
def test_the_mean_of_sampled_gradients_is_the_exact_one(environment, name):
    assert_unbiased(environment, name)


def assert_unbiased(environment, name, beta=0.5):
    """Each coordinate within 5 standard errors of 2,000 seeds: chance alone does that once in 10⁶ coordinates.

    Exact groups are single rollouts, without a baseline for the cost: the mean must not depend on that.
    """
    which, seeds = problem(environment), 2000
    runs = [Run(which, name, beta=beta, seed=seed) for seed in range(seeds)]
    moved = train(runs, steps=1, batch_size=4, group_size=4, optima=False).logits - which.start
    alone = "k1-reward" if name == "group-mean" else name
    expected = train([Run(which, alone, beta=beta)], steps=1, optima=False).logits[0] - which.start
    error = moved.std(axis=0) / np.sqrt(seeds)
    assert (np.abs(moved.mean(axis=0) - expected) <= 5 * error + 1e-12).all()


def test_a_biased_gradient_is_seen():
    with pytest.raises(AssertionError):
        assert_unbiased("sequence", "group-mean", beta=5.0)


def test_a_run_that_explodes_is_stopped_and_leaves_the_others_alone():
    start, beyond = np.zeros((1, 4)), np.array([[0.0, 0.0, 0.0, -800.0]])
    overflowing = Run(Problem(bandit(4), start, beyond), "k3-inverted", beta=1.0)  # e^u is infinite there
    wild = Run(problem("bandit"), "k3-inverted", beta=1.0, learning_rate=1e9)
    tame = Run(problem("bandit"), "k3-inverted", beta=1.0, learning_rate=0.1)
    history = train([wild, tame, overflowing], steps=5, batch_size=32, record=1)
    assert history.diverged.tolist() == [1, -1, 1]
    assert np.array_equal(history.logits[0], problem("bandit").start)
    assert np.array_equal(history.logits[2], start)
    assert np.isfinite(history.reward).all()
    assert np.array_equal(history.logits[1], train([tame], steps=5, batch_size=32).logits[0])


def test_functions_of_ones_own_are_called_as_they_ask():
    def rows(logp, ref_logp):
        return (logp - ref_logp).square() / 2

    def whole_batch(logp, ref_logp):
        return rows(logp, ref_logp).sum(dim=1).mean(), {"kl": (logp - ref_logp).sum(dim=1).mean()}

    def coupled(logp, ref_logp):
        k2 = rows(logp, ref_logp)
        return k2 * (1 + k2.detach().mean())

    runs = [Run(problem("sequence"), name, seed=3, beta=0.3) for name in ("k2-loss", rows, whole_batch)]
    history = train(runs, steps=3, batch_size=4)
    assert np.abs(history.logits - history.logits[0]).max() < 1e-13
    assert np.isfinite(history.logged).all()
    # Coupled rows of several runs must not meet.
    each = [Run(problem("sequence"), coupled, seed=seed) for seed in range(3)]
    same_bits(train(each, steps=3, batch_size=4), [1], train([each[1]], steps=3, batch_size=4))


def test_options_of_each_run():
    which = problem("bandit")
    lams = (0.0, 0.5, 1.0)
    runs = [Run(which, "lambda-baseline", seed=4, options={"lam": lam}) for lam in lams]
    ended = train(runs, steps=5, batch_size=8)
    for number, run in enumerate(runs):
        same_bits(ended, [number], train([run], steps=5, batch_size=8))
    assert np.abs(ended.logits[0] - ended.logits[2]).max() > 1e-3


@pytest.mark.scheduled
def test_the_baseline_study_of_the_lambda_family():
    """Aribandi 2026, at learning rate 5: median KL .46 for λ = 0 and .32 for λ = 1, to ±.05, start 2.43."""
    generator = np.random.default_rng(0)
    reference = generator.normal(0, 1.5, 1000)
    start = reference + generator.normal(0, 2.5, 1000)
    which = Problem(bandit(1000), start[None], reference[None])
    runs = [
        Run(which, "lambda-baseline", beta=1.0, learning_rate=5.0, seed=seed, options={"lam": lam})
        for lam in (0.0, 1.0)
        for seed in range(32)
    ]
    history = train(runs, steps=400, batch_size=16, optima=False)
    assert history.kl[0, 0] == pytest.approx(2.43, abs=0.005)
    medians = np.median(history.kl[-1].reshape(2, 32), axis=1)
    assert medians == pytest.approx([0.46, 0.32], abs=0.05)
