"""The expected gradient of a loss as an expression in plain torch: its call with every batch, weighed and summed.

The expression reads tensors with an entry a rollout: `logp`, `ref_logp`, `old_logp`, `mask`, `y`, the tokens, and `at`,
the contexts (N, T); `p`, `q`, the probabilities under policy and sampler, and `reward` (N,); and tables of log-probs a
context, `logits`, `ref` and `old`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from itertools import takewhile

import torch

from kltest.counterexample.declared import summed, support_tokens
from kltest.counterexample.sources import NoSourceError, is_literal
from kltest.loss.arguments import Attributes, FieldOf, SizeOf, SupportOf
from kltest.loss.building import ObjectOf
from kltest.loss.calling import Loss
from kltest.loss.derived import Derived
from kltest.loss.filling import Filling
from kltest.loss.placement import ROW_FIELDS
from kltest.names import AS_OLD, BATCH_SIZES

# Indices of the rollouts of a batch.
ROWS = "ijklmn"
# Numbers that are made of the fields of a batch, by their keys in kltest.loss.derived.
DERIVED = {
    "lengths": "(mask{at} != 0).sum(-1)",
    "log_ratio": "logp{at} - ref_logp{at}",
    "num_items_in_batch": "(mask{at} != 0).sum()",
    "device": "torch.device('cpu')",
    **dict.fromkeys(("index", "uid"), "['prompt-0'] * {rows}"),
    **dict.fromkeys(BATCH_SIZES, "{rows}"),
}


@dataclass(frozen=True)
class Expectation:
    """Writes the call of a loss, and the sum over all batches whose gradient is the expected gradient.

    Attributes:
        loss: The loss with its parameters, placement and credit.
        name: What calls it.
        batch: Rollouts in a batch.
        returned: "scalar", "rows" or "tokens": the loss gives a number, one per row, or one per token.
        summed: The loss adds up the rows of a batch.
        named: Arguments are passed by name wherever that is possible.
        masked: Rollouts differ in length.
        moved: Rollouts come from a sampler, so that `old`, `old_logp` and `q` are there.
        rewarded: Some reward is not zero.
    """

    loss: Loss
    name: str
    batch: int = 1
    returned: str = "tokens"
    summed: bool = False
    named: bool = False
    masked: bool = False
    moved: bool = False
    rewarded: bool = False

    def __post_init__(self) -> None:
        self.check()
        if self.batch > len(ROWS):
            raise NoSourceError(f"its batches have {self.batch} rollouts")

    def check(self) -> None:
        """Raise NoSourceError for a loss that an expression cannot call."""
        if self.loss.less == "reference":
            raise NoSourceError("what it returns with the policy as reference is subtracted")
        if "rollout" in self.loss.takes:
            raise NoSourceError("it reads the rollout as an object of kltest")

    @property
    def chance(self) -> str:
        """The probabilities of rollouts."""
        return "q" if self.moved else "p.detach()"

    @property
    def rows(self) -> str:
        """Indices of the rollouts of a batch."""
        return ", ".join(ROWS[: self.batch])

    @property
    def at(self) -> str:
        """The index that selects the rollouts of a batch."""
        return f"[[{self.rows}]]"

    @property
    def mask(self) -> str:
        """The mask of a batch, "" if all tokens are live."""
        return f"mask{self.at}" if self.masked else ""

    def text(
        self, first: str = "", start: str = "", around: Callable[[str], str] = lambda call: call
    ) -> tuple[str, str]:
        """Return the lambda that calls the loss, without its keyword, and the sum over all batches that calls it.

        Args:
            first: Picks the loss from what is returned.
            start: Added to the sum.
            around: Returns the expression that checks the form of what is picked.
        """
        rows, beta = self.rows, self.loss.fixed_beta or 1.0
        call, cost = "-" * self.loss.shaped + around(f"{self.called()}{first}"), f"call({rows})"
        parameters = rows
        if self.loss.takes_beta:
            parameters, cost = f"{rows}, beta", f"call({rows}, {beta!r})"
            cost = f"({cost} - call({rows}, 0.0))" if self.loss.less else cost
            cost = f"({cost} / {beta!r})" if beta != 1 else cost
        chance = " * ".join(f"{self.chance}[{row}]" for row in rows.split(", "))
        loops = " ".join(f"for {row} in range(len(p))" for row in rows.split(", "))
        return f"{parameters}: {call}", f"{start}sum({chance} * {self._placed(cost)} {loops})"

    def _placed(self, cost: str) -> str:
        """The scalar whose gradient one batch gives, for a placement and a credit.

        Scores need no mask: at padding nothing depends on the policy.
        """
        mask, logp, fixed, credit = self.mask, f"logp{self.at}", f"{cost}.detach()", self.loss.credit
        tokens = self.returned == "tokens"
        whole, whole_fixed = (summed(each, mask) if tokens else each for each in (cost, fixed))
        if tokens and credit == "immediate":
            charged = f"({fixed} * {logp}).sum(-1)"
        elif tokens and credit == "to-go":
            live = f"({fixed} * {mask})" if mask else fixed
            charged = f"({live}.flip(1).cumsum(1).flip(1) * {logp}).sum(-1)"
        elif credit == "immediate":
            last = f"[{mask}.cumsum(-1) == {mask}.sum(-1, keepdim=True)]" if mask else "[:, -1]"
            charged = f"({fixed} * {logp}{last})"
        else:
            charged = f"({whole_fixed} * {logp}.sum(-1))"
        placed = {"loss": whole, "reward": charged}.get(self.loss.placement, f"({whole} + {charged})")
        share = f" / {self.batch}" if self.summed else ""
        return placed + (".mean()" if self.returned != "scalar" else "") + share

    def called(self) -> str:
        """The call with its arguments: by position until a parameter is left out, then by name."""
        fillings = self.loss.arguments.fillings

        def goes_by_position(one: Parameter) -> bool:
            by_name = one.kind is one.KEYWORD_ONLY or (self.named and one.kind is not one.POSITIONAL_ONLY)
            return one.name in fillings and not by_name

        by_position = [one.name for one in takewhile(goes_by_position, self.loss.arguments.parameters)]
        parts = [] if self.loss.arguments.receiver is None else [self._value(self.loss.arguments.receiver)]
        parts += [self._value(fillings[name]) for name in by_position]
        parts += [f"{name}={self._value(filling)}" for name, filling in fillings.items() if name not in by_position]
        return f"{self.name}({', '.join(parts)})"

    def _value(self, filling: Filling) -> str:
        if isinstance(filling, ObjectOf):
            owner, kind = self.name.rpartition(".")[0], type(filling.built).__name__
            if filling is self.loss.arguments.receiver and owner.rpartition(".")[2] == kind and not filling.given:
                return f"{owner}()"
            filling = Attributes({**getattr(filling.built, "__dict__", {}), **filling.given})
        if isinstance(filling, Attributes):
            return f"SimpleNamespace({', '.join(f'{name}={self._value(value)}' for name, value in filling.items())})"
        if isinstance(filling, SupportOf):
            return self._of_support(filling)
        if isinstance(filling, SizeOf):
            return support_tokens(filling.k)
        if isinstance(filling, FieldOf):
            return self._field(filling.name)
        if isinstance(filling, Derived):
            made = DERIVED[filling.name]
            if "mask" in made and not self.masked:
                raise NoSourceError(f"it takes {filling.name}, which needs a mask")
            return made.format(at=self.at, rows=self.batch)
        if not is_literal(filling):
            raise NoSourceError(f"an argument, a {type(filling).__name__}, cannot be written down")
        return repr(filling)

    def _of_support(self, filling: SupportOf) -> str:
        ids = f"{self._field(f'{filling.of}logits')}.topk({support_tokens(filling.k)}, -1).indices"
        if filling.name == "topk_ids":
            return ids
        return f"{self._field('logits' if filling.name == 'topk_logp' else 'ref_logits')}.gather(-1, {ids})"

    def _field(self, name: str) -> str:
        prefix, _, kind = name.rpartition("_")
        if kind == "logits":
            table = {"": "logits.log_softmax(-1)", "ref": "ref", "old": "old" if self.moved else "logits.detach()"}
            rows = f"{table[prefix]}[at{self.at}]"
            if self.mask and not prefix:
                rows = f"torch.where({self.mask}[..., None] > 0, {rows}, {rows}.detach())"
            return rows + self._cast("floats")
        if name in ROW_FIELDS:
            return self._per_rollout(name)
        fields = {
            **{each: f"{each}{self.at}{self._cast('floats')}" for each in ("logp", "ref_logp", "old_logp")},
            **{each: f"old_logp{self.at}{self._cast('floats')}" for each in AS_OLD},
            "mask": f"mask{self.at}{self._cast('mask')}",
            "tokens": f"y{self.at}",
            "group": f"torch.zeros({self.batch}, dtype=torch.int64)",
            "beta": "beta",
        }
        return fields[name]

    def _per_rollout(self, name: str) -> str:
        value = f"reward{self.at}"
        if self.loss.unrewarded:
            value = f"torch.zeros({self.batch}, dtype=torch.float64)"
        elif name == "advantage" and self.rewarded:
            mean = f"{self.chance} @ reward" if self.batch == 1 else f"{value}.mean()"
            value = f"({value} - {mean})"
        if self.loss.record.form is not None and self.loss.record.form.per_token:
            value += "[:, None].repeat(1, y.shape[1])"
        return value + self._cast("floats")

    def _cast(self, of: str) -> str:
        """The conversion of numbers or of the mask to the type in which the loss takes them."""
        form = self.loss.record.form
        dtype = torch.float64 if form is None else getattr(form, of)
        return "" if dtype == torch.float64 else f".to({dtype})"
