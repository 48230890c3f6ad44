"""The exact example in the words of every check, computed again by hand from the table it describes."""

from itertools import product
from math import log, prod, sqrt

import numpy as np
import pytest

from kltest.checks import CHECKS

P, Q, MU, HALF = (0.8, 0.2), (0.5, 0.5), (0.6, 0.4), (0.5, 0.5)
U = tuple(log(p / q) for p, q in zip(P, Q, strict=True))
SCORE = (1 / P[0], -1 / P[1])  # d log π(a) / d π(first action)
TRUTH = sum(p * u * s for p, u, s in zip(P, U, SCORE, strict=True))


def under(sampler, *weights):
    """E over the sampler of score × the product of weights."""
    return sum(sampler[action] * SCORE[action] * prod(one[action] for one in weights) for action in (0, 1))


def ratio(sampler, low=0.0, high=1e9):
    return tuple(min(max(p / m, low), high) for p, m in zip(P, sampler, strict=True))


W = tuple(q / p for p, q in zip(P, Q, strict=True))
K3_SLOPE = tuple(1 - w for w in W)
ONE = (1.0, 1.0)
LOCAL_KL = P[0] * U[0] + P[1] * U[1]
SQUARE = log(1.6) ** 2 / 2
# Pairs of the two actions, both orders: the advantages of the normalised one are ±1/√2, of which ε takes its share.
DIFFERENT = 2 * P[0] * P[1]


def normalised(beta):
    spread = beta * (U[0] - U[1]) / sqrt(2)
    return DIFFERENT * (spread / (spread + 1e-4)) * (SCORE[0] - SCORE[1]) / 2 / sqrt(2)


POLICY, REFERENCE, CUT = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4]), np.array([0.625, 0.375, 0.0])
HEAD_U = np.log(POLICY / REFERENCE)


def at_logits(weights):
    """∂/∂θ of Σ_v weights_v log π_v, held weights: weights − π·Σ weights."""
    return list(weights - POLICY * weights.sum())


def truncated():
    """k2 on drawn tokens 0 and 1, through the truncated distribution's own score."""
    return sum(POLICY[v] * np.log(CUT[v] / REFERENCE[v]) * (np.eye(3)[v] - CUT) for v in (0, 1))


def of_the_tail():
    """E‖ĝ‖² in logits, ĝ = −w·(e_y − π), the share of the second action in it, and ‖∇KL(ref‖π)‖²."""
    rare, ref = np.array([0.99, 0.01]), np.array([0.5, 0.5])
    parts = rare * (ref / rare) ** 2 * 2 * (1 - rare) ** 2
    return [parts.sum(), parts[1] / parts.sum(), 2 * (rare[0] - ref[0]) ** 2]


def of_the_inefficient():
    """Variances over four rollouts written out; contexts are the root, after 0 and after 1, and two logits each."""
    policy = np.array([(0.6, 0.4), (0.6, 0.4), (0.5, 0.5)])
    u = np.log(policy / 0.5)
    kl = (policy * u).sum(axis=1, keepdims=True)
    chances, scores, both, blackwell = [], [], [], []
    for first, second in product((0, 1), repeat=2):
        after, score, exact = 1 + first, np.zeros((3, 2)), np.zeros((3, 2))
        chances.append(policy[0, first] * policy[after, second])
        for context, token in ((0, first), (after, second)):
            score[context] = np.eye(2)[token] - policy[context]
            exact[context] = policy[context] * (u[context] - kl[context])
        exact[0] += kl[after] * score[0]
        scores.append(score)
        both.append((u[0, first] + u[after, second] + 1) * score)
        blackwell.append(exact)

    def inner(left, right):
        return np.einsum("n,ncv,ncv->", chances, left, right)

    def noise(each):
        centred = each - np.einsum("n,ncv->cv", chances, each)
        return inner(centred, centred)

    baseline = inner(blackwell, scores) / inner(scores, scores)
    best = noise(np.array(blackwell) - baseline * np.array(scores))
    return [noise(np.array(both)), noise(np.array(blackwell)), round(noise(np.array(both)) / best, 1)]


NUMBERS = {
    "KL101": [TRUTH, under(P, ONE)],
    "KL102": [TRUTH, under(P, K3_SLOPE)],
    "KL103": [-TRUTH],
    "KL104": [TRUTH - under(P, K3_SLOPE), under(P, K3_SLOPE)],
    "KL105": [TRUTH, under(P, (1.0, -1.0))],
    "KL106": [2 * TRUTH],
    # At the root, d/dp of p·KL(after the first action) + (1 − p)·0.
    "KL201": [LOCAL_KL],
    "KL202": [TRUTH],
    "KL203": [TRUTH, TRUTH / 2],
    # Lengths of a batch of two: (1, 1), (1, 2), (2, 1), (2, 2); the end token is action 1, of length 1.
    "KL204": [
        TRUTH,
        sum(P[a] * P[b] * (U[a] * SCORE[a] + U[b] * SCORE[b]) / ((2 - a) + (2 - b)) for a in (0, 1) for b in (0, 1)),
    ],
    "KL301": [TRUTH, under(HALF, U)],
    "KL302": [TRUTH, under(MU, ratio(MU), K3_SLOPE), under(MU, ratio(MU), U)],
    "KL303": [0.5 * TRUTH, 0.8 * TRUTH],
    # E over the sampler's root of sqrt(π/μ) = Σ sqrt(π μ); the second token's own ratio is 1.
    "KL304": [0.5 * TRUTH, sqrt(0.5 * 0.8) * TRUTH, sqrt(0.5 * 0.2) * TRUTH],
    "KL305": [
        TRUTH,
        under(P, tuple(log(p / m) for p, m in zip(P, MU, strict=True))),
        under(P, tuple(log(m / q) for m, q in zip(MU, Q, strict=True))),
    ],
    "KL306": [TRUTH, under(HALF, ratio(HALF, 0.8, 1.2), U)],
    # With respect to the root's first probability: γ·(KL after the first − KL after the second).
    "KL205": [LOCAL_KL, 0.95 * LOCAL_KL],
    # The weight at the first token is the log-ratio over the number of tokens.
    "KL206": [log(0.4), log(0.4) / 3, log(0.4) / 2],
    # Groups of two that do not tie: both orders of one rollout each, half of the sum of their terms.
    "KL401": [TRUTH, DIFFERENT * (U[0] * SCORE[0] + U[1] * SCORE[1]) / 2],
    "KL402": [TRUTH, 0.75 * TRUTH],
    "KL403": [normalised(1.0), normalised(0.1), TRUTH, 0.1 * TRUTH],
    "KL404": [TRUTH],
    "KL501": [SQUARE, SQUARE + log(2) ** 2 / 2, log(2)],
    "KL502": [SQUARE],
    "KL503": [-5.0, -1000.0],
    "KL504": [sqrt(20)],
    "KL505": [SQUARE, log(0.5) ** 2 / 2],
    "KL506": [log(1.6), -log(1.6)],
    "KL507": [log(1.6), 2 * log(1.6)],
    "KL508": [0.0625],
    "KL509": [TRUTH],
    "KL510": [0.1 * TRUTH, 0.01 * TRUTH],
    "KL601": [LOCAL_KL, sum(p * u * u / 2 for p, u in zip(P, U, strict=True))],
    "KL602": [LOCAL_KL, 0.1 * LOCAL_KL],
    "KL603": [LOCAL_KL, 0.1 * LOCAL_KL],
    # The second action ends the rollout, with probability 0.2, and leaves one padded position.
    "KL604": [LOCAL_KL, LOCAL_KL + P[1], LOCAL_KL - P[1]],
    "KL701": [*at_logits(POLICY * HEAD_U), *at_logits(POLICY * (HEAD_U + 1) * [1, 1, 0])],
    "KL702": [TRUTH, 2 * (16 / 289) * log(16) / 0.16],
    "KL703": [*at_logits(POLICY * HEAD_U), *truncated()[:2]],
    "KL801": of_the_tail(),
    "KL802": of_the_inefficient(),
}


def test_truth_is_log_4():
    assert pytest.approx(log(4)) == TRUTH


@pytest.mark.parametrize("code", NUMBERS)
def test_the_numbers_of_the_example(code):
    example = CHECKS[code].example
    for number in NUMBERS[code]:
        shown = {f"{number:.{digits}f}".replace("-", "−") for digits in (1, 3, 4, 6)}
        # Whole numbers stand without decimals.
        shown |= {f" {number:.0f}{end}".replace("-", "−") for end in ",. "} if number == round(number) else set()
        assert any(text in example for text in shown), f"{code} does not show {number}: {example}"
