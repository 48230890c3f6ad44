"""The off-policy experiment: its gradients and factors by hand, its claims able to fail, subsets not run."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from trial import Trial, row_of

from kltest.environments import Instance
from kltest.environments.policies import table
from kltest.truth import gradient, optimum, value

TRIAL = Trial("off-policy")
MODULE, STEP = TRIAL.modules("experiment", "step")
STALENESS = (0, 1, 4, 64)
RIGHT = ("k1-reward-sequence-ratio", "k1-reward-to-go-prefix-ratio")
NAMES = (
    *RIGHT,
    "k3-ratio",
    "k2-ratio-detached",
    "k3-ratio-detached",
    "k3-broadcast-ratio",
    "k1-reward",
    "k1-reward-stale",
)
CAPS = ("all", "none", "tis-sequence", "mis-sequence", "tis-geometric")
UPDATES = {"stale": (1, 6, 9), "none": (1, 16), "none-centred": (1, 16), "sequence": (1, 16), "token": (4,)}


def configurations():
    for length in (1, 3):
        for name in (*NAMES, "k1-reward-clipped-ratio"):
            for step in STALENESS:
                yield {"part": "path", "length": length, "staleness": step, "estimator": name, "seed": 1}
    yield {"part": "weights", "horizon": 300, "noise": 0.2, "seed": 0}
    for recipe, updates in UPDATES.items():
        for count in updates:
            for seed in (0, 1):
                yield {"part": "stability", "recipe": recipe, "updates": count, "learning_rate": 0.7, "seed": seed}
    for cap, tokens, off, seed in itertools.product(CAPS, (2, 4), (0.1, 0.8), range(4)):
        yield {"part": "caps", "cap": cap, "tokens": tokens, "off": off, "seed": seed}
    families = {"tree": (4,), "bigram": (10, 100), "mistakes": (10, 100)}
    for family, start, beta, seed in itertools.product(families, ("reference", "away"), (0.25, 1.0), (0, 1)):
        for tokens in families[family]:
            yield {"part": "step", "family": family, "tokens": tokens, "start": start, "beta": beta, "seed": seed}
    for recipe in ("none", "none-centred", "sequence", "stale"):
        for count in (1, 16):
            one = {"part": "training", "recipe": recipe, "inner_steps": count, "batch_size": 0, "steps": 192}
            yield {**one, "learning_rate": 0.7, "seed": 1}
    for count in (1, 16):
        one = {"part": "training", "recipe": "none-centred", "inner_steps": count, "batch_size": 32, "steps": 96}
        yield {**one, "learning_rate": 0.7, "seed": 1}


@pytest.fixture(scope="module")
def rows():
    return TRIAL.tidied(MODULE.BATCHING.batches(configurations()))


@pytest.mark.scheduled
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("step", [0, 64])
def test_bias_and_variance_by_plain_enumeration(rows, length, step):
    """Each estimator as weights on Σ_t g_t, written out again; g is a token's one-hot less the chances."""
    instance = MODULE.on_path(length, step, 1)
    paths = instance.paths
    policy, reference, sampler = (
        table[paths.contexts, paths.tokens] for table in (instance.policy, instance.reference, instance.sampler)
    )
    u, ratio = policy - reference, np.exp(policy - sampler)
    prefix, cost = ratio.cumprod(axis=1), u.sum(axis=1, keepdims=True)
    to_go = (prefix * u)[:, ::-1].cumsum(axis=1)[:, ::-1]
    clipped = np.where((ratio > 1.2) & (cost < 0) | (ratio < 0.8) & (cost > 0), 0.0, ratio)
    k3 = np.exp(-u) - 1 + u
    mean = prefix[:, -1:] ** (1 / length)
    weights = {
        "k1-reward": cost + 0 * u,
        "k1-reward-sequence-ratio": prefix[:, -1:] * cost + 0 * u,
        "k1-reward-to-go-prefix-ratio": to_go,
        "k1-reward-stale": prefix[:, -1:] * (sampler - reference).sum(axis=1, keepdims=True) + 0 * u,
        "k3-ratio": ratio * u,
        "k2-ratio-detached": ratio * u,
        "k3-ratio-detached": ratio * (1 - np.exp(-u)),
        "k3-broadcast-ratio": mean * (1 - np.exp(-u) + k3.sum(axis=1, keepdims=True) / length),
        "k1-reward-clipped-ratio": clipped * cost,
    }
    tokens = np.eye(3)[paths.tokens] - np.exp(instance.policy)[paths.contexts]
    chances = np.exp(sampler.sum(axis=1))

    def moments(weight, of):
        # A context occurs once in a rollout: squares add up over its tokens.
        table = np.zeros(instance.policy.shape)
        np.add.at(table, paths.contexts, of[:, None, None] * weight[:, :, None] * tokens)
        second = (of * ((weight[:, :, None] * tokens) ** 2).sum(axis=(1, 2))).sum()
        return table, second - (table**2).sum()

    truth, _ = moments(cost + 0 * u, np.exp(policy.sum(axis=1)))
    size = np.linalg.norm(truth)
    for name, weight in weights.items():
        gradient, variance = moments(weight, chances)
        row = row_of(rows, part="path", length=length, staleness=step, estimator=name)
        # Sums of 27 rollouts in float64; a bias of rounding alone is 1e-16.
        assert row["bias"] == pytest.approx(np.linalg.norm(gradient - truth) / size, rel=1e-9, abs=1e-13), name
        assert row["variance"] == pytest.approx(variance / size**2, rel=1e-9), name


def test_shares_of_independent_tokens_are_powers():
    """Where no context matters E_μ[ρ²] of a rollout is that of a token to the power of the length."""
    from kltest.environments import ngram

    logits = np.tile(np.random.default_rng(3).standard_normal(3), (4, 1))
    instance = Instance.of(ngram(3, 50), 0 * logits, 0 * logits, 0.3 * logits)
    square = float((1 / 9 / np.exp(instance.sampler[0])).sum())
    for row in MODULE.shares(instance):
        assert row["log_sequence_share"] == pytest.approx(-row["at"] * np.log(square), rel=1e-11)
        assert row["token_share"] == pytest.approx(1 / square, rel=1e-11)
        geometric = sum(square**-length for length in range(1, row["at"] + 1)) / row["at"]
        assert row["prefix_share"] == pytest.approx(geometric, rel=1e-11)


@pytest.mark.scheduled
def test_the_thresholds_by_the_hessian(rows):
    """J's Hessian at π* by differences of its values: an eigenvalue is −β·λ."""
    problem, beta = MODULE.problem(0), MODULE.TRAINED["beta"]
    best = optimum(problem.environment, problem.reference, beta).policy
    row = row_of(rows, part="stability", recipe="stale", updates=6, seed=0)
    shape = best.shape

    def objective(step):
        instance = Instance.of(problem.environment, best + step.reshape(shape), problem.reference)
        earned = problem.environment.expected_returns(instance.policy)[0]
        return earned - beta * value("reverse_kl", instance)

    h, size = 1e-3, best.size
    unit = np.eye(size) * h
    hessian = np.array(
        [
            [sum(a * b * objective(a * x + b * y) for a in (1, -1) for b in (1, -1)) / (4 * h * h) for y in unit]
            for x in unit
        ]
    )
    # Differences of fourth order in h.
    assert -np.linalg.eigvalsh(hessian)[0] / beta == pytest.approx(max(row["curvatures"]), rel=1e-5)
    assert row["multiplier"] < 1 < row_of(rows, part="stability", recipe="stale", updates=9, seed=0)["multiplier"]


WAYS = (*STEP.STALE, "to-go", "exact")
BETA = 0.7


def drawn(family, tokens, seed=0, *, fresh=False):
    """An environment of a family, with a policy and a sampler that are off by normal noise."""
    generator = np.random.default_rng(seed)
    environment, logits = STEP.FAMILIES[family](tokens, generator)
    policy, sampler = (logits + 0.5 * generator.standard_normal(logits.shape) for _ in range(2))
    return Instance.of(environment, policy, logits, policy if fresh else sampler)


def by_hand(instance, way):
    """(chance, P, S, B) of each rollout, the formulas of the module's docstring token by token."""
    p = np.exp(instance.policy)
    u, ratio = instance.policy - instance.reference, np.exp(instance.policy - instance.sampler)
    kl = (p * u).sum(axis=1)
    for contexts, tokens in zip(instance.paths.contexts, instance.paths.tokens, strict=True):
        steps = list(zip(contexts, tokens, strict=True))
        g = []
        for c, y in steps:
            g.append(np.zeros_like(p))
            g[-1][c] = np.eye(p.shape[1])[y] - p[c]
        rho, cost = [ratio[one] for one in steps], [u[one] for one in steps]
        w, exact, last = np.cumprod(rho), [kl[c] for c in contexts], len(steps)
        earned = sum(instance.environment.reward[one] for one in steps)
        whole = earned - BETA * sum(cost)
        score = {"token": rho, "prefix": w, "sequence": [w[-1]] * last}.get(way, [1.0] * last)
        charged, b = [whole * one for one in score], whole
        if way in ("prefix", "to-go"):
            w = w if way == "prefix" else np.ones(last)
            charged = [w[-1] * earned - BETA * sum(w[s] * cost[s] for s in range(t, last)) for t in range(last)]
        if way == "exact":
            charged, b = [earned - BETA * sum(exact[t + 1 :]) for t in range(last)], earned - BETA * sum(exact)
        total = sum(one * of for one, of in zip(charged, g, strict=True))
        if way == "exact":
            for c in contexts:
                total[c] -= BETA * p[c] * (u[c] - kl[c])
        chance = np.exp(sum(instance.sampler[one] for one in steps))
        yield chance, total.ravel(), sum(one * of for one, of in zip(score, g, strict=True)).ravel(), b


def of_batches(rollouts, n):
    """Mean and total variance of the gradient of n rollouts, by every batch."""
    mean, second = 0.0, 0.0
    for batch in itertools.product(rollouts, repeat=n):
        chance = np.prod([one[0] for one in batch])
        total = sum(one[3] for one in batch)
        found = sum(p - s * (total - b) / (n - 1) for _, p, s, b in batch) / n
        mean, second = mean + chance * found, second + chance * (found**2).sum()
    return mean, second - (mean**2).sum()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "tokens"), [("tree", 1), ("bigram", 3), ("mistakes", 3)])
def test_mean_and_variance_of_the_step_by_every_batch(way, family, tokens):
    """Batches of two and of three rollouts, each formula written out; sums of at most 729 terms in float64."""
    instance = drawn(family, tokens, fresh=way in ("to-go", "exact"))
    rollouts = list(by_hand(instance, way))
    found = STEP.enumerated(instance, way, BETA)
    for n in (2, 3):
        mean, variance = of_batches(rollouts, n)
        assert found.mean[0] == pytest.approx(mean, abs=1e-13)
        assert STEP.variance(found.noise, found.pairs, n)[0] == pytest.approx(variance, rel=1e-11)


def apart(one, other):
    """The largest relative difference of what a batch's error needs; gradients by their length."""
    length = lambda step: np.sqrt((step.mean**2).sum(axis=1))  # noqa: E731
    pairs = [(one.noise, other.noise), (one.pairs, other.pairs), (length(one), length(other))]
    return max(float(np.abs(a / b - 1).max()) for a, b in pairs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["bigram", "mistakes"])
def test_the_recursion_by_enumeration(way, family, monkeypatch):
    """Two routes at eight tokens; a recursion that forgets the ratio of its own token is seen."""
    fresh = way in ("to-go", "exact")
    instances = [drawn(family, 8, seed, fresh=fresh) for seed in (0, 1)]
    summed = [STEP.enumerated(one, way, BETA) for one in instances]
    found = STEP.recursed(instances, way, BETA)
    for place, one in enumerate(summed):
        own = STEP.Step(*(value[place : place + 1] for value in vars(found).values()))
        assert apart(own, one) < 1e-10  # sums of 256 terms that partly cancel
    if fresh or way == "none":
        return
    right = STEP.entries
    monkeypatch.setattr(
        STEP, "entries", lambda way, beta, r, u, ratio, *rest: right(way, beta, r, u, 1 + 0 * ratio, *rest)
    )
    assert apart(STEP.recursed(instances[:1], way, BETA), summed[0]) > 0.01


def test_long_rollouts_follow_the_truth_with_a_ratio_and_none_follows_another_gradient():
    """At a thousand tokens: the truth is a recursion of its own, in other coordinates."""
    for family in ("bigram", "mistakes"):
        instance = drawn(family, 1000)
        sampler = STEP.moved(instance.environment, instance.policy, instance.sampler - instance.policy)(0.1)
        instance = Instance(instance.environment, instance.policy, instance.reference, sampler)
        truth = gradient("expected_reward", instance) - BETA * gradient("reverse_kl", instance)
        own = Instance(instance.environment, instance.policy, instance.reference, instance.policy)
        wanted = STEP.recursed([own], "none", BETA).mean
        assert np.linalg.norm(wanted) == pytest.approx(np.linalg.norm(truth), rel=1e-9)
        for way in ("prefix", "sequence"):
            assert STEP.recursed([instance], way, BETA).mean == pytest.approx(wanted, rel=1e-8)
        assert np.linalg.norm(STEP.recursed([instance], "none", BETA).mean - wanted) > 1e-3 * np.linalg.norm(wanted)


def test_a_baseline_without_its_ratio_is_biased(monkeypatch):
    """Prefix ratios on reward and penalty, and the others' mean times the plain score: not the gradient any more."""
    instance = drawn("bigram", 4)
    truth = STEP.recursed([instance], "sequence", BETA).mean
    right = STEP.entries

    def without(way, *rest):
        made, p, _, b = right(way, *rest)
        plain, *_ = right("to-go", *rest[:3], 1 + 0 * rest[3], *rest[4:])
        made.matrices[..., made.at["S"], :] = 0
        made.matrices[..., made.at["S"], made.at["S"]] = np.eye(made.at["S"].stop - made.at["S"].start)
        made.matrices[..., made.at["S"], made.at[""]] = plain.matrices[..., plain.at["S"], plain.at["w"]]
        return made, p, "S", b

    assert STEP.recursed([instance], "prefix", BETA).mean == pytest.approx(truth, rel=1e-9)
    monkeypatch.setattr(STEP, "entries", without)
    off = STEP.recursed([instance], "prefix", BETA).mean - truth
    assert np.linalg.norm(off) > 0.05 * np.linalg.norm(truth)


def test_at_the_optimum_the_whole_return_has_no_noise_and_its_parts_have():
    """For any sampler and any ratio that multiplies the whole return less the baseline."""
    instance = drawn("tree", 3)
    best = optimum(instance.environment, instance.reference, BETA).policy
    instance = Instance(instance.environment, best, instance.reference, instance.sampler)
    size = (gradient("expected_reward", instance) ** 2).sum()
    for way in ("none", "token", "sequence"):
        found = STEP.enumerated(instance, way, BETA)
        assert max(found.noise[0], found.pairs[0], (found.mean**2).sum()) < 1e-12 * size  # differences of sums
    own = Instance(instance.environment, best, instance.reference, best)
    for way, one in (("prefix", instance), ("to-go", own), ("exact", own)):
        assert STEP.enumerated(one, way, BETA).noise[0] > 0.01 * size


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_on_the_way_to_the_optimum_the_step_is_a_share_of_that_of_the_reward(share):
    """At π ∝ ref·e^(λR/β) the step of every batch is 1 − λ times the reward's: noise by its square, for any sampler."""
    instance = drawn("tree", 3)
    policy = optimum(instance.environment, instance.reference, BETA / share).policy
    instance = Instance(instance.environment, policy, instance.reference, instance.sampler)
    for way in ("none", "token", "sequence"):
        step, reward = (STEP.enumerated(instance, way, beta) for beta in (BETA, 0.0))
        assert step.mean == pytest.approx((1 - share) * reward.mean, abs=1e-12)
        assert step.noise == pytest.approx((1 - share) ** 2 * reward.noise, rel=1e-9)
        assert step.pairs == pytest.approx((1 - share) ** 2 * reward.pairs, rel=1e-9)


def test_exact_kls_add_noise_where_a_slope_is_above_half_of_the_coefficient():
    """The law of the gradient and of the scalar: β·(2γ − β) times the noise of what expectations take away."""
    instance = drawn("tree", 3, 3, fresh=True)
    rows = {way: list(by_hand(instance, way)) for way in ("to-go", "exact")}
    chances = np.array([row[0] for row in rows["exact"]])
    b = STEP.enumerated(instance, "exact", BETA).b[0]
    steps = {way: np.array([p - s * b for _, p, s, _ in found]) for way, found in rows.items()}
    taken = (steps["exact"] - steps["to-go"]) / BETA
    gamma = (chances @ (taken * steps["exact"]).sum(axis=1)) / (chances @ (taken**2).sum(axis=1))
    noise = {way: chances @ ((one - chances @ one) ** 2).sum(axis=1) for way, one in steps.items()}
    law = BETA * (2 * gamma - BETA) * (chances @ (taken**2).sum(axis=1))
    assert noise["exact"] - noise["to-go"] == pytest.approx(law, rel=1e-10)
    returns = {way: np.array([row[3] for row in found]) for way, found in rows.items()}
    apart = (returns["exact"] - returns["to-go"]) / BETA
    slope = np.polyfit(apart, returns["exact"], 1, w=np.sqrt(chances))[0] / BETA
    found = {way: STEP.enumerated(instance, way, BETA) for way in STEP.FRESH}
    assert STEP._own(instance, found, 0, BETA)["slope"] == pytest.approx(slope, rel=1e-9)


def test_after_one_small_step_exact_kls_add_twice_the_squared_gradient():
    """2·β·η·‖∇E[R]‖² to the variance of R − β·ΣKL, to first order in the step η from the reference."""
    rate, instance = 1e-5, drawn("tree", 3)
    start = Instance(instance.environment, instance.reference, instance.reference, instance.reference)
    ahead = gradient("expected_reward", start)
    policy = table(start.policy + rate * ahead)
    moved = Instance(instance.environment, policy, instance.reference, policy)
    exact, plain = (STEP.enumerated(moved, way, BETA).spread[0] for way in ("exact", "none"))
    assert exact - plain == pytest.approx(2 * BETA * rate * (ahead**2).sum(), rel=1e-3)


def test_without_a_ratio_the_bias_is_a_third_cumulant_to_first_order():
    """−δ·E[h·g·(A − J)] for log μ = log π − δ·h, g the rollout's score: a difference of covariances of g and A."""
    own, size = drawn("bigram", 6, fresh=True), 1e-5
    change = np.array([[0.3, -0.2], [-0.5, 0.1]])
    change -= (np.exp(own.policy) * change).sum(axis=1, keepdims=True)
    instance = replace(own, sampler=table(own.policy - size * change))
    chances, _, g, returns = (np.array(column) for column in zip(*by_hand(own, "none"), strict=True))
    h = change[own.paths.contexts, own.paths.tokens].sum(axis=1)
    law = -size * (chances * h * (returns - chances @ returns)) @ g
    bias = (STEP.enumerated(instance, "none", BETA).mean - STEP.enumerated(own, "none", BETA).mean)[0]
    # The next order is linear in δ.
    assert np.linalg.norm(bias - law) < 1e-4 * np.linalg.norm(law)


def test_errors_are_equal_where_they_are_said_to_be():
    rows = [row for row in STEP.of_step("bigram", 10, "away", 0.25, 0) if row["drift"] != "none"]
    assert any(row["even"] > 2 for row in rows)
    for row in rows:
        others = lambda n, row=row: min(STEP.error(row, way, n) for way in ("none", "token"))  # noqa: E731
        if row["even"] > 2:
            assert STEP.error(row, "sequence", row["even"]) == pytest.approx(others(row["even"]), rel=1e-6)
        assert STEP.error(row, "sequence", 2 * row["even"]) < others(2 * row["even"])


def test_paths_start_at_the_reference_or_away_from_it_and_samplers_are_as_far_as_said():
    instance = drawn("mistakes", 20)
    for nats in STEP.NATS:
        sampler = STEP.moved(instance.environment, instance.policy, instance.sampler)(nats)
        assert value("to_sampler_kl", replace(instance, sampler=sampler)) == pytest.approx(nats, rel=1e-6)
    path = STEP.ascent(instance.environment, instance.reference, instance.reference, 0.5)
    best = optimum(instance.environment, instance.reference, 0.5)
    objective = lambda policy: (  # noqa: E731
        instance.environment.expected_returns(policy)[0]
        - 0.5 * value("reverse_kl", Instance(instance.environment, policy, instance.reference, policy))
    )
    gaps = [best.value - objective(policy) for policy in path]
    assert (np.diff(gaps) < 0).all()
    assert gaps[-1] < 0.1 * gaps[0]


@pytest.mark.scheduled
@pytest.mark.parametrize("part", ["path", "weights", "stability", "training", "step"])
def test_a_part_alone_is_no_error(rows, part):
    TRIAL.may_lack([row for row in rows if row["part"] == part])


@pytest.mark.scheduled
def test_claims_agree_and_each_can_fail(rows):
    assert TRIAL.agree(rows)
    TRIAL.claims_can_fail(rows)
