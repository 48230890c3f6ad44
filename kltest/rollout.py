"""A batch of rollouts as a loss sees it; each field is built when it is first read.

Fields, shapes and the names of parameters they fill are the calling convention: see FIELDS.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance, Paths
from kltest.errors import UsageError
from kltest.names import AS_OLD, FIELDS, SUPPORT_FIELDS, SUPPORT_SIZE, field_named, support_size


class NotGivenError(AttributeError, KeyError):
    """A loss read a field that a rollout, or an object that stands in for another, does not have."""

    __str__ = Exception.__str__


Centre = Literal["environment", "batch"]
LEAVES = ("logp", "logits")
SAMPLER_FIELDS = frozenset({"old_logp", "old_logits", *AS_OLD})


class Rollout:
    """A batch of B rollouts of up to T tokens over a vocabulary of V; every field of FIELDS is an attribute,
    by its aliases too.

    It is also a mapping from them (`batch["log_probs"]`, `in`, `get`); its `keys` are the tensor fields.
    `fields` are tensors or functions that build them. `accessed` collects the names that were read, so that the grader
    knows what a loss uses. `logp` and `logits` are leaves that require grad.
    """

    def __init__(self, fields: Mapping[str, Any], *, beta: float = 1.0) -> None:
        unknown = set(fields) - set(FIELDS)
        if unknown:
            raise UsageError(f"a rollout has no field {sorted(unknown)[0]!r}; its fields are {', '.join(FIELDS)}")
        self._builders: dict[str, Any] = dict(fields)
        self._built: dict[str, Any] = {"beta": beta, "rollout": self}
        self.accessed: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if (field := field_named(name)) is None:
            raise _no_field(name)
        self.accessed |= fields_behind(field)
        return self.peek(field)

    def __getitem__(self, key: object) -> Any:
        name = field_named(key)
        if name is None:
            raise _no_field(key)
        return getattr(self, name)

    def get(self, key: object, default: Any = None) -> Any:
        """Return a field by any of its names, `default` if the batch does not have it."""
        try:
            return self[key]
        except NotGivenError:
            return default

    def keys(self) -> list[str]:
        """Return the tensor fields; β is not among them, so that copying a batch does not count as reading β.

        Neither are those of a support, which would count as reading every next-token log-prob.
        """
        return [name for name in self.names() if name not in ("beta", "rollout", *SUPPORT_FIELDS)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def peek(self, name: str) -> Any:
        """Return a field without recording an access by the loss."""
        if name in SUPPORT_FIELDS and name not in self._builders:
            return self.support(name)
        if name in AS_OLD and name not in self._builders:
            name = "old_logp"
        if name not in self._built:
            if name not in self._builders:
                raise NotGivenError(f"this rollout was made without the field {name!r}")
            value = self._builders[name]
            value = value() if callable(value) else value
            if name in LEAVES:
                value = value.detach()
                value = value if is_mapped(value) else value.requires_grad_()
            self._built[name] = value
        return self._built[name]

    def support(self, name: str, k: int = SUPPORT_SIZE, of: str = "ref_") -> Tensor:
        """Return a field of SUPPORT_FIELDS, computed from the next-token log-probs and never kept, unless it was given.

        Args:
            name: The field.
            k: Tokens of the support, as `support_size` takes them.
            of: Whose likeliest tokens they are: "ref_" for the reference, "" for the policy. They are held fixed.
        """
        if name in self._builders:
            return self.peek(name)
        if "topk_ids" in self._builders:
            ids = self.peek("topk_ids")
        else:
            ids = self.peek(f"{of}logits").detach().topk(self.support_size(k), dim=-1).indices
        if name == "topk_ids":
            return ids
        return self.peek("logits" if name == "topk_logp" else "ref_logits").gather(-1, ids)

    def support_size(self, k: int) -> int:
        """Return how many tokens a support of k has here: as many as came with the batch, or its vocabulary allows."""
        if "topk_ids" in self._builders:
            return self.peek("topk_ids").shape[-1]
        return support_size(k, self.peek("ref_logits").shape[-1])

    def __contains__(self, key: object) -> bool:
        name = field_named(key)
        if name in SUPPORT_FIELDS:
            return "logits" in self and "ref_logits" in self
        if name in AS_OLD:
            return name in self._builders or "old_logp" in self
        return name in self._builders or name in self._built

    def __len__(self) -> int:
        return len(self.peek("mask"))

    def names(self) -> Iterator[str]:
        """Yield the names of the fields that this rollout has."""
        return (name for name in FIELDS if name in self)

    def built(self, name: str) -> Tensor | None:
        """Return a field if it was built already, else None; the grader so finds the leaves that a loss used."""
        return self._built.get(name)

    def take(self, rows: Any, *, beta: float | None = None) -> "Rollout":
        """Return a new batch of the given rows (repeats allowed), with fresh leaves."""
        index = torch.as_tensor(rows)
        fields = {name: partial(self._rows, name, index) for name in self._builders}
        return Rollout(fields, beta=self.peek("beta") if beta is None else beta)

    def _rows(self, name: str, index: Tensor) -> Tensor:
        return self.peek(name).detach()[index]

    def replace(self, **fields: Any) -> "Rollout":
        """Return the same batch with some fields exchanged, `beta` perhaps among them, and fresh leaves."""
        beta = fields.pop("beta", self._built["beta"])
        kept = {name: (lambda name=name: self.peek(name)) for name in self._builders}
        return Rollout({**kept, **fields}, beta=beta)

    @staticmethod
    def joined(parts: "Sequence[Rollout]") -> "Rollout":
        """Return one batch of the rows of several of the same fields and width; their groups stay apart."""
        if len(parts) == 1:
            return parts[0]
        first = np.cumsum([0, *(int(part.peek("group").max()) + 1 for part in parts)])

        def column(name: str) -> Tensor:
            each = [part.peek(name).detach() for part in parts]
            return torch.cat(
                [one + int(more) for one, more in zip(each, first, strict=False)] if name == "group" else each
            )

        return Rollout({name: partial(column, name) for name in parts[0]._builders}, beta=parts[0].peek("beta"))

    @classmethod
    def within_vmap(cls, fields: Mapping[str, Tensor], beta: float) -> "Rollout":
        """Return a batch of what torch.vmap maps over: its leaves are those given, for all batches at once."""
        batch = cls(fields, beta=beta)
        batch._built |= {name: fields[name] for name in LEAVES if name in fields}
        return batch

    def near_reference(self) -> "Rollout":
        """Return the same batch with the policy as its reference, and fresh leaves: a KL term is zero there."""
        same: dict[str, Any] = {f"ref_{name}": lambda name=name: self.peek(name).detach() for name in LEAVES}  # type: ignore[misc]
        if "ref_topk_logp" in self._builders:
            same["ref_topk_logp"] = lambda: self.support("topk_logp").detach()
        return self.replace(**same)

    def wider(self, columns: int, padding: int = 0) -> "Rollout":
        """Return the same batch with more columns of padding, finite and legal numbers, and fresh leaves."""
        generator = torch.Generator().manual_seed(padding)

        def padded(name: str) -> Tensor:
            if (value := self.peek(name).detach()).dim() < 2:
                return value
            shape = (len(value), columns, *value.shape[2:])
            if name == "mask":
                more = torch.zeros(shape)
            elif name == "tokens":
                more = torch.randint(self.peek("ref_logits").shape[-1], shape, generator=generator)
            elif name == "topk_ids":
                more = value[:, -1:].expand(shape)
            elif value.dim() == 3:
                more = torch.randn(shape, generator=generator).log_softmax(-1)
            else:
                more = -3 * torch.rand(shape, generator=generator)
            return torch.cat([value, more.to(value.dtype)], dim=1)

        return Rollout({name: partial(padded, name) for name in self._builders}, beta=self.peek("beta"))

    @classmethod
    def of(
        cls,
        instance: Instance,
        paths: Paths | None = None,
        *,
        sampler: str = "current",
        padding: int = 0,
        beta: float = 1.0,
        centre: Centre = "environment",
    ) -> "Rollout":
        """Build the rollouts of an instance as a loss sees them.

        Args:
            instance: Environment and policies.
            paths: Rollouts (default: all of them).
            sampler: "current" (old_logp equals logp in value), or one of `kltest.environments.samplers`.
            padding: Seed of the values at padded positions, arbitrary on purpose, but finite and legal.
            beta: Coefficient β.
            centre: `advantage` is the reward minus its expectation for the prompt ("environment"), or minus the mean of
                the batch's rows of that prompt ("batch").
        """
        paths = instance.paths if paths is None else paths
        return cls(_builders(instance, paths, sampler, padding, centre), beta=beta)


def fields_behind(name: str) -> frozenset[str]:
    """Return a field with those that it is made of."""
    if name not in SUPPORT_FIELDS:
        return frozenset({name})
    return frozenset({name, *(("logits", "ref_logits") if name != "ref_topk_logp" else ("ref_logits",))})


def is_mapped(tensor: Tensor) -> bool:
    """Return True inside torch.vmap for a tensor that it maps over, at whose numbers nobody can look."""
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def elsewhere(log_probs: Tensor) -> Tensor:
    """Return other log-probs, none of them the same and still negative: for experiments in which some have to move."""
    return 1.25 * log_probs - 0.1


def _no_field(name: object) -> NotGivenError:
    return NotGivenError(f"a rollout has no field {name!r}; its fields are {', '.join(FIELDS)}")


def _builders(
    instance: Instance, paths: Paths, sampler: str, padding: int, centre: Centre
) -> dict[str, Callable[[], Tensor]]:
    tables = {"": instance.policy, "ref_": instance.reference, "old_": instance.recomputed(sampler)}
    vocabulary = instance.environment.vocabulary

    def noise(salt: int) -> np.random.Generator:
        return np.random.default_rng([padding, salt])

    def with_padding(values: np.ndarray, garbage: Callable[[int], Any]) -> Tensor:
        if paths.padded:
            dead = ~paths.mask
            values[dead] = garbage(int(dead.sum()))
        return torch.from_numpy(values)

    def chosen(log_probs: np.ndarray, salt: int) -> Tensor:
        return with_padding(paths.chosen(log_probs), lambda dead: -noise(salt).uniform(0.1, 3.0, size=dead))

    def everything(log_probs: np.ndarray, salt: int) -> Tensor:
        def garbage(dead: int) -> np.ndarray:
            return torch.from_numpy(noise(salt).standard_normal((dead, vocabulary))).log_softmax(-1).numpy()

        return with_padding(paths.everything(log_probs), garbage)

    def advantage() -> Tensor:
        reward = instance.environment.returns(paths)
        if centre == "environment":
            mean = instance.environment.expected_returns(instance.behaviour(sampler))
        else:
            prompts = len(instance.environment.prompts)
            rows = np.bincount(paths.prompt, minlength=prompts)
            mean = np.bincount(paths.prompt, reward, prompts) / np.where(rows > 0, rows, 1)
        return torch.from_numpy(reward - mean[paths.prompt])

    built: dict[str, Callable[[], Tensor]] = {
        "mask": lambda: torch.from_numpy(paths.mask.astype(np.float64)),
        "tokens": lambda: with_padding(paths.tokens.copy(), lambda dead: noise(9).integers(vocabulary, size=dead)),
        "reward": lambda: torch.from_numpy(instance.environment.returns(paths)),
        "advantage": advantage,
        "group": lambda: torch.from_numpy(paths.prompt.copy()),
    }
    for salt, (prefix, log_probs) in enumerate(tables.items()):
        built[f"{prefix}logp"] = lambda log_probs=log_probs, salt=salt: chosen(log_probs, salt)  # type: ignore[misc]
        built[f"{prefix}logits"] = lambda log_probs=log_probs, salt=salt: everything(log_probs, 3 + salt)  # type: ignore[misc]
    if (told := instance.told(sampler)) is not tables["old_"]:
        built["rollout_logp"] = lambda: chosen(told, 7)
    return built
