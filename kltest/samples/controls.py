"""Estimators of known expectation that are sampled beside a loss, to take away the noise that both share.

Control variates: Σ_k c_k·(z_k − E[z_k]) is subtracted from each sample x of a gradient, where z_k is the gradient of a
well-known estimator on the same rollouts. The expectation stays that of x, whatever the coefficients, as long as they
come from earlier samples only; they are fitted by least squares. No noise is left of a loss that is one of these
estimators, or a sum of some.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kltest.environments import Instance, Paths
from kltest.errors import InvalidEnvironmentError
from kltest.moments.batches import joint_paths
from kltest.moments.projection import each_gradient
from kltest.truth import combine


class Along:
    """Ingredients of known estimators, (N, T) and zero at padded positions.

    Attributes:
        live: 1 on tokens.
        u: log π/ref of the token, in nats.
        ratio: π/μ of the token.
        prefix_ratio: π/μ of the tokens up to it, itself included.
        before: π/μ of the tokens before it.
        whole_ratio: π/μ of all tokens of the rollout.
        kl: KL(π‖ref) of the next token, in nats.
        moves: (N, T, V) π·u, the weights of next-token log-probs in the gradient of `kl`.
    """

    def __init__(self, instance: Instance, paths: Paths, sampler: str) -> None:
        def chosen(table: np.ndarray) -> np.ndarray:
            return np.where(paths.mask, paths.chosen(table), 0.0)

        log_ratio = chosen(instance.policy - instance.behaviour(sampler))
        log_ratio[np.isposinf(log_ratio)] = 0.0  # of a token that is never drawn: its rollouts weigh nothing
        passed = log_ratio.cumsum(axis=1)
        moves = np.exp(instance.policy) * (instance.policy - instance.reference)
        self.live = paths.mask.astype(float)
        self.u = chosen(instance.policy - instance.reference)
        self.ratio = np.where(paths.mask, np.exp(log_ratio), 0.0)
        self.prefix_ratio = np.where(paths.mask, np.exp(passed), 0.0)
        self.before = np.where(paths.mask, np.exp(passed - log_ratio), 0.0)
        self.whole_ratio = np.exp(passed[:, -1:]) * paths.mask
        self.moves = np.where(paths.mask[..., None], paths.everything(moves), 0.0)
        self.kl = self.moves.sum(axis=2)


def from_here(cost: np.ndarray) -> np.ndarray:
    """(N, T) Σ_{s ≥ t} cost_s."""
    return cost[:, ::-1].cumsum(axis=1)[:, ::-1]


def before(cost: np.ndarray) -> np.ndarray:
    """(N, T) Σ_{s < t} cost_s."""
    return cost.cumsum(axis=1) - cost


Names = dict[str, float]


ZERO: Names = {"zero": 1.0}
REVERSE: Names = {"reverse_kl": 1.0}
LOCAL: Names = {"local_reverse_kl": 1.0}
AT_SAMPLER: Names = {"local_reverse_kl@sampler": 1.0}
SQUARES: Names = {"squared_log_ratio_sum": 1.0, "local_reverse_kl": -1.0}
FORWARD: Names = {"forward_kl": 1.0}

# Weights of the estimators Σ_t g_t·weight_t (if they are (N, T, V), the sum is over all next tokens as well), and their
# expectations under the current sampler, None if ratios of 1 make two of them equal, and under a stale one.
KNOWN: dict[str, tuple[Callable[[Along], np.ndarray], Names | None, Names]] = {
    "score": (lambda a: a.live, ZERO, {"from_sampler_kl": -1.0}),
    "token ratio": (lambda a: a.ratio, None, ZERO),
    "sequence ratio": (lambda a: a.whole_ratio, None, ZERO),
    "k2-loss": (lambda a: a.prefix_ratio * a.u, LOCAL, LOCAL),
    "k2-loss, token ratio": (lambda a: a.ratio * a.u, None, AT_SAMPLER),
    "k3-loss, token ratio": (
        lambda a: -a.ratio * np.exp(-a.u),
        {"local_forward_kl": 1.0},
        {"local_forward_kl@sampler": 1.0},
    ),
    "k3-loss-sequence": (lambda a: -a.whole_ratio * np.exp(-a.u.sum(axis=1, keepdims=True)), FORWARD, FORWARD),
    "k1-reward-to-go": (lambda a: from_here(a.prefix_ratio * a.u), REVERSE, REVERSE),
    "k2-reward-to-go": (lambda a: from_here(a.prefix_ratio * a.u**2 / 2), SQUARES, SQUARES),
    "past log-ratios": (lambda a: a.prefix_ratio * before(a.u), ZERO, ZERO),
    "past squares": (lambda a: a.prefix_ratio * before(a.u**2), ZERO, ZERO),
    "full-loss": (lambda a: a.moves, LOCAL, AT_SAMPLER),
    "full-reward": (
        lambda a: from_here(a.before * a.kl) - a.before * a.kl,
        {"future_reverse_kl": 1.0},
        {"future_reverse_kl": 1.0},
    ),
}


# Costs (N,) of a rollout, as in baselines. The mean cost of a batch times its mean score has expectation
# E[cost·score]/B if rollouts are drawn from the policy: one rollout's cost is independent of another's score.
COSTS: dict[str, tuple[Callable[[Along], np.ndarray], Names]] = {
    "mean log-ratio": (lambda a: a.u.sum(axis=1), REVERSE),
    "mean square": (lambda a: (a.u**2).sum(axis=1) / 2, SQUARES),
}


class Controls:
    """Estimators of known expectation on batches of `size` rollouts."""

    def __init__(self, instance: Instance, sampler: str, size: int = 1, *, known: Mapping[str, Any] = KNOWN) -> None:
        self.instance = instance
        self.sampler = sampler
        self.size = size
        current = sampler == "current"
        self.means = self._expectations({name: means[not current] for name, (_, *means) in known.items()})
        products = {name: mean for name, (_, mean) in COSTS.items()} if known and current and size > 1 else {}
        self.products = {name: mean / size for name, mean in self._expectations(products).items()}

    def __len__(self) -> int:
        return len(self.means) + len(self.products)

    def _expectations(self, named: Mapping[str, Names | None]) -> dict[str, np.ndarray]:
        found = {}
        for name, mean in named.items():
            try:
                if mean is not None:
                    found[name] = combine(mean, self.instance).ravel()
            except InvalidEnvironmentError:  # an expectation beyond the range of numbers takes no noise away
                continue
        return found

    def samples(self, paths: Paths) -> np.ndarray:
        """(n, K, C·V) each estimator minus its expectation, for every `size` consecutive rollouts."""
        along = Along(self.instance, paths, self.sampler)
        rows = np.arange(len(paths)).reshape(-1, self.size)
        batches = joint_paths(paths, rows, np.zeros(len(rows)))
        drawn = np.empty((len(rows), len(self), self.instance.policy.size))
        for index, (name, mean) in enumerate(self.means.items()):
            drawn[:, index] = self._gradients(batches, KNOWN[name][0](along)) - mean
        if self.products:
            score = self._gradients(batches, along.live)
        for index, (name, mean) in enumerate(self.products.items(), len(self.means)):
            cost = COSTS[name][0](along).reshape(-1, self.size).mean(axis=1)
            drawn[:, index] = cost[:, None] * score - mean
        return drawn

    def _gradients(self, batches: Paths, weight: np.ndarray) -> np.ndarray:
        """(n, C·V) the mean over each batch of its rollouts' gradients, of weights (N, T) or (N, T, V)."""
        each = weight.reshape(len(batches), -1, *weight.shape[2:]) / self.size
        leaves = (each, None) if weight.ndim == 2 else (None, each)
        return each_gradient(batches, self.instance.policy, *leaves).reshape(len(batches), -1)
