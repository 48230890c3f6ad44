"""The exact example in the words of every gradient check, computed again by hand from the table it describes."""

from math import log, prod, sqrt

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
    "KL509": [TRUTH],
}


def test_truth_is_log_4():
    assert pytest.approx(log(4)) == TRUTH


@pytest.mark.parametrize("code", NUMBERS)
def test_the_numbers_of_the_example(code):
    example = CHECKS[code].example
    for number in NUMBERS[code]:
        shown = {f"{number:.{digits}f}".replace("-", "−") for digits in (3, 6)}
        # Whole numbers stand without decimals, before the end of a clause.
        shown |= {f" {round(number)},", f" {round(number)}."} if abs(number - round(number)) < 1e-12 else set()
        assert any(text in example for text in shown), f"{code} does not show {number}: {example}"
