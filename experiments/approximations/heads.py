"""The k likeliest tokens exactly and the rest sampled, or not at all: what is left over in the gradient."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kltest.environments import Instance, bandit, sequence
from kltest.environments.policies import softmax_gradient
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import dynamic, exact
from kltest.training import Problem, Run, train
from kltest.truth import gradient

from ..arrays import generator, norm
from .settings import DRIFT, PREFIXES, TOKENS

Row = dict[str, Any]


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
    mass, error = float(chances[head].sum()), norm(off - predicted)
    relative = norm(off) / norm(truth) if one["distance"] else None
    return [{"mass": mass, "bias": norm(off), "relative_bias": relative, "theory_error": error}]


def on_prefixes(one: Mapping[str, Any]) -> list[Row]:
    """Sequences: beside ∇KL with prefixes held fixed the expected gradient has Σ_s d(s)·∇π(S|s)."""
    environment = sequence(PREFIXES["vocabulary"], PREFIXES["length"])
    instance = Instance.draw(environment, np.random.SeedSequence([one["seed"], 17]))
    chances, k = np.exp(instance.policy), PREFIXES["k"]
    head = np.argsort(np.argsort(-chances, axis=1), axis=1) < k
    # How often a prefix is met is the chance of its rollouts.
    visits = np.zeros(environment.n_contexts)
    paths = instance.paths
    np.add.at(visits, paths.contexts, instance.rollout_weights("current")[:, None] * paths.mask)
    push = visits[:, None] * softmax_gradient(np.where(head, chances, 0.0), instance.policy)
    u = instance.policy - instance.reference
    tail = visits[:, None] * softmax_gradient(np.where(head, 0.0, chances * u), instance.policy)
    predicted = {"top-k": push, "top-k-detached": 0 * push, "head-alone": push - tail}[one["form"]]
    found = exact(made(one["form"], k), instance).gradient
    local = gradient("local_reverse_kl", instance)
    off = found - local
    return [{"relative_bias": norm(off) / norm(local), "theory_error": norm(off - predicted)}]


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
                "gradient_norm": float(history.gradient_norm[-1, index]),
                **dict(zip(("predicted_mass", "predicted_kl"), predicted, strict=True)),
            }
        )
    return rows
