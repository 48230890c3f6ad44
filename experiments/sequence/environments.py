"""The environments of this experiment, and the closed form of what a token brings later in one of them.

A *persistent* bigram: with chance κ, the steering, a token is followed by itself; else by a draw from b that no context
has a say in,

    π(v|c) = (1 − κ)·b(v) + κ·1{v = c},    ref(v|c) = (1 − κ)·r(v) + κ·R(v|c),

so that both are context-free at κ = 0, and at κ = 1 the context decides everything. What was said n tokens ago
is still there with chance κⁿ; with k(c) the next-token KL in context c and k̄ its mean under b, a token v that n more
tokens follow brings W(n)·(k(v) − k̄) beyond what any token brings, W(n) = (1 − κⁿ)/(1 − κ).
"""

import numpy as np

from kltest.environments import Instance, ngram, sequence
from kltest.environments.policies import table

from ..arrays import generator


def persistent(vocabulary: int, length: int, steering: float, seed: int) -> Instance:
    """The persistent bigram; b, r and the rows of R are softmaxes of standard normal logits."""
    drawn = generator("persistent", vocabulary, seed)
    b, r, rows = (np.exp(table(drawn.standard_normal((size, vocabulary)))) for size in (1, 1, vocabulary))
    policy = np.concatenate([b, (1 - steering) * b + steering * np.eye(vocabulary)])
    reference = np.concatenate([r, (1 - steering) * r + steering * rows])
    return Instance.of(ngram(vocabulary, length, 2), np.log(policy), np.log(reference))


def memory(steering: float, tokens: np.ndarray) -> np.ndarray:
    """W(n) = (1 − κⁿ)/(1 − κ): of how many tokens' KL a token decides, where n follow."""
    return (1 - steering**tokens) / (1 - steering)


def future_in_closed_form(instance: Instance, steering: float) -> np.ndarray:
    """(C, V) `future_reverse_kl` of a persistent bigram, with neither a recursion over contexts nor enumeration."""
    horizon = instance.environment.horizon
    chances, u = np.exp(instance.policy), instance.policy - instance.reference
    awaits = (chances * u).sum(axis=1)[1:]
    start = memory(steering, np.array([horizon - 1.0]))[0]
    # The first context is visited once, and each of the others as often as b draws it from then on.
    visits = memory(steering, np.arange(horizon - 1.0)).sum() * chances[0]
    weight = np.concatenate([[start], visits])
    return weight[:, None] * chances * (awaits - (chances * awaits).sum(axis=1, keepdims=True))


def prefixes(condition: str, vocabulary: int, length: int, seed: int) -> Instance:
    """Policies of whole prefixes: which of the two sees its context, or both through one relabelling of the tokens."""
    environment = sequence(vocabulary, length)
    drawn = generator("prefixes", vocabulary, length, seed)
    free = [np.repeat(drawn.standard_normal((1, vocabulary)), environment.n_contexts, axis=0) for _ in range(2)]
    bound = [drawn.standard_normal((environment.n_contexts, vocabulary)) for _ in range(2)]
    relabelling = np.stack([drawn.permutation(vocabulary) for _ in range(environment.n_contexts)])
    policy, reference = {
        "both context-free": (free[0], free[1]),
        "policy context-free": (free[0], bound[1]),
        "reference context-free": (bound[0], free[1]),
        "relabelled": tuple(np.take_along_axis(logits, relabelling, axis=1) for logits in free),
        "neither": (bound[0], bound[1]),
    }[condition]
    return Instance.of(environment, policy, reference)


def blind_root(chance: float, departure: float) -> Instance:
    """Two binary tokens: the root gives its second token the same chance as the reference; after it awaits a KL.

    After the first token the policy is the reference; after the second it is as far from a fair coin as `departure`.
    """
    root = np.log([1 - chance, chance])
    low, high = 0.0, 60.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if coin_kl(middle) < departure else (low, middle)
    fair = np.zeros(2)
    return Instance.of(sequence(2, 2), np.stack([root, fair, [0.0, low]]), np.stack([root, fair, fair]))


def coin_kl(logit: float) -> float:
    """KL of a coin with this logit to a fair one."""
    log_probs = table(np.array([[0.0, logit]]))[0]
    return float((np.exp(log_probs) * (log_probs + np.log(2))).sum())
