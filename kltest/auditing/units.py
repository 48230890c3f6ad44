"""Units of sampling: a prompt with its rollouts, drawn from a model or read from what a training run has kept."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# Largest sum of the probabilities of a support, in half precision.
MOST = 1.01
# Names under which trainers and files keep the fields of Rollouts, the usual ones first, then those that losses use.
_USUAL = {
    "tokens": ("completion_ids", "tokens", "response_ids", "completion"),
    "mask": ("completion_mask", "mask"),
    "old_logp": ("old_per_token_logps", "old_logp", "sampling_per_token_logps"),
    "reward": ("rewards", "reward", "advantages", "advantage"),
    "group": ("group",),
    "topk_ids": ("topk_ids",),
    "ref_topk_logp": ("ref_topk_logp",),
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


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: one a line, or of JSON lines with `prompt`.

    Raises:
        UsageError: The file cannot be read, or holds something else.
    """
    lines = [line for line in _lines(path, "--prompts") if line.strip()]
    if not lines:
        raise UsageError(f"--prompts {path} has no prompt: write one a line")
    if not lines[0].lstrip().startswith("{"):
        return lines
    found = _objects(lines, f"--prompts {path}", "a text `prompt`", lambda row: isinstance(row["prompt"], str))
    return [row["prompt"] for row in found]


def read_rollouts(path: Path) -> list[Mapping[str, Any]]:
    """Return the batches of a file: tensors by name, or a list of such, as torch.save writes them, or JSON lines.

    Raises:
        UsageError: The file cannot be read, or holds something else.
    """
    if path.suffix == ".jsonl":
        return [_stacked(_lines(path, "--rollouts"), f"--rollouts {path}")]
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UsageError(f"--rollouts {path} cannot be read: {error.strerror}") from None
    except Exception as error:
        words = str(error).splitlines()[0]
        raise UsageError(f"--rollouts {path} is neither JSON lines (.jsonl) nor tensors of torch: {words}") from None
    return found if isinstance(found, list) else [found]


def _lines(path: Path, option: str) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _objects(lines: Sequence[str], place: str, wanted: str, has: Callable[[Any], bool]) -> list[dict[str, Any]]:
    """Return the JSON objects of some lines; UsageError for the first line without what is wanted."""
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            right = has(rows[-1])
        except (ValueError, KeyError, TypeError, AttributeError):
            right = False
        if not right:
            raise UsageError(f"{place}: line {number} is no JSON object with {wanted}")
    return rows


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Rollouts in a mapping, under whichever of their KEYS."""
    present = {key for key, value in given.items() if value is not None}
    found = {name: [key for key in keys if key in present] for name, keys in KEYS.items()}
    return {name: given[keys[0]] for name, keys in found.items() if keys}


def _stacked(lines: Sequence[str], place: str) -> dict[str, torch.Tensor]:
    """Lines of rollouts as padded tensors: prompts on the left, the rest on the right."""
    wanted = "prompt_ids and completion_ids, lists of ids"
    objects = _objects(lines, place, wanted, lambda row: all(_fields(row)[name] for name in ("prompts", "tokens")))
    rows = [
        {"mask": [1] * len(row["tokens"]), "prompt_mask": [1] * len(row["prompts"]), **row}
        for row in map(_fields, objects)
    ]
    if not rows:
        raise UsageError(f"{place} has no rollout")
    found = {}
    for name in rows[0]:
        values = [row.get(name) for row in rows]
        if any(value is None for value in values):
            raise UsageError(f"{place}: only some lines have {KEYS[name][0]}")
        if name == "group":
            found[name] = torch.from_numpy(np.unique(np.array(values), return_inverse=True)[1])
        elif name == "reward":
            found[name] = torch.tensor(values)
        else:
            side = "left" if name.startswith("prompt") else "right"
            sequences = [torch.tensor(value) for value in values]
            if len({one.shape[1:] for one in sequences}) > 1:
                raise UsageError(f"{place}: {KEYS[name][0]} are of different numbers of tokens")
            found[name] = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side=side)
    return found


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
    found = {name: torch.as_tensor(value) for name, value in _fields(batch).items()}
    for name in ("prompts", "tokens"):
        if name not in found:
            raise UsageError(f"the rollouts have no {KEYS[name][0]} (or {', '.join(KEYS[name][1:])}): (B, length) ids")
        found[name] = found[name].long()
    tokens = found["tokens"]
    rows, width = tokens.shape
    for name, shape in {"mask": (rows, width), "old_logp": (rows, width), "reward": (rows,)}.items():
        if name in found and tuple(found[name].shape) != shape:
            actual = tuple(found[name].shape)
            raise UsageError(f"{KEYS[name][0]} has shape {actual}; the completions have {(rows, width)}")
    ends = torch.isin(tokens, torch.tensor(language.end))
    found["mask"] = found.get("mask", ends.cumsum(1) - ends.long() == 0).bool()
    found["prompt_mask"] = found.get("prompt_mask", found["prompts"] != language.pad).bool()
    if "old_logp" in found and not bool(found["old_logp"][found["mask"]].isfinite().all()):
        raise UsageError(f"{KEYS['old_logp'][0]} are not finite at every token")
    size = getattr(getattr(language.model, "config", None), "vocab_size", None)
    for name, mask in (("prompts", "prompt_mask"), ("tokens", "mask")):
        empty, ids = ~found[mask].any(1), found[name]
        if bool(empty.any()):
            raise UsageError(f"{KEYS[name][0]}: rollout {int(empty.nonzero()[0])} has no token")
        if size is not None and bool((outside := ids[(ids < 0) | (ids >= size)]).numel()):
            raise UsageError(f"{KEYS[name][0]}: the id {int(outside[0])} is not in the model's vocabulary of {size}")
    _check_support(found, language.vocabulary)
    if "group" not in found:
        if rows % group_size:
            raise UsageError(f"{rows} rollouts do not divide into groups of {group_size}: give the group size")
        found["group"] = torch.arange(rows) // group_size
    return Rollouts(**found, sampled_logp=torch.zeros(rows, width))


def _check_support(found: dict[str, torch.Tensor], vocabulary: int) -> None:
    """Take the ids of a support as whole numbers; UsageError if they, or the teacher's log-probs, are of none."""
    ids, log_probs = found.get("topk_ids"), found.get("ref_topk_logp")
    names = {name: KEYS[name][0] for name in ("topk_ids", "ref_topk_logp")}
    if ids is None:
        if log_probs is not None:
            raise UsageError(f"{names['ref_topk_logp']} without {names['topk_ids']}: nothing says whose they are")
        return
    expected, live = tuple(found["tokens"].shape), found["mask"]
    for name, one in (("topk_ids", ids), ("ref_topk_logp", log_probs)):
        if one is not None and (one.dim() != 3 or tuple(one.shape[:2]) != expected or one.shape != ids.shape):
            raise UsageError(
                f"{names[name]} has shape {tuple(one.shape)}; the completions have {expected}, and a support K more"
            )
    of_tokens, size = ids[live].long(), ids.shape[-1]
    if not 0 < size <= vocabulary:
        raise UsageError(f"{names['topk_ids']}: {size} tokens of a vocabulary of {vocabulary}")
    # Behind the end of a rollout anything may stand.
    found["topk_ids"] = ids.long().where(live[..., None], torch.arange(size))
    if bool((outside := of_tokens[(of_tokens < 0) | (of_tokens >= vocabulary)]).numel()):
        raise UsageError(
            f"{names['topk_ids']}: the id {int(outside[0])} is not in the model's vocabulary of {vocabulary}; does the "
            "teacher have another one?"
        )
    ordered = of_tokens.sort(dim=-1).values
    if bool((again := ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]]).numel()):
        raise UsageError(f"{names['topk_ids']}: the id {int(again[0])} occurs twice in one support")
    if log_probs is None:
        return
    if not bool(log_probs[live].isfinite().all()):
        raise UsageError(
            f"{names['ref_topk_logp']} are not finite at every token: leave −inf and NaN out, or floor them"
        )
    if bool((mass := log_probs[live].double().exp().sum(dim=-1).max()) > MOST):
        raise UsageError(
            f"{names['ref_topk_logp']}: the probabilities of one support add up to {float(mass):.3g}; are they logits?"
        )
