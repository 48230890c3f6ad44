"""The pair, and all of its sequences by what matters of them.

A policy that sees the last token only has the same gradient on two sequences with the same first token and the same
numbers of transitions 0→0, 0→1, 1→0 and 1→1. Those of one *type* are counted: with n zeros beyond the first of each of
r runs of zeros there are C(n + r − 1, r − 1) ways to place them, and likewise for ones. So an estimator that adds
up tokens, or multiplies such sums, is called on one sequence of each type: some hundreds, instead of 2²⁰.
"""

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
from scipy.optimize import brentq

from kltest.environments import Instance, Paths, ngram
from kltest.errors import InvalidEnvironmentError
from kltest.truth import value

from .settings import ANCHOR, DIRECTION, REFERENCE

# A scale at which every random direction has made the policy all but deterministic.
FURTHEST = 30.0


def at_distance(
    length: int, kl: float, hold: str = "kl", reference: np.ndarray | None = None, direction: np.ndarray | None = None
) -> Instance:
    """The pair at this KL of whole sequences: of this length, or where one pair is held, of the anchor's length.

    `reference` and `direction` (3, 2) are logits; the stated ones by default. Raises InvalidEnvironmentError if the
    direction does not lead so far away.
    """
    if reference is None or direction is None:
        ones = np.array(REFERENCE)
        reference = np.stack([np.log1p(-ones), np.log(ones)], axis=1)
        direction = np.stack([np.zeros(3), np.array(DIRECTION)], axis=1)

    def pair(scale: float, tokens: int) -> Instance:
        return Instance.of(ngram(2, tokens, 2), reference + scale * direction, reference)

    measured = length if hold == "kl" else ANCHOR
    if value("kl", pair(FURTHEST, measured)) < kl:
        raise InvalidEnvironmentError(
            f"in this direction {measured} tokens never come to a KL of {kl:g} from the reference"
        )
    scale = brentq(lambda scale: value("kl", pair(scale, measured)) - kl, 0.0, FURTHEST, xtol=1e-14, rtol=1e-14)
    return pair(scale, length)


@cache
def types(length: int) -> Paths:
    """One sequence of each type, the logarithm of how many there are as its weight."""
    rows = list(_types(length))
    tokens = np.array([_sequence(*row[:5]) for row in rows])
    return _paths(tokens, np.log(np.array([row[5] for row in rows], dtype=float)))


def types_of(paths: Paths) -> tuple[Paths, np.ndarray]:
    """One of the given rollouts for each type that occurs, and (N,) which of them each rollout is like."""
    length = paths.shape[1]
    cell = 2 * paths.contexts + paths.tokens
    counts = np.stack([(cell == one).sum(axis=1) for one in range(6)], axis=1)
    key = counts @ (length + 1) ** np.arange(6)
    _, first, like = np.unique(key, return_index=True, return_inverse=True)
    return paths.take(first), like


def _types(length: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """First token, transitions 0→0, 0→1, 1→0 and 1→1, and how many sequences have these."""
    for first in (0, 1):
        for up in range(length):
            for down in (up, up - 1) if first == 0 else (up, up + 1):
                left = length - 1 - up - down
                if down < 0 or left < 0:
                    continue
                zeros, ones = down + (first == 0), up + (first == 1)
                for stay in range(left + 1):
                    ways = _placed(stay, zeros) * _placed(left - stay, ones)
                    if ways:
                        yield first, stay, up, down, left - stay, ways


def _placed(tokens: int, runs: int) -> int:
    """In how many ways further tokens are shared out among runs."""
    return math.comb(tokens + runs - 1, runs - 1) if runs else int(tokens == 0)


def _sequence(first: int, stay0: int, up: int, down: int, stay1: int) -> list[int]:
    """All further zeros in the first run of zeros, all further ones in the first run of ones."""
    tokens, further = [first], [stay0, stay1]
    for _ in range(up + down + 1):
        here = tokens[-1]
        tokens += [here] * further[here] + [1 - here]
        further[here] = 0
    return tokens[:-1]


def _paths(tokens: np.ndarray, log_weight: np.ndarray) -> Paths:
    contexts = np.concatenate([np.zeros((len(tokens), 1), dtype=np.int64), 1 + tokens[:, :-1]], axis=1)
    return Paths(contexts, tokens, np.ones(tokens.shape, dtype=bool), np.zeros(len(tokens), dtype=np.int64), log_weight)
