"""Causal language models in Hugging Face's format: loaded, or tiny ones made here with fresh weights; and saved."""

from __future__ import annotations

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from kltest.errors import KltestError, UsageError

MISSING = "kltest finetune needs transformers; install it with: python -m pip install 'kltest[finetune]'"


def in_double(model: Any) -> Any:
    """The model in float64, its normalisations as well: those of Hugging Face's models compute in float32 always."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            exact = torch.nn.RMSNorm(len(module.weight), eps=module.variance_epsilon)
            exact.weight = module.weight
            model.set_submodule(name, exact)
    return model.double()


def needs_transformers() -> None:
    """UsageError with the command that installs it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error})") from None
    # A run has its own bar; those of reading and writing weights would break it.
    transformers.utils.logging.disable_progress_bar()


def pretrained(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer from a folder or the hub; UsageError where they cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        words = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"model {name!r} cannot be loaded: {words}. Give tiny, tiny:SIZE, a folder with a model and its tokenizer, "
            "or the id of one on the hub"
        ) from error


def parameters_asked(name: str) -> int:
    """200000 of "tiny:0.2M" or "tiny:200k"; UsageError for what is no size."""
    if name == "tiny":
        return 200_000
    found = re.fullmatch(r"tiny:(\d+(?:\.\d+)?)([kKmM]?)", name)
    size = float(found[1]) * {"k": 1e3, "m": 1e6, "": 1.0}[found[2].lower()] if found else 0.0
    if not 1e4 <= size <= 2e8:
        raise UsageError(f"model {name!r}: write tiny:SIZE with a number of parameters from 10k to 200M, as tiny:1M")
    return round(size)


def tiny_shape(parameters: int) -> tuple[int, int]:
    """(width, layers) of about that many parameters: a layer of width d has 12·d² of them.

    Few layers up to a million, where calls cost more than arithmetic; the width is a multiple of 32, a head's width.
    """
    layers = 2 if parameters < 700_000 else round(2 + 3.4 * math.log10(parameters / 700_000) ** 1.4)
    width = max(32, 32 * round(math.sqrt(parameters / (12 * layers)) / 32))
    return width, layers


def tiny_model(parameters: int, vocabulary: int, end: int, pad: int) -> Any:
    """A Llama with fresh weights, drawn from torch's generator."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = tiny_shape(parameters)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer(characters: str) -> Any:
    """One token a character, after padding (0) and the end (1); characters that it does not know become the third."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<end>", "<unknown>")
    words = {word: number for number, word in enumerate((*special, *sorted(set(characters))))}
    made = Tokenizer(WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", padding_side="left"
    )


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """The model and its tokenizer as Hugging Face reads them, there at once or not at all."""
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    except OSError as error:
        if not folder.exists():
            raise KltestError(f"the model cannot be saved to {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
