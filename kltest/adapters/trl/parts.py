"""Parts of a TRL trainer that hold no loss: its model's folder, its tokenizer, its classes, and quiet."""

from __future__ import annotations

import ast
import atexit
import importlib
import inspect
import logging
import shutil
import tempfile
import textwrap
import warnings
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kltest.errors import UsageError
from kltest.loss.global_state import preserved

# Words of the tokenizer: tokens of the environments, and as many prompts as a batch may have rollouts.
TOKENS, PROMPTS = 64, 8192


def returned_values(method: Any) -> int:
    """Number of values that a method returns: log-probs and entropies, in some versions an auxiliary loss as well."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return max((len(value.elts) for value in found if isinstance(value, ast.Tuple)), default=2)


def reward_given(prompts: Any = None, completions: Any = None, reward: Any = None, **others: Any) -> Any:
    """Reward function of a trainer: the column `reward` of its data."""
    return reward


@contextmanager
def quietly() -> Any:
    """Silence, and random states that are restored: building a trainer seeds all generators."""
    importlib.import_module("transformers.utils.logging").disable_progress_bar()
    silent = logging.root.manager.disable
    with warnings.catch_warnings(), preserved(), ExitStack() as unwatched:
        # A model is built on the device "meta" first, which function modes that follow each step cannot handle.
        for _ in range(torch._C._len_torch_function_stack()):
            unwatched.enter_context(torch.overrides._pop_mode_temporarily())
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(silent)


@lru_cache(maxsize=1)
def folder() -> str:
    """Return a temporary folder for models and trainers, removed when Python exits."""
    folder = tempfile.mkdtemp(prefix="kltest-trl-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@lru_cache(maxsize=2)
def saved_model(dtype: torch.dtype) -> str:
    """A folder with a tabular model, from which trainers reload their reference."""
    from kltest.adapters.tabular import TabularConfig, TabularLM

    path = Path(folder()) / str(dtype)
    with quietly():
        model: Any = TabularLM(TabularConfig(vocab_size=2))
        model.to(dtype).save_pretrained(path)
    return str(path)


@lru_cache(maxsize=1)
def tokenizer() -> Any:
    """Return a tokenizer whose words are the tokens of the environments and the prompts."""
    from kltest.adapters.tabular import PROMPT

    library = importlib.import_module("tokenizers")
    words = {f"t{token}": token for token in range(TOKENS)} | {f"p{row}": PROMPT + row for row in range(PROMPTS)}
    model = library.Tokenizer(library.models.WordLevel(words, unk_token="t0"))
    model.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    fast = class_of("PreTrainedTokenizerFast", "transformers")
    # Masks mark the padding, so it may be any token: 0 exists in every environment.
    return fast(tokenizer_object=model, pad_token="t0", eos_token="t0", unk_token="t0", padding_side="left")


def class_of(name: str, module: str = "trl") -> Any:
    """Return a class of TRL or of another module; UsageError if this version does not have it."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"the installed {module} has no {name} that can be used here: {error}") from error


def version() -> str:
    """Return the installed version of TRL."""
    return str(getattr(importlib.import_module("trl"), "__version__", "of unknown version"))
