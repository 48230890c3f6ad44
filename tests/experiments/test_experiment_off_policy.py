"""The off-policy experiment: its gradients and factors by hand, its claims able to fail, subsets not run."""

import itertools

import numpy as np
import pytest
from trial import Trial, row_of

TRIAL = Trial("off-policy")
(MODULE,) = TRIAL.modules("experiment")
STALENESS = (0, 1, 4, 64)
COMPARED = ("k1-reward-sequence-ratio", "k1-reward-to-go-prefix-ratio", "k3-ratio")
NAMES = (*COMPARED, "k2-ratio-detached", "k3-ratio-detached", "k3-broadcast-ratio", "k1-reward", "k1-reward-stale")
CAPS = ("all", "none", "tis-sequence", "mis-sequence", "tis-geometric")
UPDATES = {"stale": (1, 6, 9), "none": (1, 16), "none-centred": (1, 16), "sequence": (1, 16), "token": (4,)}


def configurations():
    for length in (1, 3):
        for name in (*NAMES, "k1-reward-clipped-ratio"):
            for step in STALENESS:
                yield {"part": "path", "length": length, "staleness": step, "estimator": name, "seed": 1}
    for name in COMPARED:
        for tokens in (1, 2, 10):
            yield {"part": "length", "tokens": tokens, "compared": name, "seed": 0}
    yield {"part": "weights", "horizon": 300, "noise": 0.2, "seed": 0}
    for recipe, updates in UPDATES.items():
        for count in updates:
            for seed in (0, 1):
                yield {"part": "stability", "recipe": recipe, "updates": count, "learning_rate": 0.7, "seed": seed}
    for cap, tokens, off, seed in itertools.product(CAPS, (2, 4), (0.1, 0.8), range(4)):
        yield {"part": "caps", "cap": cap, "tokens": tokens, "off": off, "seed": seed}
    for start, made, age in itertools.product(("reference", "away"), (16, 64), (1, 4, 16)):
        yield {"part": "age", "start": start, "tokens": 3, "made": made, "age": age, "seed": 0}
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
    from kltest.environments import Instance, ngram

    logits = np.tile(np.random.default_rng(3).standard_normal(3), (4, 1))
    instance = Instance.of(ngram(3, 50), 0 * logits, 0 * logits, 0.3 * logits)
    square = float((1 / 9 / np.exp(instance.sampler[0])).sum())
    for row in MODULE.shares(instance):
        assert row["log_sequence_share"] == pytest.approx(-row["at"] * np.log(square), rel=1e-11)
        assert row["token_share"] == pytest.approx(1 / square, rel=1e-11)
        geometric = sum(square**-length for length in range(1, row["at"] + 1)) / row["at"]
        assert row["prefix_share"] == pytest.approx(geometric, rel=1e-11)


def test_the_thresholds_by_the_hessian(rows):
    """J's Hessian at π* by differences of its values: an eigenvalue is −β·λ."""
    from kltest.environments import Instance
    from kltest.truth import optimum, value

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


@pytest.mark.parametrize("ratio", MODULE.RATIOS)
def test_moments_with_a_ratio_rollout_by_rollout(ratio):
    """The product of ratios on each g_t·u_s, and its derivative in the age as a sum of h, written out."""
    instance = MODULE.on_path(2, 16, 1)
    change = np.random.default_rng(0).standard_normal(instance.policy.shape)
    p = np.exp(instance.policy)
    change -= (p * change).sum(axis=1, keepdims=True)
    weight = {
        "none": lambda on, t, s: 0.0,
        "token": lambda on, t, s: on[t],
        "prefix": lambda on, t, s: sum(on[: s + 1]),
    }[ratio]
    each, plain, moved, fresh, stale, shift = [], [], [], [], [], []
    for contexts, tokens in zip(instance.paths.contexts, instance.paths.tokens, strict=True):
        u, log_ratio, h = (
            list(of[contexts, tokens])
            for of in (instance.policy - instance.reference, instance.policy - instance.sampler, change)
        )
        sums = [np.zeros_like(p) for _ in range(3)]
        for t, s in ((0, 0), (0, 1), (1, 1)):
            g = np.eye(p.shape[1])[tokens[t]] - p[contexts[t]]
            factors = (np.exp(weight(log_ratio, t, s)), 1.0, weight(h, t, s))
            for total, factor in zip(sums, factors, strict=True):
                total[contexts[t]] += factor * u[s] * g
        for kept, total in zip((each, plain, moved), sums, strict=True):
            kept.append(total.ravel())
        fresh.append(np.exp(instance.policy[contexts, tokens].sum()))
        stale.append(np.exp(instance.sampler[contexts, tokens].sum()))
        shift.append(sum(h))
    each, plain, moved, fresh, stale, shift = map(np.array, (each, plain, moved, fresh, stale, shift))
    mean, variance = MODULE.with_ratio(instance, ratio)
    assert mean == pytest.approx(stale @ each, abs=1e-13)
    assert variance == pytest.approx(stale @ (each**2).sum(axis=1) - ((stale @ each) ** 2).sum(), rel=1e-11)
    bias, slope = MODULE.first_order(instance, change, ratio)
    assert bias == pytest.approx(fresh @ (moved - shift[:, None] * plain), abs=1e-13)
    covariance = fresh @ (plain * moved).sum(axis=1) - (fresh @ plain) @ (fresh @ moved)
    assert slope == pytest.approx(2 * covariance, abs=1e-13)


def test_paths_start_at_the_reference_or_away_from_it_and_move():
    for start, at_reference in (("reference", True), ("away", False)):
        for logits, reference in MODULE._paths((("made up", 0), ("made up", 1)), 1, MODULE.STARTS[start]):
            # Up to a constant on all logits of a context.
            assert (np.ptp(logits[0, 0] - reference[0]) < 1e-12) == at_reference
            assert (np.abs(np.diff(logits, axis=0)).max(axis=(1, 2)) > 0).all()


@pytest.mark.parametrize("part", ["path", "length", "weights", "stability", "training", "age"])
def test_a_part_alone_is_no_error(rows, part):
    TRIAL.may_lack([row for row in rows if row["part"] == part])


def test_claims_agree_and_each_can_fail(rows):
    assert TRIAL.agree(rows)
    TRIAL.claims_can_fail(rows)
