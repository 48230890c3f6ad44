"""Models of an audit: loaded, or tiny ones made here."""

from typing import Any

import torch
from torch import nn

from kltest.language_models.language import LanguageModel
from kltest.language_models.models import (
    device_named,
    in_double,
    is_tiny,
    needs_transformers,
    parameters_asked,
    pretrained,
    tiny_model,
    tiny_tokenizer,
)
from kltest.loss.global_state import preserved

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHARACTERS = "0123456789+="
PROMPTS = tuple(f"{one}+{other}=" for one in range(10) for other in range(10))
"""Prompts for tiny models."""
# Step from a tiny policy to its reference and to its sampler, in root mean squares of each weight matrix.
STEPS = {"model": 0.0, "ref": 0.15, "sampler": 0.05}


def load(name: str, role: str, *, seed: int, dtype: str, device: str) -> LanguageModel:
    """Return a model of a folder, the hub, or a tiny one.

    Args:
        name: "tiny", "tiny:SIZE", a folder or the id of a model on the hub.
        role: "model", "ref" or "sampler". Tiny models of one size and seed differ by a small step for each role.
        seed: Chooses the weights of a tiny model.
        dtype: A name in DTYPES.
        device: A device of torch.

    Raises:
        UsageError: It cannot be loaded, or transformers is not installed.
    """
    needs_transformers()
    place = device_named(device, "--device")
    model, tokenizer = _tiny(name, role, seed) if is_tiny(name) else pretrained(name)
    model = in_double(model) if dtype == "float64" else model.to(DTYPES[dtype])
    return LanguageModel.of(model.to(place).eval(), tokenizer)


def _tiny(name: str, role: str, seed: int) -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer(CHARACTERS)
    with preserved(seed):
        model = tiny_model(parameters_asked(name), len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
        matrices = [one for one in model.parameters() if one.dim() == 2]
        for one in matrices:
            # Sums over a row get variance one: no distribution is nearly uniform.
            nn.init.normal_(one, std=one.shape[1] ** -0.5)
        torch.manual_seed(seed + list(STEPS).index(role))
        with torch.no_grad():
            for one in matrices:
                one += STEPS[role] * one.square().mean().sqrt() * torch.randn_like(one)
    return model, tokenizer
