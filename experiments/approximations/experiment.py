"""Each part of the experiment has a file of its own; here a configuration finds its part."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch.autograd.functional import jacobian

from kltest.environments import Instance, bandit, ragged
from kltest.environments.policies import softmax_gradient, table
from kltest.estimators import find
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import dynamic, exact
from kltest.reproduce.frames import Row
from kltest.sweeps.run import Batching
from kltest.sweeps.settings import Setting, Settings
from kltest.training import Problem, Run, train
from kltest.truth import gradient, value
from kltest.truth.off_policy import along, of_rollouts

from ..arrays import generator, norm
from ..jacobians import asymmetry

# Settings that each part varies; it takes no notice of the others.
PARTS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "head": ("form", "k", "sharpness", "distance", "seed"),
    "drift": ("k", "likely_mass"),
    "clamp": ("bound",),
    "lead": ("bound", "lead"),
    "return": ("penalty", "start"),
    "precision": {
        **{name: name for name in ("estimator", "kind", "rounded", "vocabulary", "log_ratio")},
        "seed": "draw",
    },
    "batch": ("normalised", "batch_size", "seed"),
    "lengths": ("seed",),
    "optimum": {"beta": "beta", "seed": "draw"},
}

SETTINGS = Settings(
    title="Approximations: top-k heads, clamps, precision, lengths",
    tags=("exact", "gradient", "training", "bandit", "ragged"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        # A head alone, and the two registered estimators that add a sampled tail to it.
        "form": ("head-alone", "top-k", "top-k-detached"),
        "k": Setting((1, 2, 4, 8, 16, 32), full=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32), allowed=(1, 32)),
        # The policy's chances fall with the rank as rank^(−sharpness).
        "sharpness": Setting((1.0, 2.0), full=(0.25, 0.5, 1.0, 1.5, 2.0), allowed=(0.0, 4.0)),
        # Standard deviation of the logits of the reference around those of the policy.
        "distance": Setting((0.0, 0.03, 0.1, 0.3, 1.0), full=(0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0), allowed=(0.0, 3.0)),
        # The largest value that a clamped k3 lets through.
        "bound": Setting((10.0,), full=(2.0, 5.0, 10.0, 20.0), allowed=(0.5, 100.0)),
        # Leads: distances by which one token's logit has come further from the reference than the others.
        "lead": Setting((0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), allowed=(0.1, 15.0)),
        "penalty": ("k3-clamped", "k3-loss", "k2-loss"),
        "start": Setting((8.0,), full=(2.0, 4.0, 6.0, 8.0, 10.0), allowed=(0.5, 12.0)),
        "estimator": ("k1-reward", "k2-loss", "k3-loss"),
        "kind": ("bfloat16", "float16", "float32"),
        # Rounded quantities: the log-probs that come in, or the log-ratio and all arithmetic after it.
        "rounded": ("log-probs", "arithmetic"),
        # Tokens: with so many a usual log-prob is −log V.
        "vocabulary": Setting((64, 4096, 32_768), full=(8, 64, 512, 4096, 32_768, 131_072), allowed=(2, 262_144)),
        # Standard deviation of the log-ratio.
        "log_ratio": Setting((1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3), allowed=(1e-6, 2.0)),
        "normalised": ("token-mean", "whole-return"),
        "batch_size": Setting((1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024), allowed=(1, 100_000)),
        "beta": Setting((0.7, 1.0, 1.5, 2.0), full=(0.5, 0.7, 1.0, 1.5, 2.0, 5.0), allowed=(0.2, 100.0)),
        # Share of the eight likely tokens in drift.
        "likely_mass": Setting(0.8, full=(0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.97), allowed=(0.5, 0.99)),
        # Policies that are rounded, and references from which lengths are trained.
        "draw": Setting(0, full=tuple(range(10)), allowed=(0, 1000)),
    },
    seeds={"quick": 2, "full": 20},
)

# Heads: so many tokens. On prefixes: a vocabulary, a length, a head.
TOKENS = 32

# Drift: no reward, from the reference. Eight likely tokens share half of the mass or more, the others what is left, so
# that a head of eight stays the likeliest after it lost a factor e; heads of other sizes cut through equal chances.
DRIFT = {"likely": 8, "steps": 400, "learning_rate": 8.0}

# Clamps: a reference of so many tokens with chances 1/rank, of which one runs ahead: the likeliest.
CLAMPED_TOKENS = 16
LOG_RATIOS = tuple(round(-8 + 0.25 * step, 2) for step in range(89))  # −8 … 14
RETURN = {"steps": 2000, "learning_rate": 1.0, "records": 60, "home": 0.01}

# Lengths: up to so many tokens of a vocabulary whose last token ends the rollout.
RAGGED = {"vocabulary": 2, "length": 4}
# A penalty of weight β bounds the step that is stable: the rate is divided by β where that is above 1.
OPTIMUM = {"vocabulary": 3, "length": 3, "steps": 5000, "learning_rate": 2.0}

# Two routes in float64 to sums of up to a few thousand terms of size one.
EXACT = 1e-11


# --- heads ---
# The k likeliest tokens exactly and the rest sampled, or not at all: what is left over in the gradient.


def head_alone(logits, ref_logits, k):  # type: ignore[no-untyped-def]
    """Σ_head π·u, differentiated: the truncated KL without a tail. (B, T, V) → (B, T)."""
    log_head, top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    return (log_head.exp() * (log_head - ref_logits.gather(-1, top))).sum(dim=-1)


def made(form: str, k: int) -> Any:
    """The loss, with its head of k."""
    call = Call(arguments={"k": k})
    return bind(head_alone, call, form) if form == "head-alone" else resolve(form, call)


def bias(one: Mapping[str, Any]) -> list[Row]:
    """One step: what the expected gradient has beside ∇KL, and what theory says that is.

    With S the head and m = π(S): nothing where both parts are differentiated through π alone; ∇m where the head's
    log-ratio is differentiated as well; and less the tail's share E[1{y ∉ S}·u·g] where the tail is left out.
    """
    drawn = generator(one["sharpness"], one["seed"])
    policy = -one["sharpness"] * np.log(np.arange(1, TOKENS + 1))[None]
    # Chances that differ, so that the head is beyond doubt.
    policy = -np.sort(-(policy + 0.01 * drawn.standard_normal(policy.shape)))
    reference = policy + one["distance"] * drawn.standard_normal(policy.shape)
    instance = Instance.of(bandit(TOKENS), policy, reference)
    chances = np.exp(instance.policy)
    head = np.arange(TOKENS)[None] < one["k"]
    truth = gradient("reverse_kl", instance)
    found = dynamic(made(one["form"], one["k"]), instance).gradient
    tail = softmax_gradient(np.where(head, 0.0, chances * (instance.policy - instance.reference)), instance.policy)
    push = softmax_gradient(np.where(head, chances, 0.0), instance.policy)
    predicted = {"top-k": push, "top-k-detached": 0 * push, "head-alone": push - tail}[one["form"]]
    off = found - truth
    relative = norm(off) / norm(truth) if one["distance"] else None
    return [{"bias": norm(off), "relative_bias": relative, "theory_error": norm(off - predicted)}]


def drift(one: Mapping[str, Any]) -> list[Row]:
    """Training that starts at the reference and earns nothing: a penalty should leave it where it is.

    For a fixed head the followed gradient is that of KL(π‖ref) + π(S), whose minimum is π ∝ ref·e^{−1{v ∈ S}}: the
    head's mass m becomes m/(m + (1 − m)·e), and the KL there −log((1 − m) + m/e) − π(S).
    """
    likely, k, most = DRIFT["likely"], one["k"], one["likely_mass"]
    chances = np.where(np.arange(TOKENS) < likely, most / likely, (1 - most) / (TOKENS - likely))
    reference = np.log(chances)[None]
    problem = Problem(bandit(TOKENS), reference, reference)
    runs = [
        Run(problem, form, beta=1.0, learning_rate=DRIFT["learning_rate"], options={"k": k})
        for form in ("top-k", "top-k-detached")
    ]
    history = train(runs, steps=DRIFT["steps"], record=DRIFT["steps"], optima=False)
    mass = float(chances[: min(k, TOKENS)].sum())
    after = mass / (mass + (1 - mass) * np.e)
    # The head that is found again at the end is the one that it began with.
    stays = k == likely or k >= TOKENS
    rows = []
    for index, run in enumerate(runs):
        logits = history.logits[index][0]
        ended = np.exp(logits - np.logaddexp.reduce(logits))
        moved = run.estimator == "top-k" and k < TOKENS
        kl = float(-np.log(1 - mass + mass / np.e) - after) if moved else 0.0
        predicted = (after if moved else mass, kl) if stays or not moved else (None, None)
        rows.append(
            {
                "form": run.estimator,
                "mass": mass,
                "mass_after": float(ended[: min(k, TOKENS)].sum()),
                "kl": float(history.kl[-1, index]),
                **dict(zip(("predicted_mass", "predicted_kl"), predicted, strict=True)),
            }
        )
    return rows


# --- clamps ---
# A clamped k3: where its gradient is dead, how much of it is left, and whether a policy finds its way back.
REFERENCE = -np.log(np.arange(1, CLAMPED_TOKENS + 1))[None]


def weight(name: str, u: np.ndarray, **options: Any) -> np.ndarray:
    """∂loss/∂log π of a registered estimator at log-ratios u: the weight of g_t."""
    logp = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    find(name).function(logp, torch.zeros_like(logp), **options).sum().backward()
    assert logp.grad is not None
    return logp.grad.numpy()


def zones(one: Mapping[str, Any]) -> list[Row]:
    """The weight on g over a grid of log-ratios, and the edges of the zone that is alive, by bisection."""
    u = np.array(LOG_RATIOS)
    found = {name: weight(name, u) for name in ("k3-loss", "k2-loss")}
    found["k3-clamped"] = weight("k3-clamped", u, bound=one["bound"])

    def alive(at: float) -> bool:
        return bool(weight("k3-clamped", np.array([at]), bound=one["bound"])[0] != 0)

    def edge(inside: float, outside: float) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if alive(middle) else (inside, middle)
        return inside

    edges = {"low": edge(-1e-3, -20.0), "high": edge(1e-3, 300.0)}
    return [
        {**edges, "u": at, **{name: float(values[index]) for name, values in found.items()}}
        for index, at in enumerate(LOG_RATIOS)
    ]


def at_a_lead(one: Mapping[str, Any]) -> list[Row]:
    """Derivative by the leading logit, with the clamp and without, where the likeliest token has run ahead."""
    policy = REFERENCE.copy()
    policy[0, 0] += one["lead"]
    instance = Instance.of(bandit(CLAMPED_TOKENS), policy, REFERENCE)
    clamped = exact(resolve("k3-clamped", Call(arguments={"bound": one["bound"]})), instance).gradient
    return [{"pull": float(clamped[0, 0]), "pull of k3-loss": float(gradient("forward_kl", instance)[0, 0])}]


def way_back(one: Mapping[str, Any]) -> list[Row]:
    """Exact training, without a reward, from a policy that has run ahead: KL(π‖ref) on the way."""
    start = REFERENCE.copy()
    start[0, 0] += one["start"]
    run = Run(
        Problem(bandit(CLAMPED_TOKENS), start, REFERENCE),
        one["penalty"],
        beta=1.0,
        learning_rate=RETURN["learning_rate"],
    )
    kl = train([run], steps=RETURN["steps"], record=1, optima=False).kl[:, 0]
    home = np.flatnonzero(kl < RETURN["home"])
    returned = int(home[0]) if len(home) else None
    shown = sorted({round(step) for step in np.geomspace(1, RETURN["steps"], RETURN["records"])})
    return [{"step": step, "kl": float(kl[step]), "returned": returned} for step in (0, *shown)]


# --- precision ---
# Half precision: how far the expected gradient is off, by what is rounded, to what, and how near the reference.
def error(one: Mapping[str, Any]) -> list[Row]:
    """One step with V tokens of chances near 1/V: ‖E[ĝ] − E[ĝ] in float64‖/‖E[ĝ] in float64‖.

    "log-probs": they are rounded before they are subtracted, all else is done in float64. "arithmetic": their
    difference is taken in float64 and rounded, and all after it is done in the narrow type.
    """
    kind = getattr(torch, one["kind"])
    drawn = generator(one["vocabulary"], *([one["seed"]] if one["seed"] else []))
    policy = table(0.3 * drawn.standard_normal((1, one["vocabulary"])))
    reference = table(policy + one["log_ratio"] * drawn.standard_normal(policy.shape))
    log_probs, ref_log_probs = torch.from_numpy(policy[0]), torch.from_numpy(reference[0])
    exact = _weight(one["estimator"], log_probs, ref_log_probs)
    if one["rounded"] == "log-probs":
        rounded = (values.to(kind).double() for values in (log_probs, ref_log_probs))
        found = _weight(one["estimator"], *rounded)
    else:
        # The estimators here look at nothing but the difference.
        u = (log_probs - ref_log_probs).to(kind)
        found = _weight(one["estimator"], u, torch.zeros_like(u))
    off, size = (np.linalg.norm(softmax_gradient(np.exp(policy) * values, policy)) for values in (found - exact, exact))
    row = {"relative_error": float(off / size), "predicted_error": None, "misread": None}
    if one["rounded"] == "log-probs":
        square = float((np.exp(2 * policy) * (policy - reference) ** 2).sum())
        variance, misread = _misread(policy, reference, kind)
        row |= {"predicted_error": (variance / square) ** 0.5, "misread": misread}
    return [row]


def _misread(policy: np.ndarray, reference: np.ndarray, kind: Any) -> tuple[float, float]:
    """Σ π²·E[(read − true log-ratio)²], were log-probs to fall anywhere between two neighbours of their grids.

    Two numbers u apart on a grid of step h, f = |u| mod h: rounded, they are |u| − f or |u| − f + h apart, the latter
    with probability f/h. The error has no mean, and the variance f·(h − f). On two different grids the errors are
    independent, of h²/12 each. Also, how many tokens are then expected to be read as something else than 0: of few, no
    average is to be expected.
    """
    step, other = (torch.finfo(kind).eps * 2.0 ** np.floor(np.log2(-values)) for values in (policy, reference))
    u = np.abs(policy - reference)
    left = u % step
    variance = np.where(step == other, left * (step - left), (step**2 + other**2) / 12)
    return float((np.exp(2 * policy) * variance).sum()), float(np.minimum(u / step, 1.0).sum())


def _weight(name: str, log_probs: Any, ref_log_probs: Any) -> np.ndarray:
    """Return the factor of g for each token: the cost if it stands in the reward, the derivative if in the loss."""
    estimator = find(name)
    leaf = log_probs.clone().requires_grad_()
    value = estimator.function(leaf, ref_log_probs)
    if estimator.spec.placement == "reward":
        return value.detach().double().numpy()
    value.sum().backward()
    return leaf.grad.double().numpy()


# --- lengths ---
# Division by lengths where they vary: one mean over a batch's tokens, 1/L for each rollout, and where that ends.


def _instance(seed: int) -> Any:
    return Instance.draw(ragged(RAGGED["vocabulary"], RAGGED["length"]), np.random.SeedSequence([seed, 29]))


def of_a_batch(one: Mapping[str, Any]) -> list[Row]:
    """E[ĝ] of a batch of B rollouts, in closed form, beside its limit: ∇KL, local or whole, over E[L].

    Rollouts are exchangeable: E[ĝ] = B·E[x(y)/(L(y) + S)] with S the summed length of the B − 1 others, whose
    distribution is that of one length convolved with itself.
    """
    instance, size = _instance(one["seed"]), one["batch_size"]
    paths, chances = instance.paths, instance.rollout_weights("current")
    u = along(instance, instance.policy - instance.reference)
    others = _sum_of_lengths(np.bincount(paths.lengths, chances), size - 1)
    totals = np.arange(len(others))
    share = np.array([(others / (length + totals)).sum() for length in paths.lengths])
    cost = u if one["normalised"] == "token-mean" else np.repeat(u.sum(axis=1, keepdims=True), u.shape[1], axis=1)
    found = of_rollouts(instance, size * (chances * share)[:, None] * cost)
    target = "local_reverse_kl" if one["normalised"] == "token-mean" else "reverse_kl"
    limit = gradient(target, instance) / value("expected_length", instance)
    return [{"relative_distance": norm(found - limit) / norm(limit)}]


def _sum_of_lengths(one: np.ndarray, times: int) -> np.ndarray:
    """The distribution of the sum of `times` independent lengths, by squaring."""
    result, power = np.ones(1), one
    while times:
        if times % 2:
            result = np.convolve(result, power)
        times //= 2
        power = np.convolve(power, power) if times else power
    return result


# Factors of g_t if every rollout is divided by its own length L, from log-ratios (B, T).
FIELDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole return": lambda u: u.sum(dim=1, keepdim=True).expand_as(u),
    "reward-to-go": lambda u: u.flip(1).cumsum(dim=1).flip(1),
    "token k2": lambda u: u,
    "token k3": lambda u: 1 - (-u).exp(),
}


def of_one_rollout(one: Mapping[str, Any]) -> list[Row]:
    """Each rollout over its own length: is it the gradient of anything?

    The expected gradient is written out over all rollouts in torch, and its Jacobian taken by autograd.
    """
    instance = _instance(one["seed"])
    paths = instance.paths
    contexts, tokens, live = (torch.from_numpy(part) for part in (paths.contexts, paths.tokens, paths.mask))
    start, reference = (torch.from_numpy(np.array(logits)) for logits in (instance.policy, instance.reference))

    def field(name: str, logits: torch.Tensor) -> torch.Tensor:
        log_probs = logits.view_as(start).log_softmax(-1)
        logp = log_probs[contexts, tokens].where(live, 0.0)
        u = logp - reference[contexts, tokens].where(live, 0.0)
        weight = logp.sum(dim=1, keepdim=True).exp() * FIELDS[name](u) / live.sum(dim=1, keepdim=True)
        table = torch.zeros_like(start).index_put((contexts, tokens), weight.where(live, 0.0), accumulate=True)
        return (table - log_probs.exp() * table.sum(dim=1, keepdim=True)).reshape(-1)

    matrices = {name: jacobian(partial(field, name), start.reshape(-1)) for name in FIELDS}
    return [{"field": name, "asymmetry": asymmetry(matrix.numpy())} for name, matrix in matrices.items()]


def ends(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Ends of exact training on E[R] − β·(the length-normalised penalty), beside its fixed point.

    Stationary: R − β·Σu/L is the same for all rollouts, so π(y) = ref(y)·e^{L(R − c)/β}, with c so that it sums to 1.
    Right is to end at once, and every answer that begins with the first token.
    """
    environment = ragged(OPTIMUM["vocabulary"], OPTIMUM["length"])
    reward = np.zeros((environment.n_contexts, environment.vocabulary))
    reward[0, 0] = reward[0, -1] = 1.0
    environment = replace(environment, reward=reward)
    runs = []
    for one in configurations:
        # Even, the first time.
        spread = 0.5 * np.random.default_rng([one["seed"], 31]).standard_normal(reward.shape)
        problem = Problem(environment, *[spread if one["seed"] else np.zeros_like(spread)] * 2)
        rate = OPTIMUM["learning_rate"] / max(one["beta"], 1.0)
        runs.append(Run(problem, "length-normalised", beta=one["beta"], learning_rate=rate))
    history = train(runs, steps=OPTIMUM["steps"], record=OPTIMUM["steps"])
    return [
        [{"gradient_norm": float(history.gradient_norm[-1, index]), **_ended(run, history.logits[index])}]
        for index, run in enumerate(runs)
    ]


def _ended(run: Run, logits: np.ndarray) -> Row:
    """Lengths of answers at the end and under the reference, and the distance of the end from its fixed point."""
    environment = run.problem.environment
    instance = Instance.of(environment, logits, run.problem.reference)
    paths = instance.paths
    earned, lengths = environment.returns(paths), paths.lengths
    log_ref = paths.log_probability(instance.reference)
    chances = {"": np.exp(paths.log_probability(instance.policy)), "reference_": np.exp(log_ref)}

    def at(c: float) -> np.ndarray:
        return np.exp(log_ref + lengths * (earned - c) / run.beta)

    wanted = at(brentq(lambda c: at(c).sum() - 1, 0.0, 1.0, xtol=1e-15))
    found: Row = {"end_error": float(np.abs(chances[""] - wanted).sum())}
    for which, chance in chances.items():
        for words, kind in (("right", earned == 1), ("wrong", earned == 0)):
            found[f"{which}length_of_{words}"] = float(chance[kind] @ lengths[kind] / chance[kind].sum())
    return found


BATCHING = Batching(tuple(dict.fromkeys(name for names in PARTS.values() for name in names)), size=32)


def compute_batch(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Rows of each configuration, in which its own settings stand first."""
    compute = {
        "head": bias,
        "drift": drift,
        "clamp": zones,
        "lead": at_a_lead,
        "return": way_back,
        "precision": error,
        "batch": of_a_batch,
        "lengths": of_one_rollout,
    }
    if configurations[0]["part"] == "optimum":
        found = ends(configurations)
    else:
        found = [compute[one["part"]](one) for one in configurations]
    return [[{**one, **row} for row in rows] for one, rows in zip(configurations, found, strict=True)]
