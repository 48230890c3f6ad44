"""Exact bias and variance of every estimator: along a training path, and against the length of a rollout."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from kltest.environments import Instance, sequence
from kltest.loss.calling import bind
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.sweeps.store import digest
from kltest.training import Problem, Run, train
from kltest.truth import combine, gradient, gradient_again, parse, value

from ..arrays import norm
from .own import OWN
from .settings import FOLLOWED, PATH, TREE

Row = dict[str, Any]


def of_path(length: int, staleness: int, estimator: str, seed: int) -> list[Row]:
    """The sampler is the policy of `staleness` updates ago."""
    instance = on_path(length, staleness, seed)
    truth, known = _known(length, staleness, seed)
    found, fresh = (_along(length, step, seed, estimator) for step in (staleness, 0))
    size = norm(truth)
    followed = FOLLOWED[estimator]
    combination = parse(followed) if followed else None
    if estimator == "k3-broadcast-ratio":
        parts = {"reverse_kl": 1 / length, "local_forward_kl": 1 - 1 / length, "other_tokens_forward_kl": -1 / length}
        combination = {f"{name}@mean_ratio": coefficient for name, coefficient in parts.items()}
    off = None if combination is None else norm(found.gradient - combine(combination, instance)) / size
    return [
        {
            **_judged(found, truth),
            "drift": norm(found.gradient - fresh.gradient) / size,
            "off_followed": off,
            **_logged(estimator, found, instance),
            **known,
        }
    ]


@cache
def _known(length: int, staleness: int, seed: int) -> tuple[np.ndarray, Row]:
    """∇KL(π‖ref), and what is known of the place on the path whatever the estimator."""
    instance = on_path(length, staleness, seed)
    truth = gradient("reverse_kl", instance)
    return truth, {
        "truth_again": norm(truth - gradient_again("reverse_kl", instance)) / norm(truth),
        "kl": value("reverse_kl", instance),
        "kl_to_sampler": value("to_sampler_kl", instance),
        "furthest": float(np.abs(np.exp(instance.policy - instance.sampler) - 1).max()),
        **_sample_sizes(instance),
    }


def _logged(estimator: str, found: Any, instance: Instance) -> Row:
    """Difference of k3 with its ratio, as a value, from the KL, and from that on the sampler's prefixes."""
    names = {"value_bias": "reverse_kl", "value_off_sampler": "local_reverse_kl@sampler"}
    said = estimator == "k3-ratio"
    return {column: found.value.mean / value(name, instance) - 1 if said else None for column, name in names.items()}


def of_length(tokens: int, compared: str, seed: int) -> list[Row]:
    """The sampler is off by as much at every prefix, however long the rollout."""
    instance = tree(tokens, seed)
    truth = gradient("reverse_kl", instance)
    fresh = Instance(instance.environment, instance.policy, instance.reference, instance.policy)
    found, own = _moments(compared, instance), _moments(compared, fresh)
    drift = norm(found.gradient - own.gradient) / norm(truth)
    price = found.variance / own.variance
    return [{**_judged(found, truth), "drift": drift, "price": price, **_sample_sizes(instance)}]


@cache
def on_path(length: int, staleness: int, seed: int) -> Instance:
    problem, logits = _path(length, seed)
    return Instance.of(problem.environment, logits[-1], problem.reference, logits[-1 - staleness])


@cache
def _path(length: int, seed: int) -> tuple[Any, Sequence[np.ndarray]]:
    """The problem, and the logits after 0, 1, … updates of training with exact expectations."""
    environment = sequence(int(PATH["vocabulary"]), length)
    problem = Problem.draw(environment, _seed("path", length, seed), distance=PATH["distance"], reward="normal")
    logits = [problem.start]
    for _ in range(int(PATH["updates"])):
        # One update at a time, as the history keeps the last logits alone.
        here = Problem(problem.environment, logits[-1], problem.reference)
        run = Run(here, "k1-reward", beta=PATH["beta"], learning_rate=PATH["learning_rate"])
        logits.append(train([run], steps=1, optima=False).logits[0])
    return problem, logits


def tree(tokens: int, seed: int) -> Instance:
    environment = sequence(int(TREE["vocabulary"]), tokens)
    generator = np.random.default_rng(_seed("length", seed))
    # A row at the start and one after each token; prefixes of a length are in lexicographic order.
    rows = [0, *(1 + prefix % TREE["vocabulary"] for prefix in _prefixes(environment.vocabulary, tokens))]
    shape = (environment.vocabulary + 1, environment.vocabulary)
    policy, reference, sampler = (
        TREE[who] * generator.standard_normal(shape)[rows] for who in ("policy", "reference", "sampler")
    )
    return Instance.of(environment, policy, policy + reference, policy + sampler)


def _prefixes(vocabulary: int, tokens: int) -> list[int]:
    return [prefix for length in range(1, tokens) for prefix in range(vocabulary**length)]


def _seed(*words: Any) -> int:
    return int(digest(words)[:8], 16)


@cache
def _along(length: int, staleness: int, seed: int, estimator: str) -> Any:
    return _moments(estimator, on_path(length, staleness, seed))


def _moments(estimator: str, instance: Instance) -> Any:
    loss = bind(OWN[estimator], name=estimator) if estimator in OWN else resolve(estimator)
    return exact(loss, instance, "stale")


def _judged(found: Any, truth: np.ndarray) -> Row:
    size = norm(truth)
    return {"bias": norm(found.gradient - truth) / size, "variance": float(found.variance) / size**2}


def _sample_sizes(instance: Instance) -> Row:
    """1/E_μ[weight²] of the ratios of tokens, of prefixes (means over positions) and of whole rollouts; enumerated."""
    paths = instance.paths
    log_ratio = (instance.policy - instance.sampler)[paths.contexts, paths.tokens]
    chances = np.exp(paths.log_probability(instance.sampler))[:, None]
    token, prefix = (1 / (chances * np.exp(2 * of)).sum(axis=0) for of in (log_ratio, log_ratio.cumsum(axis=1)))
    return {
        "token_share": float(token.mean()),
        "prefix_share": float(prefix.mean()),
        "sequence_share": float(prefix[-1]),
    }
