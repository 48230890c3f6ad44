"""Units of sampling: a prompt with its rollouts, drawn from a model or read from what a training run has kept."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kltest.errors import UsageError
from kltest.language_models.generation import Rollouts, generate
from kltest.language_models.language import LanguageModel
from kltest.names import FIELDS

# Units that are generated together.
TOGETHER = 16


def drawn(
    language: LanguageModel,
    prompts: Sequence[str],
    *,
    group_size: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[Rollouts]:
    """Yield units without end: prompts are drawn independently, with replacement.

    Raises:
        UsageError: A prompt has no token.
    """
    encoded = [language.encode(prompt) for prompt in prompts]
    for count in range(2**31):
        generator = np.random.default_rng([seed, count])
        chosen = [encoded[index] for index in generator.integers(len(encoded), size=TOGETHER)]
        uniforms = torch.from_numpy(generator.random((TOGETHER * group_size, max_new_tokens)))
        with torch.no_grad():
            rollouts = generate(language, chosen, uniforms, temperature=temperature)
        for part in rollouts.split(group_size):
            yield narrowed(rollouts.rows(part))


def narrowed(rollouts: Rollouts) -> Rollouts:
    """Return rollouts without columns that are padding in all rows; one column of padding stays if there was any."""
    width = min(int(rollouts.mask.any(0).nonzero().max()) + 2, rollouts.mask.shape[1]) if rollouts.mask.any() else 1
    first = int(rollouts.prompt_mask.any(0).nonzero().min())
    rollouts = rollouts.resized(width)
    return replace(rollouts, prompts=rollouts.prompts[:, first:], prompt_mask=rollouts.prompt_mask[:, first:])


def read(path: Path) -> list[Mapping[str, Any]]:
    """Return the batches of a file: tensors by name, or a list of such, as torch.save writes them, or JSON lines.

    Raises:
        UsageError: The file cannot be read, or holds something else.
    """
    if not path.is_file():
        raise UsageError(f"--rollouts {path}: there is no such file")
    if path.suffix != ".jsonl":
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            words = str(error).splitlines()[0]
            raise UsageError(
                f"--rollouts {path} is neither JSON lines (.jsonl) nor tensors of torch: {words}"
            ) from None
        return found if isinstance(found, list) else [found]
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            row = json.loads(line)
            rows.append({name: next((row[key] for key in keys if key in row), None) for name, keys in KEYS.items()})
            if not all(rows[-1][name] for name in ("prompts", "tokens")):
                raise KeyError
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"--rollouts {path}: line {number} is no JSON object with prompt_ids and completion_ids, lists of ids"
            ) from None
    return [_stacked(rows, path)]


def _stacked(rows: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Lists of rows as padded tensors: prompts on the left, the rest on the right."""
    if not rows:
        raise UsageError(f"--rollouts {path} has no rollout")
    given = {name for name in KEYS if rows[0][name] is not None} | {"mask", "prompt_mask"}
    lists = {name: [row[name] for row in rows] for name in given}
    lists["mask"] = [row["mask"] or [1] * len(row["tokens"]) for row in rows]
    lists["prompt_mask"] = [row["prompt_mask"] or [1] * len(row["prompts"]) for row in rows]
    found: dict[str, Any] = {}
    for name, values in lists.items():
        if any(value is None for value in values):
            raise UsageError(f"--rollouts {path}: only some lines have {KEYS[name][0]}")
        if name in ("group", "reward"):
            names = {value: number for number, value in enumerate(dict.fromkeys(values))}
            found[name] = torch.tensor([names[value] for value in values] if name == "group" else values)
            continue
        side = "left" if name.startswith("prompt") else "right"
        sequences = [torch.tensor(value) for value in values]
        found[name] = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side=side)
    return found


# Names under which trainers and files keep the fields of Rollouts, the usual ones first, then those that losses use.
_USUAL = {
    "tokens": ("completion_ids", "tokens", "response_ids", "completion"),
    "mask": ("completion_mask", "mask"),
    "old_logp": ("old_per_token_logps", "old_logp", "sampling_per_token_logps"),
    "reward": ("rewards", "reward", "advantages", "advantage"),
    "group": ("group",),
}
# An attention mask is one of prompt and completion, and a reward a token is no reward a rollout.
_OTHERS = {"attention_mask", "full_attention_mask", "token_level_scores"}
KEYS = {
    "prompts": ("prompt_ids", "prompts", "prompt_tokens", "prompt"),
    "prompt_mask": ("prompt_mask", "prompt_attention_mask"),
    **{
        name: tuple(dict.fromkeys(key for key in (*usual, *FIELDS[name].aliases) if key not in _OTHERS))
        for name, usual in _USUAL.items()
    },
}


def of_batch(batch: Any, language: LanguageModel, group_size: int) -> list[Rollouts]:
    """Return the units of a batch: Rollouts, a mapping of tensors as a trainer has it, or a list of either.

    Args:
        batch: Rows of one prompt stand next to each other; without a field `group` each `group_size` rows are a group.
        language: Names the end and padding tokens and the device.
        group_size: Rollouts of a prompt.

    Raises:
        UsageError: A field is missing or has another shape, or rows do not divide into groups.
    """
    if isinstance(batch, list | tuple):
        return [unit for part in batch for unit in of_batch(part, language, group_size)]
    rollouts = batch if isinstance(batch, Rollouts) else _of_mapping(batch, language, group_size)
    rollouts = replace(
        rollouts, **{name: value.to(language.device) for name, value in vars(rollouts).items() if value is not None}
    )
    starts = [0, *((rollouts.group[1:] != rollouts.group[:-1]).nonzero()[:, 0] + 1).tolist(), len(rollouts)]
    return [narrowed(rollouts.rows(slice(*pair))) for pair in pairwise(starts)]


def _of_mapping(batch: Mapping[str, Any], language: LanguageModel, group_size: int) -> Rollouts:
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"a batch of rollouts is a mapping of tensors, or a list of them; it is {type(batch).__name__}"
        )
    found = {
        name: next((batch[key] for key in keys if batch.get(key) is not None), None) for name, keys in KEYS.items()
    }
    for name in ("prompts", "tokens"):
        if found[name] is None:
            raise UsageError(f"the rollouts have no {KEYS[name][0]} (or {', '.join(KEYS[name][1:])}): (B, length) ids")
    prompts, tokens = (torch.as_tensor(found[name]).long() for name in ("prompts", "tokens"))
    rows, width = tokens.shape
    ends = torch.isin(tokens, torch.tensor(language.end))
    given = found["mask"]
    mask = (ends.cumsum(1) - ends.long() == 0) if given is None else torch.as_tensor(given).bool()
    prompt_mask = found["prompt_mask"]
    prompt_mask = prompts != language.pad if prompt_mask is None else torch.as_tensor(prompt_mask).bool()
    old, reward, group = (
        None if found[n] is None else torch.as_tensor(found[n]) for n in ("old_logp", "reward", "group")
    )
    for name, one, shape in (
        ("mask", mask, (rows, width)),
        ("old_logp", old, (rows, width)),
        ("reward", reward, (rows,)),
    ):
        if one is not None and tuple(one.shape) != shape:
            raise UsageError(f"{KEYS[name][0]} has shape {tuple(one.shape)}; the completions have {(rows, width)}")
    if old is not None and not bool(old[mask].isfinite().all()):
        raise UsageError(f"{KEYS['old_logp'][0]} are not finite at every token")
    for name, ids, live in (("prompts", prompts, prompt_mask), ("tokens", tokens, mask)):
        if not bool(live.any(1).all()):
            raise UsageError(f"{KEYS[name][0]}: rollout {int((~live.any(1)).nonzero()[0])} has no token")
        size = getattr(getattr(language.model, "config", None), "vocab_size", None)
        if size is not None and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            wrong = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
            raise UsageError(f"{KEYS[name][0]}: the id {wrong} is not in the model's vocabulary of {size}")
    if group is None:
        if rows % group_size:
            raise UsageError(f"{rows} rollouts do not divide into groups of {group_size}: give the group size")
        group = torch.arange(rows) // group_size
    nothing = torch.zeros(rows, width)
    return Rollouts(prompts, prompt_mask, tokens, mask, nothing, group, reward, old_logp=old)
