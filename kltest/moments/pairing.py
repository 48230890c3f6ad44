"""Estimators of known expectation that are sampled beside a loss, to take away the noise that both share.

From each sample x of a gradient Σ_k c_k·(z_k − E[z_k]) is subtracted, where z_k is what a well-known estimator gives on
the same rollouts. Whatever the coefficients, the expectation stays that of x as long as they come from earlier samples
alone; they are those of least squares. A loss that is one of these estimators, or a sum of some, is left without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kltest.environments import Instance, Paths
from kltest.errors import InvalidEnvironmentError
from kltest.moments.projection import each_gradient
from kltest.truth import combine

# Directions in which the known estimators vary less than this share of their largest variance are rounding.
RANK = 1e-10


@dataclass(frozen=True)
class Along:
    """What known estimators are made of, (N, T) and zero where padded.

    `live` = 1 on tokens; `u` = log π/ref; π/μ of the token is `ratio`, of the tokens up to it `prefix_ratio`, of those
    before it `before`, of them all `whole_ratio`; `kl` = KL(π‖ref) of the next token, and `moves` (N, T, V) = π·u, by
    which ∇KL of the next token weights its log-probs.
    """

    live: np.ndarray
    u: np.ndarray
    ratio: np.ndarray
    prefix_ratio: np.ndarray
    before: np.ndarray
    whole_ratio: np.ndarray
    kl: np.ndarray
    moves: np.ndarray

    @classmethod
    def of(cls, instance: Instance, paths: Paths, sampler: str) -> Along:
        def chosen(table: np.ndarray) -> np.ndarray:
            return np.where(paths.mask, paths.chosen(table), 0.0)

        log_ratio = chosen(instance.policy - instance.behaviour(sampler))
        passed = log_ratio.cumsum(axis=1)
        moves = np.exp(instance.policy) * (instance.policy - instance.reference)
        visited = np.where(paths.mask[..., None], paths.everything(moves), 0.0)
        return cls(
            live=paths.mask.astype(float),
            u=chosen(instance.policy - instance.reference),
            ratio=np.where(paths.mask, np.exp(log_ratio), 0.0),
            prefix_ratio=np.where(paths.mask, np.exp(passed), 0.0),
            before=np.where(paths.mask, np.exp(passed - log_ratio), 0.0),
            whole_ratio=np.exp(passed[:, -1:]) * paths.mask,
            kl=visited.sum(axis=2),
            moves=visited,
        )


def from_here(cost: np.ndarray) -> np.ndarray:
    """Σ_{s ≥ t} of (N, T)."""
    return cost[:, ::-1].cumsum(axis=1)[:, ::-1]


def before(cost: np.ndarray) -> np.ndarray:
    """Σ_{s < t} of (N, T)."""
    return cost.cumsum(axis=1) - cost


Names = dict[str, float]


@dataclass(frozen=True)
class Known:
    """Σ_t g_t·weight_t, or with a (N, T, V) weight that of all next tokens; its expectation under each sampler.

    None where it is left out: where ratios are 1 some are others once more.
    """

    weight: Callable[[Along], np.ndarray]
    current: Names | None
    stale: Names


ZERO: Names = {"zero": 1.0}
REVERSE: Names = {"reverse_kl": 1.0}
LOCAL: Names = {"local_reverse_kl": 1.0}
AT_SAMPLER: Names = {"local_reverse_kl@sampler": 1.0}
SQUARES: Names = {"squared_log_ratio_sum": 1.0, "local_reverse_kl": -1.0}
FORWARD: Names = {"forward_kl": 1.0}

KNOWN: dict[str, Known] = {
    "score": Known(lambda a: a.live, ZERO, {"from_sampler_kl": -1.0}),
    "token ratio": Known(lambda a: a.ratio, None, ZERO),
    "sequence ratio": Known(lambda a: a.whole_ratio, None, ZERO),
    "k2-loss": Known(lambda a: a.prefix_ratio * a.u, LOCAL, LOCAL),
    "k2-loss, token ratio": Known(lambda a: a.ratio * a.u, None, AT_SAMPLER),
    "k3-loss, token ratio": Known(
        lambda a: -a.ratio * np.exp(-a.u), {"local_forward_kl": 1.0}, {"local_forward_kl@sampler": 1.0}
    ),
    "k3-loss-sequence": Known(lambda a: -a.whole_ratio * np.exp(-a.u.sum(axis=1, keepdims=True)), FORWARD, FORWARD),
    "k1-reward-to-go": Known(lambda a: from_here(a.prefix_ratio * a.u), REVERSE, REVERSE),
    "k2-reward-to-go": Known(lambda a: from_here(a.prefix_ratio * a.u**2 / 2), SQUARES, SQUARES),
    "past log-ratios": Known(lambda a: a.prefix_ratio * before(a.u), ZERO, ZERO),
    "past squares": Known(lambda a: a.prefix_ratio * before(a.u**2), ZERO, ZERO),
    "full-loss": Known(lambda a: a.moves, LOCAL, AT_SAMPLER),
    "full-reward": Known(
        lambda a: from_here(a.before * a.kl) - a.before * a.kl,
        {"future_reverse_kl": 1.0},
        {"future_reverse_kl": 1.0},
    ),
}


# What baselines are made of: in a batch the mean of a cost times the mean score, of expectation E[cost·score]/B where
# rollouts are drawn from the policy, since a rollout's cost tells nothing of another's score.
COSTS: dict[str, tuple[Callable[[Along], np.ndarray], Names]] = {
    "mean log-ratio": (lambda a: a.u.sum(axis=1), REVERSE),
    "mean square": (lambda a: (a.u**2).sum(axis=1) / 2, SQUARES),
}


class Pairing:
    """Known estimators on given rollouts, in batches of `size`, and the coefficients that suit what was seen."""

    def __init__(self, instance: Instance, sampler: str, size: int = 1) -> None:
        self.instance = instance
        self.sampler = sampler
        self.size = size
        wanted = {name: known.current if sampler == "current" else known.stale for name, known in KNOWN.items()}
        self.means = self._expectations(wanted)
        products = {name: mean for name, (_, mean) in COSTS.items()} if sampler == "current" and size > 1 else {}
        self.products = {name: mean / size for name, mean in self._expectations(products).items()}
        self._count = 0
        self._sums: np.ndarray | float = 0.0
        self._gram: np.ndarray | float = 0.0

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
        along = Along.of(self.instance, paths, self.sampler)
        drawn = np.empty((len(paths) // self.size, len(self), self.instance.policy.size))
        for index, (name, mean) in enumerate(self.means.items()):
            drawn[:, index] = self._of_batches(paths, KNOWN[name].weight(along)) - mean
        if self.products:
            score = self._of_batches(paths, along.live)
        for index, (name, mean) in enumerate(self.products.items(), len(self.means)):
            cost = COSTS[name][0](along).reshape(-1, self.size).mean(axis=1)
            drawn[:, index] = cost[:, None] * score - mean
        return drawn

    def _of_batches(self, paths: Paths, weight: np.ndarray) -> np.ndarray:
        """(n, C·V) the mean over a batch of each rollout's gradient, of weights (N, T) or (N, T, V)."""
        # A batch is one long rollout whose tokens share contexts.
        count = len(paths) // self.size
        contexts, tokens, mask = (part.reshape(count, -1) for part in (paths.contexts, paths.tokens, paths.mask))
        long = Paths(contexts, tokens, mask, paths.prompt[:: self.size], np.zeros(count))
        each = weight.reshape(count, -1, *weight.shape[2:]) / self.size
        leaves = (each, None) if weight.ndim == 2 else (None, each)
        return each_gradient(long, self.instance.policy, *leaves).reshape(count, -1)

    def learn(self, gradients: np.ndarray, known: np.ndarray) -> None:
        """Take in gradients (n, C·V) and the known estimators (n, K, C·V) on the same rollouts."""
        both = np.concatenate([known, gradients[:, None]], axis=1)
        self._count += len(both)
        self._sums = self._sums + both.sum(axis=0)
        flat = both.swapaxes(0, 1).reshape(both.shape[1], -1)
        self._gram = self._gram + flat @ flat.T

    @property
    def coefficients(self) -> np.ndarray:
        """(K,) of least squares, from what was learnt so far."""
        sums = np.asarray(self._sums)
        covariance = self._gram - sums @ sums.T / self._count
        scale = np.sqrt(np.diag(covariance)[:-1].clip(min=0.0))
        scale = np.where(scale > 0, scale, 1.0)
        normal, shared = covariance[:-1, :-1] / np.outer(scale, scale), covariance[:-1, -1] / scale
        return np.linalg.lstsq(normal, shared, rcond=RANK)[0] / scale
