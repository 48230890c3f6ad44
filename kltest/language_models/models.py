"""Causal language models in Hugging Face's format: loaded, or tiny ones made here with fresh weights; and saved."""

import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from kltest.errors import KltestError, UsageError

MISSING = "language models need transformers; in a checkout of kltest: python -m pip install -e '.[finetune]'"


def in_double(model: Any) -> Any:
    """Return the model in float64, normalisations included: Hugging Face's always compute in float32."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            exact = torch.nn.RMSNorm(len(module.weight), eps=module.variance_epsilon)
            exact.weight = module.weight
            model.set_submodule(name, exact)
    return model.double()


def needs_transformers() -> None:
    """Raise UsageError, with the command that installs it, if transformers cannot be imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "5")  # seconds until the hub counts as out of reach
    try:
        import transformers
    except ImportError as error:
        raise UsageError(f"{MISSING} ({error})") from None
    # The bars of reading and writing weights would break a run's own progress bar.
    transformers.utils.logging.disable_progress_bar()


def pretrained(name: str) -> tuple[Any, Any]:
    """Return a model and its tokenizer from a folder or the hub; UsageError if they cannot be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of the hub, of a folder that is none, or of damaged weights
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        if name.startswith((".", "/", "~")) and not os.path.isdir(name):
            words = "there is no such folder"
        raise UsageError(
            f"model {name!r} cannot be loaded: {words}. Give tiny, tiny:SIZE, a folder with a model and its tokenizer, "
            "or the id of one on the hub"
        ) from error


def is_tiny(name: str) -> bool:
    """True for the name of a model that is made here: "tiny" or "tiny:SIZE"."""
    return name == "tiny" or name.startswith("tiny:")


def device_named(name: str, option: str) -> torch.device:
    """Return the device of a name; UsageError, which names the `option` that gave it, if it cannot be used."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"{option} {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def parameters_asked(name: str) -> int:
    """Return the number of parameters that a name asks for: 200000 for "tiny:0.2M" or "tiny:200k".

    Raises:
        UsageError: The name is not of this form, or the size is out of range.
    """
    if name == "tiny":
        return 200_000
    found = re.fullmatch(r"tiny:(\d+(?:\.\d+)?)([kKmM]?)", name)
    size = float(found[1]) * {"k": 1e3, "m": 1e6, "": 1.0}[found[2].lower()] if found else 0.0
    if not 1e4 <= size <= 2e8:
        raise UsageError(f"model {name!r}: write tiny:SIZE with a number of parameters from 10k to 200M, as tiny:1M")
    return round(size)


def tiny_shape(parameters: int) -> tuple[int, int]:
    """Return (width, layers) for about that many parameters; a layer of width d has 12·d² of them.

    There are few layers below a million, where calls cost more than arithmetic. The width is a multiple of 32, that of
    a head.
    """
    layers = 2 if parameters < 700_000 else round(2 + 3.4 * math.log10(parameters / 700_000) ** 1.4)
    width = max(32, 32 * round(math.sqrt(parameters / (12 * layers)) / 32))
    return width, layers


def tiny_model(parameters: int, vocabulary: int, end: int, pad: int) -> Any:
    """Return a Llama with random weights from torch's generator; `end` and `pad` are ids below `vocabulary`."""
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
    """Return a tokenizer of one token a character; ids 0, 1 and 2 are padding, the end and unknown characters."""
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
    """Write the model and its tokenizer in Hugging Face's format, whole or not at all."""
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
