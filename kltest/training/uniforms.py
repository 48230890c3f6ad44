"""Each run's own stream of uniforms, drawn a stretch ahead while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

KEPT = 2**20
"""Uniforms in one stretch of all runs together."""


class Uniforms:
    """For every update `draws` times B uniforms of each run, in the order of its stream.

    The next stretch is drawn by a thread, which needs no interpreter while it draws: nothing depends on it but time.
    """

    def __init__(self, seeds: Sequence[int], draws: int, batch_size: int, updates: int) -> None:
        self._generators = [np.random.default_rng(seed) for seed in seeds]
        self._each, self._left = draws * batch_size, updates
        self._ahead = max(1, min(KEPT // (len(seeds) * self._each), updates))
        self._shape = (draws, batch_size, len(seeds))
        self._raw = np.empty((len(seeds), self._ahead * self._each))
        self._spare = np.empty((self._ahead, *self._shape))
        self._thread = ThreadPoolExecutor(1)
        self._coming: Future[int] = self._thread.submit(self._fill, min(self._ahead, updates))
        self._stretch = np.empty_like(self._spare)
        self._taken = self._filled = 0

    def take(self) -> np.ndarray:
        """(draws, B, R) of the next update; to be read before the one after the next stretch is begun."""
        if self._taken == self._filled:
            self._filled, self._taken = self._coming.result(), 0
            self._left -= self._filled
            self._stretch, self._spare = self._spare, self._stretch
            if self._left > 0:
                self._coming = self._thread.submit(self._fill, min(self._ahead, self._left))
        self._taken += 1
        return self._stretch[self._taken - 1]

    def _fill(self, updates: int) -> int:
        """Draw the spare stretch."""
        raw = self._raw[:, : updates * self._each]
        for own, generator in zip(raw, self._generators, strict=True):
            generator.random(out=own)
        np.copyto(self._spare[:updates].reshape(-1, self._shape[-1]), raw.T)
        return updates
