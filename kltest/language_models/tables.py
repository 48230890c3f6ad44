"""Language models as tables: the logits that a model computes in every context of an environment.

The table stays connected to the model's parameters. Everything that is known exactly about gradients with respect to
logits is then known with respect to parameters by one backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.environments import END, Environment
from kltest.errors import UsageError

Prompts = Sequence[Sequence[int]]


def tabulate(model: Callable[..., Any], environment: Environment, *, prompts: Prompts | None = None) -> Tensor:
    """Return the logits of a causal language model in every context of a token environment.

    Args:
        model: Maps ids (B, L) to logits (B, L, V or more), or to an object with such `.logits`. Logits of ids from V on
            are dropped.
        environment: A bandit, sequence or ragged environment with C contexts and V tokens.
        prompts: Ids before the rollouts of each prompt; by default prompt p is the single id V + p.

    Returns:
        (C, V) float64 with their graph; 0 in contexts that no rollout visits.

    Raises:
        UsageError: Contexts of the environment are not prefixes, the number of prompts is wrong, the output has
            another shape, or the model gives different logits for the same input.
    """
    if prompts is None:
        prompts = [[environment.vocabulary + index] for index in range(len(environment.start))]
    if not environment.tree or environment.successors.shape[2] != 1:
        raise UsageError(
            f"environment {environment.name!r} shares contexts between prefixes, so that a model over tokens is no "
            "policy on it; use bandit, sequence or ragged"
        )
    if len(prompts) != len(environment.start):
        raise UsageError(
            f"environment {environment.name!r} has {len(environment.start)} prompts; {len(prompts)} were given"
        )
    if min(len(prompt) for prompt in prompts) < 1:
        raise UsageError("a prompt needs at least one token id, from which the first token of a rollout is predicted")
    rows: list[Tensor] = []
    places: list[np.ndarray] = []
    for contexts, prefixes in _prefixes(environment, prompts):
        rows.append(_last_logits(model, prefixes, environment.vocabulary))
        places.append(contexts)
    _, first = next(_prefixes(environment, prompts))
    if not torch.equal(rows[0].detach(), _last_logits(model, first, environment.vocabulary)):
        raise UsageError("the module gives different logits for the same tokens; put it into evaluation mode")
    found = torch.cat(rows)
    empty = torch.zeros((environment.n_contexts, environment.vocabulary), dtype=found.dtype)
    return empty.index_copy(0, torch.from_numpy(np.concatenate(places)), found)


def _prefixes(environment: Environment, prompts: Prompts) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Contexts (n,) and the ids (n, L) that lead to them, for one prompt and length at a time."""
    for start, prompt in zip(environment.start, prompts, strict=True):
        contexts, tokens = np.array([start]), np.array([prompt], dtype=np.int64)
        for _ in range(environment.horizon):
            yield contexts, torch.from_numpy(tokens)
            parent, token = np.nonzero(environment.successors[contexts, :, 0] != END)
            if not len(parent):
                break
            tokens = np.concatenate([tokens[parent], token[:, None]], axis=1)
            contexts = environment.successors[contexts[parent], token, 0]


def _last_logits(model: Callable[..., Any], tokens: Tensor, vocabulary: int) -> Tensor:
    answer = model(tokens)
    logits = getattr(answer, "logits", answer)
    if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape or logits.shape[2] < vocabulary:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UsageError(
            f"the module must map token ids {tuple(tokens.shape)} to logits {(*tokens.shape, vocabulary)}, or to an "
            f"object with such .logits; it gave {shape}"
        )
    return logits[:, -1, :vocabulary].to(torch.float64)
