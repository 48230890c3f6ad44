"""Gradients with respect to the parameters of a torch module from those with respect to the logits that it computes."""

import numpy as np
import torch

from kltest.environments import Instance


def instance_of(environment, logits, *others):
    """The environment with logits of modules, or arrays, as policy, reference and sampler."""
    tables = (one.detach().numpy() if isinstance(one, torch.Tensor) else one for one in (logits, *others))
    return Instance.of(environment, *tables)


def pull_back(gradient, logits, module):
    """Jᵀ·gradient by parameter, from (C, V) at `logits`, which are the module's own with their graph."""
    named = dict(module.named_parameters())
    objective = (logits * torch.from_numpy(np.ascontiguousarray(gradient))).sum()
    found = torch.autograd.grad(objective, list(named.values()), retain_graph=True, allow_unused=True)
    return {
        name: np.zeros(tuple(parameter.shape)) if part is None else part.double().numpy()
        for (name, parameter), part in zip(named.items(), found, strict=True)
    }
