"""Environments to build: token sequences and Markov decision processes.

A sequence has one context per prefix, an n-gram one per recent history; a bandit is a sequence of length 1. A decision
process has sparse stochastic dynamics and a stationary policy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kltest.environments.environment import END, Environment, memory_limit
from kltest.environments.paths import Paths
from kltest.errors import InvalidEnvironmentError


def sequence(
    vocabulary: int = 3,
    length: int = 3,
    *,
    end_token: int | None = None,
    prompts: np.ndarray | None = None,
    reward: np.ndarray | None = None,
    name: str | None = None,
) -> Environment:
    """Build all sequences of up to `length` tokens, with a context for every prompt and prefix.

    Contexts are numbered prompt by prompt, within a prompt by the prefix's length and then in lexicographic order.

    Args:
        vocabulary: Number V of tokens.
        length: Largest number of tokens in a rollout.
        end_token: Token that ends a rollout (default: none, so that all have the same length).
        prompts: Probabilities (P,) of the prompts (default: one prompt).
        reward: Reward (C, V) of a token in a context (default: 0).
        name: Name for messages (default: "sequence", or "ragged" with an end token).

    Raises:
        InvalidEnvironmentError: A number is out of range, or the contexts do not fit into memory.
    """
    name = name or ("sequence" if end_token is None else "ragged")
    _check(name, vocabulary, length, end_token)
    prompts = np.ones(1) if prompts is None else np.asarray(prompts, dtype=float)
    continuing = np.array([token for token in range(vocabulary) if token != end_token], dtype=np.int64)
    remedy = "Use fewer tokens, a shorter length, or an n-gram."
    _check_size(name, vocabulary, len(continuing), length, len(prompts), remedy)
    widths = [len(continuing) ** depth for depth in range(length)]
    offsets = np.concatenate([[0], np.cumsum(widths)])
    per_prompt = int(offsets[-1])
    successors = np.full((per_prompt, vocabulary, 1), END, dtype=np.int64)
    for depth in range(length - 1):
        here = np.arange(offsets[depth], offsets[depth + 1])
        children = offsets[depth + 1] + np.arange(widths[depth + 1]).reshape(widths[depth], len(continuing))
        successors[here[:, None], continuing[None, :], 0] = children
    shifted = [np.where(successors == END, END, successors + per_prompt * index) for index in range(len(prompts))]
    start = np.arange(len(prompts)) * per_prompt
    return _deterministic(name, length, start, prompts, np.concatenate(shifted), reward, tree=True)


def bandit(vocabulary: int = 4, *, prompts: np.ndarray | None = None, reward: np.ndarray | None = None) -> Environment:
    """Build a bandit: one context, one token, every rollout of length 1.

    Args:
        vocabulary: Number V of arms.
        prompts: Probabilities (P,) of P separate bandits (default: one bandit).
        reward: Reward (P, V) of each arm (default: 0).

    Raises:
        InvalidEnvironmentError: A shape is wrong, a number is not finite, or probabilities do not sum to 1.
    """
    return sequence(vocabulary, 1, prompts=prompts, reward=reward, name="bandit")


def ragged(vocabulary: int = 3, length: int = 3, **options: Any) -> Environment:
    """Build sequences of different lengths, ended by the vocabulary's last token; `options` as for `sequence`."""
    return sequence(vocabulary, length, end_token=vocabulary - 1, **options)


def ngram(
    vocabulary: int,
    length: int,
    order: int = 2,
    *,
    end_token: int | None = None,
    reward: np.ndarray | None = None,
    name: str = "ngram",
) -> Environment:
    """Build sequences whose policies see the last `order` − 1 tokens only, so that prefixes share contexts.

    The number of contexts does not depend on `length`, so that dynamic programming is exact for 10,000 tokens, too many
    to enumerate. Contexts are all histories of fewer than `order` tokens, shorter ones first.

    Args:
        vocabulary: Number V of tokens.
        length: Largest number of tokens in a rollout.
        order: Order of the n-gram, at least 1.
        end_token: Token that ends a rollout (default: none).
        reward: Reward (C, V) of a token in a context (default: 0).
        name: Name for messages.

    Raises:
        InvalidEnvironmentError: A number is out of range, or the contexts do not fit into memory.
    """
    _check(name, vocabulary, length, end_token)
    if order < 1:
        raise InvalidEnvironmentError(f"environment {name!r}: the order of an n-gram is at least 1, not {order}")
    _check_size(name, vocabulary, vocabulary, order, 1, "Use fewer tokens or a lower order.")
    sizes = [vocabulary**size for size in range(order)]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    successors = np.full((int(offsets[-1]), vocabulary, 1), END, dtype=np.int64)
    tokens = np.arange(vocabulary)
    for size in range(order):
        history = np.arange(sizes[size])
        longer = history[:, None] * vocabulary + tokens
        target = offsets[size + 1] + longer if size + 1 < order else offsets[size] + longer % sizes[size]
        successors[offsets[size] + history[:, None], tokens, 0] = target
    if end_token is not None:
        successors[:, end_token] = END
    return _deterministic(name, length, np.zeros(1, dtype=np.int64), np.ones(1), successors, reward, tree=False)


def mdp(
    states: int = 5,
    actions: int = 3,
    horizon: int = 3,
    *,
    branches: int = 2,
    seed: int = 0,
    start: np.ndarray | None = None,
    name: str = "mdp",
) -> Environment:
    """Draw a random decision process; transition probabilities are Dirichlet(1), rewards standard normal.

    Args:
        states: Number S of states (contexts).
        actions: Number of actions (tokens).
        horizon: Number of steps.
        branches: Number of states that an action may lead to.
        seed: Seed of dynamics and rewards.
        start: Distribution (S,) of the first state (default: uniform over the first two).
        name: Name for messages.

    Raises:
        InvalidEnvironmentError: There is no action, or `branches` is not between 1 and `states`.
    """
    if not 1 <= branches <= states or actions < 1:
        raise InvalidEnvironmentError(
            f"environment {name!r}: needs at least one action and 1 to {states} branches, not {actions} and {branches}"
        )
    generator = np.random.default_rng(seed)
    first = generator.integers(states, size=(states, actions, 1))
    stride = generator.integers(1, max(states // branches, 1) + 1, size=(states, actions, 1))
    successors = (first + stride * np.arange(branches)) % states
    probabilities = generator.dirichlet(np.ones(branches), size=(states, actions))
    if start is None:
        start = np.zeros(states)
        start[: min(2, states)] = 1 / min(2, states)
    return tabular(
        successors, probabilities, generator.standard_normal((states, actions)), horizon, start=start, name=name
    )


def tabular(
    successors: np.ndarray,
    probabilities: np.ndarray,
    reward: np.ndarray,
    horizon: int,
    *,
    start: np.ndarray,
    name: str = "mdp",
) -> Environment:
    """Build a decision process from sparse dynamics.

    Args:
        successors: States (S, A, K) int to which an action may lead; −1 ends the rollout.
        probabilities: Probabilities (S, A, K) of the successors; entries of probability 0 are ignored.
        reward: Reward (S, A) of an action in a state.
        horizon: Number of steps.
        start: Distribution (S,) of the first state.
        name: Name for messages.

    Raises:
        InvalidEnvironmentError: Probabilities do not sum to 1, shapes disagree, or a successor is listed twice.
    """
    start = np.asarray(start, dtype=float)
    if start.shape != np.shape(successors)[:1]:
        raise InvalidEnvironmentError(
            f"environment {name!r}: `start` must give the {len(successors)} states' probabilities of coming first, "
            f"not have shape {start.shape}"
        )
    support = np.flatnonzero(start)
    return Environment(
        name=name,
        horizon=horizon,
        start=support,
        prompts=start[support],
        successors=np.asarray(successors, dtype=np.int64),
        probabilities=np.asarray(probabilities, dtype=float),
        reward=np.asarray(reward, dtype=float),
        tree=False,
    )


def _deterministic(
    name: str,
    length: int,
    start: np.ndarray,
    prompts: np.ndarray,
    successors: np.ndarray,
    reward: np.ndarray | None,
    *,
    tree: bool,
) -> Environment:
    reward = np.zeros(successors.shape[:2]) if reward is None else np.asarray(reward, dtype=float)
    return Environment(name, length, start, prompts, successors, np.ones(successors.shape), reward, tree)


def _check(name: str, vocabulary: int, length: int, end_token: int | None) -> None:
    if vocabulary < 1 or length < 1:
        raise InvalidEnvironmentError(
            f"environment {name!r}: vocabulary and length must be at least 1, not {vocabulary} and {length}"
        )
    if end_token is not None and not 0 <= end_token < vocabulary:
        raise InvalidEnvironmentError(
            f"environment {name!r}: the end token must lie in 0 … {vocabulary - 1}, not {end_token}"
        )


def _check_size(name: str, vocabulary: int, fan: int, depths: int, prompts: int, remedy: str) -> None:
    """Refuse, before anything is built, more contexts than fit into memory: fanʰ for each history length h < depths."""
    with np.errstate(over="ignore"):
        trees = (np.float64(fan) ** depths - 1) / (fan - 1) if fan > 1 else depths
    contexts = float(trees) * prompts
    # Successors, probabilities, reward and a few tables of log-probs, of 8 bytes each.
    needed, allowed = contexts * vocabulary * 8 * 10, memory_limit()
    if needed > allowed:
        raise InvalidEnvironmentError(
            f"environment {name!r} would have {contexts:.6g} contexts of {vocabulary} tokens, which need about "
            f"{needed / 2**30:.3g} GiB; {allowed / 2**30:.3g} GiB are allowed. {remedy}"
        )


def of_choices(
    vocabulary: int,
    length: int,
    choices: Sequence[int],
    masked: Sequence[int] = (),
    name: str = "choices",
    options: int | None = None,
) -> tuple[Environment, Paths, np.ndarray]:
    """Return sequences whose tokens are chosen at some positions and are 0 at all others, and those rollouts.

    Contexts are a time step and the choices before it. At the other positions a policy is to be all but certain, or
    each token stands for all (`OfSome.alike`).

    Args:
        vocabulary: Number of tokens, V.
        length: Tokens of a rollout.
        choices: Positions at which tokens are chosen.
        masked: Positions at which the rollouts are not live, as tool output is not.
        name: Name for messages.
        options: Number of tokens that are possible at a choice, the first ones (default: all).

    Returns:
        The environment, without rewards, of C contexts; its options^choices rollouts; and which contexts (C,) are
        choices.
    """
    options = options or vocabulary
    counts = [options ** sum(choice < step for choice in choices) for step in range(length)]
    first, steps = np.cumsum([0, *counts]), np.repeat(np.arange(length), counts)
    successors = np.full((len(steps), vocabulary, 1), END, dtype=np.int64)
    many = options ** len(choices)
    tokens, contexts = np.zeros((2, many, length), dtype=np.int64)
    tokens[:, list(choices)] = np.arange(many)[:, None] // options ** np.arange(len(choices))[::-1] % options
    for step in range(length - 1):
        history = np.arange(counts[step])[:, None]
        chosen = step in choices
        each = np.minimum(np.arange(vocabulary), options - 1)
        onward = options * history + each if chosen else np.repeat(history, vocabulary, axis=1)
        successors[first[step] : first[step + 1], :, 0] = first[step + 1] + onward
        contexts[:, step + 1] = successors[contexts[:, step], tokens[:, step], 0]
    nothing, certain = np.zeros(many, dtype=np.int64), np.ones(successors.shape)
    reward = np.zeros((len(steps), vocabulary))
    environment = Environment(name, length, nothing[:1], np.ones(1), successors, certain, reward, tree=True)
    live = np.ones(tokens.shape, dtype=bool)
    live[:, list(masked)] = False
    rollouts = Paths(np.where(live, contexts, 0), np.where(live, tokens, 0), live, nothing, nothing.astype(float))
    return environment, rollouts, np.isin(steps, choices)
