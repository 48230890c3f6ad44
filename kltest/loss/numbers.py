"""Functions of plain numbers: called with one rollout at a time, whose objects have entries by what they are called."""

from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from kltest.errors import KltestError, TargetError
from kltest.loss.callables import kind_of, required
from kltest.loss.resolve import function_of
from kltest.loss.target import named
from kltest.names import SUPPORT_SIZE, field_named
from kltest.rollout import NotGivenError, Rollout, fields_behind
from kltest.symbolic.roles import SUPPORT
from kltest.symbolic.words import POLICY, REFERENCE, SAMPLER, says, side, whose, words

SETTINGS = frozenset({"arg", "args", "config", "cfg", "opts", "options", "settings", "hparams", "params", "self"})
"""Words of parameters that hold options, of which each has its own default."""
FORMS = ("entries", "dictionaries", "tensors")
"""How the log-probs of a rollout come: [log-prob, id, text] of each token, by id, or as a tensor."""


class LogProb(float):
    """A log-prob as engines give it in a dictionary by id: a number, which has itself as an attribute."""

    @property
    def logprob(self) -> float:
        """The number."""
        return float(self)


class Told:
    """An object whose entries, as attributes and by key, are told by their names; what says nothing is one more."""

    def __init__(self, row: "Row", path: tuple[str, ...]) -> None:
        self._row, self._path = row, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, key: object) -> Any:
        path = (*self._path, str(key))
        if (found := self._row.told(path)) is not None:
            return found
        if not isinstance(key, str) or SETTINGS.intersection(words(self._path[0])):
            raise NotGivenError(f"nothing says what {'.'.join(path)} is")
        return Told(self._row, path)

    def get(self, key: object, default: Any = None) -> Any:
        """Return an entry; that of an option is its default."""
        try:
            return self[key]
        except NotGivenError:
            return default


class Row:
    """One rollout of a batch, as numbers in one of FORMS."""

    def __init__(self, batch: Rollout, row: int, form: str) -> None:
        self.batch, self.row, self.form = batch, row, form
        self.length = int((batch.mask[row] != 0).nonzero().max()) + 1

    def told(self, path: tuple[str, ...]) -> Any:
        """Return the value of an entry by its name, None if that says nothing."""
        name = path[-1]
        if says(name, "length", "len") and not says(name, "max", "prompt", "total"):
            return self.length
        if (stated := side(name)) is not None and stated.quantity == "logp":
            others = (who for who in map(whose, path[:-1]) if who is not None)
            return self._log_probs(name, next(others, POLICY) if stated.who is None else stated.who)
        field = field_named(name)
        if field in ("reward", "advantage"):
            return float(getattr(self.batch, field)[self.row])
        return getattr(self.batch, field)[self.row, : self.length].tolist() if field in ("mask", "tokens") else None

    def _log_probs(self, name: str, who: str) -> Any:
        likeliest, given = says(name, *SUPPORT), says(name, "ids")
        if likeliest or given:
            # A model that is asked for the log-probs of some tokens is asked for the likeliest of the other one.
            of = who if likeliest else (POLICY if who == REFERENCE else REFERENCE)
            if SAMPLER in (who, of):
                raise NotGivenError("rollouts have no log-probs of the sampler's likeliest tokens")
            ids, found = (self._support(one, of) for one in ("topk_ids", f"{who}topk_logp"))
        else:
            ids = self.batch.tokens[self.row, : self.length, None]
            found = getattr(self.batch, f"{who}logp")[self.row, : self.length, None]
        if self.form == "tensors":
            return found if likeliest or given else found[:, 0]
        entries: list[Any] = []
        for values, tokens in zip(found.tolist(), ids.tolist(), strict=True):
            pairs = list(zip(values, tokens, strict=True))
            if self.form == "entries":
                each: Any = [[value, token, None] for value, token in pairs]
            else:
                each = {token: LogProb(value) for value, token in pairs}
            single = each[0] if self.form == "entries" else LogProb(values[0])
            entries.append(each if likeliest or given else single)
        return [None, *entries] if says(name, "input", "prompt") else entries  # engines score no first token

    def _support(self, name: str, of: str) -> Tensor:
        self.batch.accessed |= fields_behind(name)
        return self.batch.support(name, SUPPORT_SIZE, of)[self.row, : self.length]


def of_numbers(target: str) -> Callable[..., Any]:
    """Return a function of a batch that calls a loss with one rollout at a time, and its objects told by names.

    Raises:
        TargetError: in a call, if the loss raises in every form, or returns neither a number nor one a token.
    """
    function = function_of(named(target)).function
    parameters = required(function)

    def term(rollout: Rollout) -> Tensor:
        errors: list[BaseException] = []
        for form in FORMS:
            try:
                found = [_called(function, parameters, Row(rollout, row, form)) for row in range(len(rollout))]
            except (KeyboardInterrupt, KltestError):
                raise
            except Exception as error:
                errors.append(error)
                continue
            return _stacked(found, rollout)
        raise TargetError(f"{target} was called with one rollout of numbers at a time, and raised {errors[0]!r}")

    return term


def _called(function: Callable[..., Any], parameters: Sequence[Parameter], row: Row) -> Any:
    told = {one.name: row.told((one.name,)) for one in parameters}
    return function(**{name: Told(row, (name,)) if value is None else value for name, value in told.items()})


def _stacked(found: list[Any], rollout: Rollout) -> Tensor:
    """Return what the calls returned as a number a rollout, or a token: nothing is returned at padded positions."""
    rows, tokens = rollout.mask.shape
    values = [
        torch.as_tensor(one, dtype=torch.float64) for one in found if isinstance(one, Tensor | float | int | list)
    ]
    if len(values) != rows or any(one.dim() > 1 for one in values):
        raise TargetError(f"of one rollout it returned {kind_of(found[0])}, and neither a number nor one a token")
    if not values[0].dim():
        return torch.stack(values)
    return torch.stack([torch.nn.functional.pad(one, (0, tokens - len(one))) for one in values])
