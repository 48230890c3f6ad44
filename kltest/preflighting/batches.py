"""A trainer's batch as prefixes, the tokens that are predicted, and the log-probs that came with them.

Two layouts are read: prompts and completions apart (TRL), and sequences with a mask, labels or lengths of prompts.
Fields have W columns: the completions' T, or all L − 1 tokens that a sequence of L predicts. They are the last W of L.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_columns

from kltest.auditing.units import KEYS
from kltest.errors import UsageError
from kltest.names import LOGGED, listed, logged_field

OF_TOKENS = ("logp", "ref_logp", "old_logp", "rollout_logp")
OF_ROWS = ("reward", "advantage", "group")
ATTENTION = ("attention_mask", "full_attention_mask")
MASKS = tuple(one for one in (*LOGGED["mask"], "padding_mask", "labels_mask") if one not in (*ATTENTION, "mask"))
LENGTHS = ("prompt_lengths", "prompt_length", "prompt_lens", "prompt_len")
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """B sequences of L ids.

    Attributes:
        ids: (B, L), prompts and completions.
        attention: (B, L) bool, true at tokens.
        live: (B, W) bool, true at the targets that count.
        fields: (B, W) log-probs and (B,) numbers that came with the batch, by field of a rollout.
        keys: The name in the batch of each field.
        given: The batch as it came.
        wrong: Sentences on what cannot be right.
    """

    ids: Tensor
    attention: Tensor
    live: Tensor
    fields: dict[str, Tensor]
    keys: dict[str, str]
    given: Mapping[str, Any]
    wrong: list[str] = field(default_factory=list)

    @property
    def width(self) -> int:
        """The number of columns of fields, W."""
        return self.live.shape[1]

    @property
    def targets(self) -> Tensor:
        """(B, W) ids that are predicted."""
        return self.ids[:, -self.width :]

    @property
    def padding(self) -> Tensor:
        """(B, W) bool, true at targets that are padding."""
        return ~self.attention[:, -self.width :] & ~self.live

    @property
    def others(self) -> Tensor:
        """(B, W) bool, true at tokens that do not count: of the prompt, of tools."""
        return self.attention[:, -self.width :] & ~self.live

    def at_logits(self, name: str) -> Tensor:
        """Return (B, L), true at the positions whose logits predict `live`, `padding` or `others` of all L ids.

        The last position predicts nothing, as padding does.
        """
        more, token = self.ids.shape[1] - 1 - self.width, self.attention[:, 1:]
        live = pad_columns(self.live, (more, 0))
        found = {"live": live, "padding": ~token & ~live, "others": token & ~live}[name]
        return pad_columns(found, (0, 1), value=name == "padding")

    def to(self, device: torch.device) -> "Batch":
        """Return the same on another device; what was given stays where it is."""
        moved = {name: getattr(self, name).to(device) for name in ("ids", "attention", "live")}
        return replace(self, **moved, fields={name: one.to(device) for name, one in self.fields.items()})


def read(batch: Any, pad: int | None, vocabulary: int) -> Batch:
    """Read a batch.

    Args:
        batch: A mapping of tensors, arrays or lists.
        pad: The id at padded positions, for batches without an attention mask.
        vocabulary: The number of ids that the model knows.

    Raises:
        UsageError: There are no ids, nothing says which tokens count, or a shape or an id cannot be used.
    """
    if not callable(getattr(batch, "items", None)):
        raise UsageError(f"a batch is a mapping of tensors; it is of type {type(batch).__name__}")
    given = {str(key): value for key, value in batch.items() if value is not None}
    tensors = {key: one for key, value in given.items() if (one := _tensor(value)) is not None}
    keys = {name: next((key for key in KEYS[name] if _is_ids(tensors.get(key))), "") for name in ("prompts", "tokens")}
    split = all(keys.values())
    if split:
        ids = torch.cat([tensors[key] for key in keys.values()], dim=1).long()
    elif _is_ids(tensors.get("input_ids")):
        ids = tensors["input_ids"].long()
    else:
        raise UsageError(
            f"the batch has no ids: give prompt_ids and completion_ids, or input_ids, (B, length); it has "
            f"{listed(list(given)) or 'nothing'}"
        )
    rows, length = ids.shape
    completion = tensors[keys["tokens"]].shape[1] if split else length - 1
    if not rows or length < 2 or (split and length == completion):
        raise UsageError(f"the ids have shape {tuple(ids.shape)}: nothing is predicted from a prompt")
    if bool((outside := ids[(ids < 0) | (ids >= vocabulary)]).numel()):
        raise UsageError(f"the id {int(outside[0])} of the batch is not in the model's vocabulary of {vocabulary}")
    masks = {key: tensors[key] for key in ("mask", *MASKS) if key in tensors and tensors[key].dim() == 2}
    attention = next((tensors[key] for key in ATTENTION if _fits(tensors.get(key), ids)), None)
    if attention is None:
        attention = _attention(tensors, masks, ids, keys, pad) if split else ids != (-1 if pad is None else pad)
    attention = attention != 0
    sources = _sources(tensors, masks, attention, completion, split=split)
    if not sources:
        raise UsageError(
            "nothing says which tokens count: give completion_mask or response_mask, labels (−100 elsewhere) or "
            "prompt_lengths"
        )
    live, wrong = next(iter(sources.values())), []
    for name, other in sources.items():
        here, there = (one[:, -min(live.shape[1], other.shape[1]) :] for one in (live, other))
        if bool((here != there).any()):
            wrong.append(f"{next(iter(sources))} and {name} disagree on {int((here != there).sum())} tokens")
    if "tool_mask" in tensors and split:
        live = live & (tensors["tool_mask"] != 0)
    if not bool(live.any()):
        raise UsageError(f"no token counts: {next(iter(sources))} is 0 everywhere")
    if bool((unread := live & ~attention[:, -live.shape[1] :]).any()):
        wrong.append(f"{int(unread.sum())} tokens count at which the attention mask is 0")
    found = Batch(ids, attention, live, {}, {}, given, wrong)
    found.fields.update(_fields(tensors, found))
    return found


def _tensor(value: Any) -> Tensor | None:
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):  # texts, ragged lists, objects
        return None


def _is_ids(value: Tensor | None) -> bool:
    return value is not None and value.dim() == 2 and not value.is_floating_point() and value.dtype != torch.bool


def _fits(value: Tensor | None, ids: Tensor) -> bool:
    return value is not None and value.shape == ids.shape


def _attention(
    tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor], ids: Tensor, keys: Mapping[str, str], pad: int | None
) -> Tensor:
    """Return the attention mask of prompts and completions that stand apart."""
    prompts, tokens = (tensors[keys[name]] for name in ("prompts", "tokens"))
    of_prompts = next((tensors[key] for key in KEYS["prompt_mask"] if key in tensors), None)
    if of_prompts is None:
        of_prompts = torch.ones_like(prompts) if pad is None else prompts != pad
    counted = next((one for one in masks.values() if one.shape == tokens.shape), torch.ones_like(tokens)) != 0
    # Up to the last token that counts, since masks have gaps where tools answered.
    until = counted.flip(1).cummax(1).values.flip(1)
    return torch.cat([of_prompts != 0, until], dim=1)


def _sources(
    tensors: Mapping[str, Tensor], masks: Mapping[str, Tensor], attention: Tensor, width: int, *, split: bool
) -> dict[str, Tensor]:
    """Return each tensor that says which tokens count, as (B, W) bool, the most explicit first."""
    rows, length = attention.shape
    found = {}
    for key, one in masks.items():
        if len(one) == rows and one.shape[1] in ((width, length) if split else range(1, length + 1)):
            # A mask of all ids is one of targets from the second on; a shorter one is that of the last tokens.
            found[key] = (one if one.shape[1] < length else one[:, length - width :]) != 0
    if _fits(tensors.get("labels"), attention):
        found["labels"] = tensors["labels"][:, length - width :] != IGNORED
    if length_key := next((key for key in LENGTHS if key in tensors and tensors[key].numel() in (1, rows)), None):
        behind = attention.long().cumsum(1) > tensors[length_key].reshape(-1, 1).to(attention.device)
        found[length_key] = (attention & behind)[:, length - width :]
    return found


def _fields(tensors: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return the fields that a batch came with, and note the names that they have there."""
    found = {}
    for name in (*OF_TOKENS, *OF_ROWS):
        of_tokens, rows, usual = name in OF_TOKENS, len(batch.ids), (*LOGGED.get(name, ()), *KEYS.get(name, ()))
        means = [key for key in tensors if logged_field(key) == name and not (name == "reward" and "advant" in key)]
        for key in sorted(means, key=lambda key: usual.index(key) if key in usual else len(usual)):
            value = tensors[key]
            if of_tokens:
                more = batch.width - (value.shape[1] if value.dim() == 2 else 0)
                if value.dim() != 2 or len(value) != rows or (more > 0 and bool(batch.live[:, :more].any())):
                    raise UsageError(
                        f"{key} has shape {tuple(value.shape)}; the batch has {rows} rows, and {batch.width} tokens "
                        "of each are predicted"
                    )
                value = pad_columns(value, (more, 0)) if more > 0 else value[:, -batch.width :]
                if not bool((inside := value[batch.live]).isfinite().all()):
                    raise UsageError(f"{key} is not finite at every token that counts")
                if float((inside > 1e-3).float().mean()) > 1e-3:
                    batch.wrong.append(f"{key} has positive numbers, up to {float(inside.max()):.3g}: no log-probs")
            elif value.shape != (rows,):
                continue
            found[name], batch.keys[name] = value, key
            break
    return found
