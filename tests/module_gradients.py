"""Gradients with respect to the parameters of a torch module from those with respect to the logits that it computes."""

import numpy as np
import torch

from kltest.environments import Instance


def llama(seed, vocabulary, **changes):
    """A Llama of two layers in double precision."""
    import transformers

    from kltest.language_models.models import in_double

    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**{"vocab_size": vocabulary, **sizes, "initializer_range": 0.5, **changes})
    return in_double(transformers.LlamaForCausalLM(config)).eval()


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
