"""Language models that are tables, and all units of an environment: what an audit samples, enumerated."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from kltest.auditing.passes import CutModel, Models
from kltest.language_models.generation import Rollouts
from kltest.language_models.language import LanguageModel


class Table(nn.Module):
    """A language model whose weights are the logits (C, V) of an environment; its one prompt is the id V."""

    def __init__(self, environment, logits):
        super().__init__()
        self.successors = torch.from_numpy(environment.successors[:, :, 0].copy())
        self.start, self.logits = int(environment.start[0]), nn.Parameter(torch.tensor(logits))

    def get_input_embeddings(self):
        return SimpleNamespace(num_embeddings=self.logits.shape[1] + 1)

    def forward(self, input_ids):
        context, rows = torch.full(input_ids.shape[:1], self.start), []
        for step in range(input_ids.shape[1]):
            if step:
                context = self.successors[context, input_ids[:, step]].clamp(min=0)
            rows.append(self.logits[context])
        return SimpleNamespace(logits=torch.stack(rows, 1))


def language(environment, logits):
    """A table as a language model; token 0 ends a rollout of a ragged environment."""
    return LanguageModel(Table(environment, logits), None, (environment.vocabulary,), 0)


def models(instance, *, full=False):
    """Policy and reference of an instance, and its sampler if that is known in full."""
    tables = instance.policy, instance.reference, instance.sampler
    cut = [CutModel(language(instance.environment, one)) for one in tables]
    return Models(cut[0], cut[1], cut[2] if full else None)


def rollouts(instance, rows, sampler="current", *, given=True):
    """Rollouts of an instance as a unit; the sampler's log-probs are `given` if it is another policy."""
    paths = instance.paths.take(np.asarray(rows))
    tokens, mask = torch.from_numpy(paths.tokens.copy()).long(), torch.from_numpy(paths.mask.copy())
    old = torch.from_numpy(paths.chosen(instance.sampler)) if sampler == "stale" and given else None
    prompts = torch.full((len(rows), 1), instance.environment.vocabulary)
    reward = torch.from_numpy(instance.environment.returns(paths))
    nothing, group = torch.zeros(mask.shape), torch.zeros(len(rows)).long()
    return Rollouts(prompts, prompts == prompts, tokens, mask, nothing, group, reward, old_logp=old)


def every_pair(instance, sampler):
    """Yield all pairs of rollouts, in order, with their probabilities."""
    chances = instance.rollout_weights(sampler)
    for pair in product(range(len(chances)), repeat=2):
        yield list(pair), float(chances[pair[0]] * chances[pair[1]])


class Signs:
    """Takes the signs off a sketch that compresses nothing."""

    def __init__(self, sketch):
        self.signs = torch.zeros(sketch.size, dtype=torch.float64)
        for weight in sketch.weights:
            sketch.fold(weight, torch.ones_like(weight), self.signs)

    def off(self, vector):
        return (vector * self.signs).numpy()
