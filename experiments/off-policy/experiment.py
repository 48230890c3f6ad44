"""Staleness, from none to many updates: gradients, weights and training, each part with what concerns it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from kltest.environments import Instance, ngram, sequence
from kltest.environments.policies import table
from kltest.estimators import find
from kltest.loss.calling import bind
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.reproduce.frames import Row
from kltest.sweeps.run import Batching
from kltest.sweeps.settings import Setting, Settings
from kltest.training import Problem, Run, train
from kltest.truth import gradient, optimum, recursions, token_level_fixed_point, value

from ..arrays import norm
from ..fixed_points import token_k3_fixed_point
from ..paths import ascents, problems, seed_of
from .step import FAMILIES, of_step

# Trees of more tokens are not enumerated; the other families are of longer rollouts.
MOST_OF_A_TREE = 6

# Settings that each part varies; it takes no notice of the others.
PARTS: dict[str, tuple[str, ...]] = {
    "path": ("length", "staleness", "estimator", "seed"),
    "weights": ("horizon", "noise", "seed"),
    "stability": ("recipe", "updates", "learning_rate", "seed"),
    "training": ("recipe", "inner_steps", "batch_size", "steps", "learning_rate", "seed"),
    "step": {"family": "family", "tokens": "lasting", "start": "start", "beta": "beta", "seed": "seed"},
    "caps": {"cap": "cap", "tokens": "capped", "off": "off", "seed": "seed"},
}

# Caps and masks of the reward's part against an engine that draws; the first two take all of each weight, and none.
CAPS = (
    *("all", "none", "tis-sequence", "mis-sequence", "tis-token", "mis-token", "tis-geometric", "tis-arithmetic"),
    *("off-policy-sequence-mask", "divergence-mask"),
)


ESTIMATORS = (
    *("k1-loss", "k2-loss", "k2-loss-sequence", "k3-loss", "k1-reward", "k2-ratio", "k2-ratio-detached", "k3-ratio"),
    *("k3-ratio-detached", "k2-prefix-ratio", "k3-broadcast-ratio", "k1-reward-stale", "k1-reward-sequence-ratio"),
    # The last two are not registered.
    *("k1-reward-to-go-prefix-ratio", "k1-reward-token-ratio", "k1-reward-clipped-ratio"),
)

# Ways to train: the KL term, the ratio of the reward's part, and where training comes to rest on-policy, where known.
# The reward always has a baseline; leave-one-out gives one to the KL as well.
RECIPES: dict[str, tuple[str, str, str | None]] = {
    "none": ("k1-reward", "none", "optimum"),
    "none-centred": ("leave-one-out", "none", "optimum"),
    "reward-only": ("k1-reward", "sequence", "optimum"),
    "stale": ("k1-reward-stale", "sequence", "optimum"),
    "token": ("k3-ratio", "token", "token_k2"),
    "token-clipped": ("k3-ratio", "clipped", "token_k2"),
    "token-detached": ("k3-ratio-detached", "token", "token_k3"),
    "broadcast": ("k3-broadcast-ratio", "token", None),
    "prefix": ("k2-prefix-ratio", "sequence", "token_k2"),
    "prefix-to-go": ("k1-reward-to-go-prefix-ratio", "sequence", "optimum"),
    "sequence": ("k1-reward-sequence-ratio", "sequence", "optimum"),
}

SETTINGS = Settings(
    title="Off-policy: staleness, ratios and what they cost",
    tags=("exact", "gradient", "variance", "training", "off-policy"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        # Tokens of a rollout, and how many updates ago the sampler was the policy.
        "length": Setting((1, 3), full=(1, 2, 3, 4), allowed=(1, 5)),
        "staleness": Setting((0, 1, 4, 8, 16, 32, 64), full=(0, 1, 2, 4, 8, 16, 32, 64), allowed=(0, 64)),
        "estimator": ESTIMATORS,
        # Effective sample sizes: the longest rollout, and how far the sampler's logits are off.
        "horizon": Setting(1000, full=10_000, allowed=(1, 100_000)),
        "noise": Setting((0.05, 0.1, 0.2, 0.4), full=(0.025, 0.05, 0.1, 0.2, 0.4, 0.8), allowed=(0.001, 2.0)),
        "recipe": tuple(RECIPES),
        # Updates to one sampler: whose stability is looked at, and with which is trained.
        "updates": Setting((1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64), allowed=(1, 4096)),
        "inner_steps": Setting((1, 4, 16, 64), full=(1, 2, 4, 8, 16, 32, 64, 128), allowed=(1, 4096)),
        # 0: exact expectations.
        "batch_size": Setting((0, 32), full=(0, 8, 32, 128), allowed=(0, 4096)),
        "steps": Setting(384, full=4096, allowed=(64, 1_000_000)),
        # Beyond 2, a single update is too long to settle, stale or not.
        "learning_rate": Setting(0.7, allowed=(0.1, 2.0)),
        # The step that is taken: environments, tokens of a rollout (few in trees), and where training starts.
        "family": tuple(FAMILIES),
        "lasting": Setting((1, 4, 10, 100), full=(1, 2, 4, 10, 30, 100, 300, 1000), allowed=(1, 10_000)),
        "start": ("reference", "away"),
        "beta": Setting((0.25, 1.0), full=(0.1, 0.25, 1.0), allowed=(0.01, 100.0)),
        # Caps and masks: tokens of a rollout, and how far the logits of what draws it are off.
        "cap": CAPS,
        "capped": Setting((1, 2, 4, 6), full=(1, 2, 3, 4, 6, 8, 10), allowed=(1, 12)),
        "off": Setting((0.1, 0.2, 0.4, 0.8), full=(0.05, 0.1, 0.2, 0.4, 0.8), allowed=(0.001, 2.0)),
    },
    seeds={"quick": 2, "full": 10},
    applies=lambda one: one["part"] != "step" or (one["family"] == "tree") == (one["tokens"] <= MOST_OF_A_TREE),
)

# The path: ascent with exact expectations on E[R] − β·KL, R normal for every prefix and token; whoever is `staleness`
# updates behind is the sampler of the policy that has made all of them.
PATH = {"vocabulary": 3, "updates": 64, "beta": 0.2, "learning_rate": 0.1, "distance": 2.0}
CLIP = 0.2  # PPO's, where a ratio is clipped

# Caps and masks: binary tokens, and normal logits of this size.
TREE = {"vocabulary": 2, "policy": 0.7}

# Effective sample sizes: a bigram.
BIGRAM = {"vocabulary": 4, "policy": 1.0}

# Training, from near the reference; sampled runs are shorter and repeated.
TRAINED = {"vocabulary": 2, "length": 3, "beta": 0.9, "distance": 1.0, "sampled": 192, "repeats": 16}
GROUP = 2  # exact expectations with a baseline are over groups; the size does not matter to them

# Sums over a few hundred rollouts, by two routes in float64.
EXACT = 1e-11


# --- own ---
# k1 in the reward with PPO's token ratio, plain or clipped: the penalty as it reaches an actor's loss.
def k1_reward_token_ratio(logp: Any, ref_logp: Any, old_logp: Any, mask: Any, clip: float) -> Any:
    """max(ρ_t·c, clip(ρ_t, 1 − ε, 1 + ε)·c) per token, c = sg(Σ_s u_s) the rollout's cost. (B, T) → (B, T).

    Gradient: ρ_t·c·g_t, or 0 where ρ_t < 1 − ε and c > 0, or ρ_t > 1 + ε and c < 0. Source: Schulman et al. 2017
    (PPO, arXiv 1707.06347), Eq. 7, with the KL inside the reward and no baseline.
    """
    live = mask != 0
    cost = (logp - ref_logp).detach().where(live, 0.0).sum(dim=1, keepdim=True)
    ratio = (logp - old_logp).where(live, 0.0).exp()
    return (ratio * cost).maximum(ratio.clamp(1 - clip, 1 + clip) * cost)


OWN = {
    "k1-reward-token-ratio": partial(k1_reward_token_ratio, clip=math.inf),
    "k1-reward-clipped-ratio": partial(k1_reward_token_ratio, clip=CLIP),
}


# --- closed forms --- Effect of one cycle of n updates to one sampler on a small step off π*, in closed form.
#
# With a = learning rate·β, λ the eigenvalues of the Fisher information F at π* and K = KL(π*‖ref), to first order in
# the policy's step δ and the sampler's δ_μ an expected update is
#
#     full-sequence or prefix ratios, or a baseline and no ratio    −a·F·δ
#     rewards from stale log-probs, full-sequence ratio             −a·F·δ_μ
#     no ratio, the KL without a baseline                           −a·F·((1 − K)·δ + K·δ_μ)
#
# since R − β·Σu is the same for all rollouts at π*, and E_μ[Σ_t g_t] = F·(δ_μ − δ). After n of them, δ_μ = δ at first:
EXACT_RECIPES = ("sequence", "prefix-to-go", "none-centred")


def multiplier(row: Mapping[str, Any]) -> float | None:
    """The largest factor by which a cycle multiplies a small step; None where there is no closed form."""
    count, kl = row["updates"], row["kl"]
    factors = {
        **dict.fromkeys(EXACT_RECIPES, lambda step: (1 - step) ** count),
        "stale": lambda step: 1 - count * step,
        "none": lambda step: ((1 - step * (1 - kl)) ** count - kl) / (1 - kl),
    }
    if row["recipe"] not in factors:
        return None
    return max(abs(factors[row["recipe"]](row["rate"] * curvature)) for curvature in row["curvatures"])


def most_updates(row: Mapping[str, Any]) -> float:
    """So many updates to one sampler, and training with rewards from stale log-probs no longer settles."""
    return 2 / (row["rate"] * max(row["curvatures"]))


def ratio_free_settles(row: Mapping[str, Any]) -> bool | None:
    """Return True if training without ratios or a baseline for the KL settles as updates to one sampler increase.

    The factor (rⁿ − K)/(1 − K) tends to −K/(1 − K) where K < 1 and grows beyond all bounds where K > 1. None where
    so many updates are not yet enough to tell.
    """
    kl, power = row["kl"], math.exp(row["updates"] * row["rate"] * max(row["curvatures"]) * (row["kl"] - 1))
    if kl < 0.5:
        return True
    told = power < (2 * kl - 1) / 2 if kl < 1 else power > 2 * (2 * kl - 1)
    return False if told else None


# --- stability ---
# Stability of training with several updates to one sampler: the linear map of one cycle at its fixed point.
#
# Where training rests on-policy it rests for any number of updates a cycle, as a sampler that equals the policy is on
# policy. A small step δ away becomes M·δ after a cycle, and dies away where all eigenvalues of M are smaller than one.
# Central differences: errors of a few hundred times this squared, and of 1e-16 over this.
STEP = 1e-6


def of_stability(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Return a row for each configuration: the spectrum of a cycle of updates at its fixed point."""
    return [[{**one, **_cycle(one)}] for one in configurations]


def _cycle(one: Mapping[str, Any]) -> Row:
    """The largest eigenvalue of M, and what theory needs to know of the environment."""
    estimator, ratio, name = RECIPES[one["recipe"]]
    each, beta = problem(one["seed"]), TRAINED["beta"]
    rest = rest_of(each, beta, name)
    contexts, vocabulary = rest.shape
    # A constant on all logits of a context changes nothing: those of the first token stay as they are.
    free = [(context, token) for context in range(contexts) for token in range(1, vocabulary)]
    starts = [rest]
    for context, token in free:
        for step in (STEP, -STEP):
            moved = rest.copy()
            moved[context, token] += step
            starts.append(moved)
    runs = [
        Run(Problem(each.environment, start, each.reference), estimator, beta=beta, learning_rate=one["learning_rate"])
        for start in starts
    ]
    count = one["updates"]
    history = train(
        runs, steps=count, inner_steps=count, ratio=ratio, group_size=groups(estimator), record=count, optima=False
    )
    ends = (history.logits - history.logits[:, :, :1])[:, :, 1:].reshape(len(runs), -1)
    matrix = ((ends[1::2] - ends[2::2]) / (2 * STEP)).T
    eigenvalues = np.linalg.eigvals(matrix)
    best = rest_of(each, beta, "optimum")
    return {
        "multiplier": float(np.abs(eigenvalues).max()),
        "curvatures": curvatures(each.environment, best),
        "kl": _kl(each, best),
        "rate": beta * one["learning_rate"],
    }


def rest_of(each: Any, beta: float, name: str | None) -> np.ndarray:
    """(C, V) log-probs of the policy where training rests on-policy."""
    if name == "optimum":
        return optimum(each.environment, each.reference, beta).policy
    solve = {"token_k2": token_level_fixed_point, "token_k3": token_k3_fixed_point}[str(name)]
    return solve(each.environment, each.reference, beta)


def curvatures(environment: Any, log_policy: np.ndarray) -> list[float]:
    """The eigenvalues of the Fisher information of whole rollouts in the logits, but for the zeros of constants.

    It falls into a block for each context, visits·(diag π − ππᵀ).
    """
    chances = np.exp(log_policy)
    blocks = np.einsum("cv,vw->cvw", chances, np.eye(chances.shape[1])) - np.einsum("cv,cw->cvw", chances, chances)
    found = recursions.total_visits(environment, log_policy)[:, None] * np.linalg.eigvalsh(blocks)[:, 1:]
    return sorted(map(float, found.ravel()))


def _kl(each: Any, log_policy: np.ndarray) -> float:
    return value("reverse_kl", Instance.of(each.environment, log_policy, each.reference))


@cache
def _path(length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits (updates + 1, C, V) of ascent with exact expectations on E[R] − β·KL, and the reference."""
    drawn = problems(sequence(int(PATH["vocabulary"]), length), [("path", length, seed)], PATH["distance"])
    logits = ascents(drawn, int(PATH["updates"]), beta=PATH["beta"], learning_rate=PATH["learning_rate"])
    return logits[:, 0], drawn[0].reference


# --- weights ---
# Effective sample sizes of importance weights against length, by recursion over contexts: no rollout is drawn.
def of_weights(horizon: int, noise: float, seed: int) -> list[Row]:
    """A row for each of some lengths up to the horizon."""
    generator = np.random.default_rng(seed_of("weights", seed))
    vocabulary = int(BIGRAM["vocabulary"])
    shape = (vocabulary + 1, vocabulary)
    logits, direction = BIGRAM["policy"] * generator.standard_normal(shape), generator.standard_normal(shape)
    return shares(Instance.of(ngram(vocabulary, horizon), logits, logits, logits + noise * direction))


def shares(instance: Instance) -> list[Row]:
    """The effective share of N rollouts with weights w, E[w] = 1, is 1/E_μ[w²].

    For prefixes, and so for whole rollouts, E_μ[ρ_(1:t)²] is the sum over paths of Π π²/μ: powers of a matrix.
    """
    environment, policy, sampler = instance.environment, instance.policy, instance.sampler
    square = np.exp(2 * policy - sampler)
    divergence = (np.exp(policy) * (policy - sampler)).sum(axis=1)
    logarithm = kl = tokens = prefixes = 0.0
    state = recursions.start(environment)
    visited = (recursions.visits(environment, np.exp(log_probs)) for log_probs in (sampler, policy))
    rows, wanted = [], lengths(environment.horizon)
    for length, (at_sampler, at_policy) in enumerate(zip(*visited, strict=True), 1):
        tokens += 1 / float(at_sampler @ square.sum(axis=1))
        kl += float(at_policy @ divergence)
        # Kept at size one: E[w²] itself leaves the range of a float.
        grown = float(state[:, 0] @ square.sum(axis=1))
        logarithm, state = logarithm + float(np.log(grown)), recursions.forward(environment, square, state) / grown
        prefixes += float(np.exp(-logarithm))
        if length in wanted:
            found = {"token_share": tokens / length, "prefix_share": prefixes / length}
            rows.append({"at": length, **found, "log_sequence_share": -logarithm, "kl_to_sampler": kl})
    return rows


def lengths(horizon: int) -> list[int]:
    """1, 2, 3, 5, 10, 20, 30, 50, … and the horizon."""
    steps = {round(digit * 10.0**power) for power in range(6) for digit in (1, 2, 3, 5)}
    return sorted({length for length in steps if length < horizon} | {horizon})


# --- gradients ---
# Exact bias and variance of every estimator, along a training path.
def of_path(length: int, staleness: int, estimator: str, seed: int) -> list[Row]:
    """The sampler is the policy of `staleness` updates ago."""
    instance = on_path(length, staleness, seed)
    truth = gradient("reverse_kl", instance)
    found, fresh = (_along_gradients(length, step, seed, estimator) for step in (staleness, 0))
    as_value = estimator == "k3-ratio"
    return [
        {
            **_judged(found, fresh, truth),
            "value_bias": found.value.mean / value("reverse_kl", instance) - 1 if as_value else None,
            "furthest": float(np.abs(np.exp(instance.policy - instance.sampler) - 1).max()),
        }
    ]


def of_caps(cap: str, tokens: int, off: float, seed: int) -> list[Row]:
    """Bias and noise of a policy loss on rollouts of an engine whose logits are the policy's with normal noise.

    `rollouts` is how many rollouts a mean may have until the bias exceeds its noise, None where there is no bias.
    """
    environment = sequence(int(TREE["vocabulary"]), tokens)
    generator = np.random.default_rng(seed_of("caps", seed))
    rewards, policy, noise = (generator.standard_normal((2**12, environment.vocabulary)) for _ in range(3))
    contexts = environment.n_contexts
    environment = replace(environment, reward=rewards[:contexts] / math.sqrt(tokens))
    policy, noise = TREE["policy"] * policy[:contexts], off * noise[:contexts]
    # The trainer has computed `old_logp` by the policy, the engine tells its own.
    instance = replace(Instance.of(environment, policy, policy, policy + noise), trainer=table(policy))
    plain = {"all": partial(find("tis-sequence").function, cap=math.inf), "none": without_weights}
    found = exact(bind(plain.get(cap) or find(cap).function), instance, "engine", logs=False)
    truth = gradient("expected_reward", instance)
    bias, noise = norm(-found.gradient - truth), math.sqrt(found.variance)
    rollouts = (noise / bias) ** 2 if bias > EXACT * norm(truth) else None
    return [{"bias": bias / norm(truth), "noise": noise / norm(truth), "rollouts": rollouts}]


def without_weights(logp: Any, advantage: Any, mask: Any) -> Any:
    """The policy gradient as if the policy had drawn the rollouts. (B, T) → (B,)."""
    return -advantage * logp.where(mask != 0, 0.0).sum(dim=1)


def on_path(length: int, staleness: int, seed: int) -> Instance:
    """Return the policy at the end of a path of training and a sampler so many updates older."""
    logits, reference = _path(length, seed)
    return Instance.of(sequence(int(PATH["vocabulary"]), length), logits[-1], reference, logits[-1 - staleness])


@cache
def _along_gradients(length: int, staleness: int, seed: int, estimator: str) -> Any:
    return _moments(estimator, on_path(length, staleness, seed))


def _moments(estimator: str, instance: Instance) -> Any:
    loss = bind(OWN[estimator], name=estimator) if estimator in OWN else resolve(estimator)
    return exact(loss, instance, "stale")


def _judged(found: Any, fresh: Any, truth: np.ndarray) -> Row:
    size = norm(truth)
    return {
        "bias": norm(found.gradient - truth) / size,
        "variance": float(found.variance) / size**2,
        "drift": norm(found.gradient - fresh.gradient) / size,
    }


# --- trained ---
# Training with several updates to one sampler, with exact expectations and with drawn rollouts.
MEASURED = ("gap", "kl")


def of_training(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """A row for each configuration: runs that differ in the environment alone are trained together."""
    first = configurations[0]
    estimator, ratio, _ = RECIPES[first["recipe"]]
    beta, size = TRAINED["beta"], first["batch_size"]
    problems = [problem(one["seed"]) for one in configurations]
    repeats = int(TRAINED["repeats"]) if size else 1
    runs = [
        Run(each, estimator, beta=beta, learning_rate=first["learning_rate"], seed=repeat)
        for each in problems
        for repeat in range(repeats)
    ]
    history = train(
        runs,
        steps=min(first["steps"], int(TRAINED["sampled"])) if size else first["steps"],
        batch_size=size or None,
        group_size=groups(estimator) if not size else None,
        inner_steps=first["inner_steps"],
        ratio=ratio,
    )
    rows = []
    for index, one in enumerate(configurations):
        own = slice(index * repeats, (index + 1) * repeats)
        gaps = history.gap[:, own]
        rows.append(
            [
                {
                    **one,
                    **{name: float(getattr(history, name)[-1, own].mean()) for name in MEASURED},
                    "low": float(np.quantile(gaps[-1], 0.1)),
                    "high": float(np.quantile(gaps[-1], 0.9)),
                }
            ]
        )
    return rows


def problem(seed: int) -> Any:
    """Return an environment with reference and rewards, the start at a distance from the reference."""
    environment = sequence(int(TRAINED["vocabulary"]), int(TRAINED["length"]))
    return Problem.draw(environment, seed_of("training", seed), distance=TRAINED["distance"], reward="normal")


def groups(estimator: str) -> int | None:
    """The size of groups in exact training; None where rows are apart."""
    return GROUP if estimator == "leave-one-out" else None


BATCHING = Batching(("estimator", "staleness", "seed", "updates"), size=64)


def tasks(configurations: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Nothing whose rest point is unknown is asked for stability; sampled runs end earlier than exact ones."""
    for one in configurations:
        if one["part"] == "stability" and RECIPES[one["recipe"]][2] is None:
            continue
        if one["part"] == "training" and one["batch_size"]:
            one = {**one, "steps": min(one["steps"], int(TRAINED["sampled"]))}
        yield one


def compute_batch(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Return the rows of each configuration of one part."""
    part = configurations[0]["part"]
    if part in ("training", "stability"):
        return {"training": of_training, "stability": of_stability}[part](configurations)
    parts = {"path": of_path, "weights": of_weights, "step": of_step, "caps": of_caps}
    own = [{name: it for name, it in one.items() if name != "part"} for one in configurations]
    rows = (parts[part](**options) for options in own)
    return [[{**one, **row} for row in found] for one, found in zip(configurations, rows, strict=True)]
