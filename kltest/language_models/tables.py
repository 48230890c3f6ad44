"""Policies that are torch modules: language models over a world's tokens, or anything over its contexts.

A module becomes the table of logits that it computes in each context, still connected to its parameters, so that
whatever is known exactly with respect to the table is known with respect to the parameters by one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kltest.environments import END, Environment, Instance
from kltest.errors import UsageError

Prompts = Sequence[Sequence[int]]


def tabulate(module: Callable[..., Any], environment: Environment, *, prompts: Prompts | None = None) -> Tensor:
    """(C, V) float64 logits of a causal language model in every context of a token world, with their graph.

    The module maps token ids (B, L) to next-token logits (B, L, ≥ V), or to an object with such `.logits`; what is
    said of tokens beyond the world's V is left out. `prompts` are the ids that stand before each prompt's rollouts;
    by default prompt p is the one id V + p. Contexts that no rollout visits have logits 0.

    Raises UsageError for a world whose contexts are no prefixes (see `tabulate_contexts`), for a wrong number of
    prompts, for an output of another shape, and for a module that gives different logits for the same input.
    """
    given = (
        [[environment.vocabulary + index] for index in range(len(environment.start))] if prompts is None else prompts
    )
    if not environment.tree or environment.successors.shape[2] != 1:
        raise UsageError(
            f"environment {environment.name!r} shares contexts between prefixes, so that a module over tokens is no "
            "policy on it; give a module over contexts (tabulate_contexts), or use a token world"
        )
    if len(given) != len(environment.start):
        raise UsageError(
            f"environment {environment.name!r} has {len(environment.start)} prompts; {len(given)} were given"
        )
    if min(len(prompt) for prompt in given) < 1:
        raise UsageError("a prompt needs at least one token id, from which the first token of a rollout is predicted")
    rows: list[Tensor] = []
    places: list[np.ndarray] = []
    for contexts, prefixes in _prefixes(environment, given):
        rows.append(_last_logits(module, prefixes, environment.vocabulary))
        places.append(contexts)
    if not torch.equal(rows[0].detach(), _last_logits(module, _first(environment, given), environment.vocabulary)):
        raise UsageError("the module gives different logits for the same tokens; put it into evaluation mode")
    return _scattered(torch.cat(rows), np.concatenate(places), environment.n_contexts)


def tabulate_contexts(module: Callable[[Tensor], Tensor], environment: Environment) -> Tensor:
    """(C, V) float64 logits of a module over contexts, (C,) int64 → (C, V), such as a policy over an MDP's states."""
    logits = module(torch.arange(environment.n_contexts))
    shape = (environment.n_contexts, environment.vocabulary)
    if tuple(logits.shape) != shape:
        raise UsageError(f"the module must map contexts to logits of shape {shape}; it gave {tuple(logits.shape)}")
    return logits.to(torch.float64)


def instance_of(
    environment: Environment, logits: Tensor, reference: Tensor | np.ndarray, sampler: Tensor | np.ndarray | None = None
) -> Instance:
    """The world with a module's logits (C, V) as its policy; the others may be logits of modules as well."""
    return Instance.of(environment, _plain(logits), _plain(reference), None if sampler is None else _plain(sampler))


def _plain(table: Tensor | np.ndarray) -> np.ndarray:
    return table.detach().numpy() if isinstance(table, Tensor) else table


def pull_back(gradient: np.ndarray, logits: Tensor, module: nn.Module) -> dict[str, np.ndarray]:
    """Jᵀ·gradient: from a gradient with respect to logits (C, V) to one with respect to a module's parameters.

    `logits` are the module's own, with their graph. Parameters that they do not depend on have gradient zero.
    """
    named = dict(trainable(module))
    objective = (logits * torch.from_numpy(np.ascontiguousarray(gradient))).sum()
    found = torch.autograd.grad(objective, list(named.values()), retain_graph=True, allow_unused=True)
    return {
        name: np.zeros(tuple(parameter.shape)) if part is None else part.double().numpy()
        for (name, parameter), part in zip(named.items(), found, strict=True)
    }


def trainable(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that gradients are asked for; UsageError if there are none."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not named:
        raise UsageError("the module has no parameter that requires a gradient")
    return iter(named)


def _prefixes(environment: Environment, prompts: Prompts) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Contexts (n,) and the ids that lead to them (n, L), of one prompt and length at a time."""
    for start, prompt in zip(environment.start, prompts, strict=True):
        contexts, tokens = np.array([start]), np.array([prompt], dtype=np.int64)
        for _ in range(environment.horizon):
            yield contexts, torch.from_numpy(tokens)
            parent, token = np.nonzero(environment.successors[contexts, :, 0] != END)
            if not len(parent):
                break
            tokens = np.concatenate([tokens[parent], token[:, None]], axis=1)
            contexts = environment.successors[contexts[parent], token, 0]


def _first(environment: Environment, prompts: Prompts) -> Tensor:
    return next(_prefixes(environment, prompts))[1]


def _last_logits(module: Callable[..., Any], tokens: Tensor, vocabulary: int) -> Tensor:
    answer = module(tokens)
    logits = getattr(answer, "logits", answer)
    if not isinstance(logits, Tensor) or logits.shape[:2] != tokens.shape or logits.shape[2] < vocabulary:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UsageError(
            f"the module must map token ids {tuple(tokens.shape)} to logits {(*tokens.shape, vocabulary)}, or to an "
            f"object with such .logits; it gave {shape}"
        )
    return logits[:, -1, :vocabulary].to(torch.float64)


def _scattered(rows: Tensor, places: np.ndarray, contexts: int) -> Tensor:
    empty = torch.zeros((contexts, rows.shape[1]), dtype=rows.dtype)
    return empty.index_copy(0, torch.from_numpy(places), rows)
