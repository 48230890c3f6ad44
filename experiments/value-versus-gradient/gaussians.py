"""Two Gaussians, in closed form: a policy N(d, s²) and its reference N(0, 1).

With y = d + s·e and e standard normal, u = log π − log ref = −log s − e²/2 + (d + s·e)²/2 is a polynomial in e, and so
are the scores g = (e/s, e² − 1) of the mean and of the logarithm of the width. What an estimator averages is therefore
a sum of polynomials times powers of w = e^(−u), and the expectation of each is a Gaussian integral:

    E[P(e)·w^j] = C·E[P(x)],  x ~ N(−j·b/p, 1/p),  p = 1 + 2·j·c,  for u = a + b·e + c·e²,

which is infinite where p ≤ 0: the reference has too much probability where the policy has almost none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.polynomial import Polynomial

PARTS = ("mean", "width")


@dataclass(frozen=True)
class Gaussians:
    """The policy is `width` times as wide as the reference, and its mean is `shift` reference widths away."""

    shift: float
    width: float = 1.0

    @classmethod
    def at(cls, kl: float, width: float = 1.0) -> "Gaussians":
        """At that KL(π‖ref); ValueError where the width alone is further away than that."""
        square = 2 * (kl - cls(0.0, width).kl)
        if square < -1e-12:
            raise ValueError(f"a width of {width:g} alone is a KL of {cls(0.0, width).kl:g}, more than {kl:g}")
        return cls(math.sqrt(max(square, 0.0)), width)

    @property
    def kl(self) -> float:
        """KL(π‖ref) = −log s + (s² + d² − 1)/2."""
        return -math.log(self.width) + (self.width**2 + self.shift**2 - 1) / 2

    @property
    def truth(self) -> dict[str, float]:
        """∇KL(π‖ref): d with respect to the mean, s² − 1 with respect to the logarithm of the width."""
        return {"mean": self.shift, "width": self.width**2 - 1}

    @property
    def log_ratio(self) -> Polynomial:
        """u, as a polynomial in e."""
        d, s = self.shift, self.width
        return Polynomial([d * d / 2 - math.log(s), d * s, (s * s - 1) / 2])

    @property
    def scores(self) -> dict[str, Polynomial]:
        """∇ log π, part by part."""
        return {"mean": Polynomial([0.0, 1 / self.width]), "width": Polynomial([-1.0, 0.0, 1.0])}

    def expectation(self, terms: "Terms") -> float:
        """E_π of a sum of polynomials times powers of w; inf where it does not exist."""
        return sum(self._gaussian_integral(power, polynomial) for power, polynomial in terms.powers.items())

    def _gaussian_integral(self, power: int, polynomial: Polynomial) -> float:
        a, b, c = self.log_ratio.coef
        precision = 1 + 2 * power * c
        if precision <= 0:
            return math.inf
        mean, variance = -power * b / precision, 1 / precision
        scale = math.exp(-power * a + mean**2 * precision / 2) * math.sqrt(variance)
        moments = [1.0, mean]
        while len(moments) < len(polynomial.coef):
            moments.append(mean * moments[-1] + (len(moments) - 1) * variance * moments[-2])
        return scale * float(np.dot(polynomial.coef, moments[: len(polynomial.coef)]))


@dataclass(frozen=True)
class Terms:
    """Σ_j P_j(e)·w^j, as {j: P_j}."""

    powers: Mapping[int, Polynomial]

    def __add__(self, other: "Terms") -> "Terms":
        found = dict(self.powers)
        for power, polynomial in other.powers.items():
            found[power] = found.get(power, Polynomial([0.0])) + polynomial
        return Terms(found)

    def __mul__(self, other: "Terms") -> "Terms":
        total = Terms({})
        for one, left in self.powers.items():
            for two, right in other.powers.items():
                total += Terms({one + two: left * right})
        return total


def value_terms(estimator: str, pair: Gaussians) -> Terms:
    """k1 = u, k2 = u²/2, k3 = w − 1 + u (Schulman 2020)."""
    u = pair.log_ratio
    return Terms({"k1-loss": {0: u}, "k2-loss": {0: u**2 / 2}, "k3-loss": {0: u - 1, 1: Polynomial([1.0])}}[estimator])


def derivative_terms(estimator: str, pair: Gaussians) -> Terms:
    """Factor of the score if the value is differentiated: ∂k/∂u = 1, u and 1 − w."""
    one, u = Polynomial([1.0]), pair.log_ratio
    return Terms({"k1-loss": {0: one}, "k2-loss": {0: u}, "k3-loss": {0: one, 1: -one}}[estimator])


def gradient_terms(estimator: str, placement: str, part: str, pair: Gaussians) -> Terms:
    """The gradient of one sample: the derivative in the loss, the value in the reward, their sum in both."""
    weights = {
        "loss": lambda: derivative_terms(estimator, pair),
        "reward": lambda: value_terms(estimator, pair),
        "both": lambda: derivative_terms(estimator, pair) + value_terms(estimator, pair),
    }[placement]()
    return weights * Terms({0: pair.scores[part]})


def moments(terms: Terms, pair: Gaussians) -> tuple[float, float]:
    """Mean and variance of one sample."""
    mean = pair.expectation(terms)
    return mean, pair.expectation(terms * terms) - mean**2
