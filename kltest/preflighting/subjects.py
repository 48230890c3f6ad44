"""A loss in a preflight: a callable that is filled by name, or one that runs the model itself.

Both answer a `Case` with their value and their gradient, at log-probs or at the logits that the model gave to them. Of
a loss that runs the model, logits are caught behind the model's forward and changed there: no backward pass goes on.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kltest.errors import KltestError, TargetError, UsageError
from kltest.loss.callables import described, name_of, source_file
from kltest.loss.calling import Loss
from kltest.loss.frames import failure, raised_as
from kltest.loss.outcome import Call
from kltest.loss.placement import ROW_FIELDS
from kltest.loss.resolve import resolve
from kltest.loss.view import difference, unambiguous
from kltest.names import FIELDS, field_named
from kltest.preflighting.batches import ATTENTION, Batch
from kltest.preflighting.models import Pair, adapters_act, chosen, of_targets
from kltest.rollout import LEAVES, Rollout, elsewhere

ROLES = {
    "model": ("model", "policy", "policy_model", "actor", "actor_model", "student", "student_model", "net"),
    "ref": ("ref", "ref_model", "reference", "reference_model", "ref_policy", "teacher", "teacher_model"),
    "batch": ("batch", "inputs", "data", "micro_batch", "mini_batch"),
}
GIVEN, EQUAL, OTHER = "given", "equal", "other"
FLATTER = 0.8
"""The logits of another reference, as a share of those of the given one."""


@dataclass(frozen=True)
class Case:
    """What is different in one call of a loss.

    Attributes:
        beta: The coefficient.
        ref: The reference that was given, one equal to the policy, or another than both.
        altered: True at positions whose log-probs are altered, None for none.
        wider: Columns of padding that are added.
    """

    beta: float
    ref: str = GIVEN
    altered: Tensor | None = None
    wider: int = 0


@dataclass(frozen=True)
class Called:
    """The value of a loss, and its gradient by where it was taken, as `Pair.gradients` takes it."""

    value: Tensor
    gradients: dict[str, Tensor]

    def at_positions(self) -> Tensor:
        """Return (B, K) norms of the gradient."""
        return sum(one.double().square().reshape(*one.shape[:2], -1).sum(-1) for one in self.gradients.values()) ** 0.5

    def less(self, other: "Called", factor: float = 1.0) -> "Called":
        """Return the difference from another call of the same loss, over a factor."""
        names = {*self.gradients, *other.gradients}

        def of(name: str) -> Tensor:
            parts = [one.gradients.get(name) for one in (self, other)]
            first, second = (0.0 if one is None else one for one in parts)
            return torch.as_tensor(first - second) / factor

        return Called((self.value - other.value) / factor, {name: of(name) for name in names})

    @property
    def norm(self) -> float:
        """Norm of the gradient."""
        return float(sum(float(one.double().square().sum()) for one in self.gradients.values()) ** 0.5)


@dataclass
class Tables:
    """What the models say of a batch: (B, L, V) logits, on the device of each."""

    policy: Tensor
    reference: Tensor | None
    equal: Tensor | None = None


class ByName:
    """A loss whose parameters are filled with fields of rollouts: it gets them on the CPU, in double precision."""

    whole = False

    def __init__(self, loss: Loss, batch: Batch, tables: Tables, beta: float) -> None:
        self.loss, self.batch, self.name = loss, batch, loss.name
        self.takes_beta = "beta" in loss.takes
        self.takes_mask = bool(loss.takes & {"mask", "rollout"}) or any(key in ATTENTION for key in loss.call.arguments)
        self.reads_rewards = bool(loss.takes & ROW_FIELDS)
        self.live, self.padding, self.others = (one.cpu() for one in (batch.live, batch.padding, batch.others))
        self.writes: dict[str, str] = {}
        self.per_token = False
        self.may_be_wider = not any(isinstance(one, Tensor) for one in loss.call.arguments.values())
        of = {"policy": tables.policy, "ref": tables.reference}
        self.logits = {role: of_targets(one, batch) for role, one in of.items() if one is not None}
        log_probs = {role: chosen(one.log_softmax(-1), batch) for role, one in self.logits.items()}
        self.logp = log_probs["policy"].cpu().double()
        self.ref_logp = (log_probs["ref"] if "ref" in log_probs else batch.fields["ref_logp"]).cpu().double()
        self.rollout = Rollout(self._fields(EQUAL), beta=beta)
        if not unambiguous(self.rollout):
            loss.settle(self.rollout)

    def _fields(self, ref: str) -> dict[str, Any]:
        batch, rows = self.batch, len(self.live)

        def table(role: str, flatter: float = 1.0) -> Callable[[], Tensor]:
            return lambda: (self.logits[role] * flatter).log_softmax(-1).cpu()

        old = batch.fields.get("old_logp", batch.fields.get("rollout_logp"))
        other = {GIVEN: self.ref_logp, EQUAL: self.logp, OTHER: elsewhere(self.ref_logp)}
        fields: dict[str, Any] = {
            "logp": self.logp,
            "ref_logp": other[ref],
            "old_logp": self.logp if old is None or ref == EQUAL else old.cpu().double(),
            "mask": self.live.double(),
            "tokens": batch.targets.cpu(),
            "logits": table("policy"),
            "old_logits": table("policy"),
            "group": batch.fields.get("group", torch.zeros(rows, dtype=torch.long)).cpu(),
        }
        if "rollout_logp" in batch.fields and ref != EQUAL:
            fields["rollout_logp"] = batch.fields["rollout_logp"].cpu().double()
        if ref == EQUAL or "ref" in self.logits:
            fields["ref_logits"] = table("policy" if ref == EQUAL else "ref", FLATTER if ref == OTHER else 1.0)
        zeros = torch.zeros(rows, dtype=torch.float64)
        for name in ROW_FIELDS:
            # Without a coefficient the KL part is what is left without rewards.
            given = batch.fields.get(name) if self.takes_beta else zeros
            fields[name] = zeros if given is None else given.cpu().double()
        return fields

    def call(self, case: Case) -> Called:
        """Call the loss; TargetError if it fails."""
        fields = self._fields(case.ref)
        if case.altered is not None:
            dead = case.altered.cpu()
            for name in {"logp", "ref_logp", "old_logp", "rollout_logp"} & {*fields}:
                fields[name] = torch.where(dead, -3.0 - fields[name].abs().flip(1), fields[name])
            for name in ("logits", "old_logits", "ref_logits"):
                if name in fields:
                    fields[name] = _later(fields[name], lambda one: torch.where(dead[..., None], one.flip(-1), one))
        rollout = Rollout(fields, beta=case.beta)
        rollout = rollout.wider(case.wider) if case.wider else rollout
        result = self.loss.returned(rollout, case.beta)
        self.per_token |= result.returned == "tokens"
        self.writes |= {name: f"it wrote into {name}: {how}" for name, how in self.loss.record.writes.items()}
        placed = self.loss.placed(result.loss.double(), rollout)
        objective = placed if placed.dim() == 0 else placed.mean()
        leaves = {name: leaf for name in LEAVES if (leaf := rollout.built(name)) is not None}
        if not objective.requires_grad:
            return Called(objective.detach(), {})
        found = torch.autograd.grad(objective, [*leaves.values()], allow_unused=True, materialize_grads=True)
        return Called(objective.detach(), dict(zip(leaves, found, strict=True)))


def _later(build: Callable[[], Tensor], change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: change(build())


class Whole:
    """A loss that runs the model itself: `loss(model, ref, batch)`, `trainer.compute_loss(model, inputs)`."""

    whole, takes_mask, reads_rewards, per_token, may_be_wider = True, True, False, False, False

    def __init__(
        self, function: Callable[..., Any], batch: Batch, pair: Pair, model: Any, ref: Any, given: Any
    ) -> None:
        self.function, self.batch, self.pair, self.name = function, batch, pair, name_of(function)
        function, signature = described(function, self.name)
        self.model, self.ref = model, ref
        self.arguments, self.betas, lacking = dict(given), [], []
        for name, one in signature.parameters.items():
            role = next((role for role, names in ROLES.items() if name in names), None)
            if name in self.arguments or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                continue
            if role == "batch":
                self.arguments[name] = batch
            elif role is not None:
                self.arguments[name] = model if role == "model" else ref
            elif field_named(name) == "beta":
                self.betas.append(name)
            elif name in batch.given:
                self.arguments[name] = batch.given[name]
            elif one.default is one.empty:
                lacking.append(name)
        if lacking:
            raise UsageError(
                f"nothing fills {lacking[0]} of {self.name}: it is neither a model, the reference, the batch nor a key "
                f"of the batch; give arguments={{{lacking[0]!r}: …}}"
            )
        self.owner = getattr(function, "__self__", None)
        names = ("beta", *FIELDS["beta"].aliases)
        self.attribute = next((one for one in names if isinstance(getattr(self.owner, one, None), int | float)), None)
        self.takes_beta = bool(self.betas) or self.attribute is not None
        self.live, self.padding, self.others = map(batch.at_logits, ("live", "padding", "others"))
        self.writes: dict[str, str] = {}
        self.scored: dict[str, int] = {}
        self.logp: Tensor | None = None

    @property
    def own_beta(self) -> float | None:
        """The coefficient that its owner has."""
        return None if self.attribute is None else float(getattr(self.owner, self.attribute))

    def call(self, case: Case) -> Called:
        """Call the loss; TargetError if it fails."""
        leaves: list[Tensor] = []
        given = {key: one.clone() if isinstance(one, Tensor) else one for key, one in self.batch.given.items()}
        given |= self._replaced(case, given)
        before = {key: one.clone() for key, one in given.items() if isinstance(one, Tensor)}
        arguments = {name: given if one is self.batch else one for name, one in self.arguments.items()}
        arguments |= {name: given[name] for name in arguments if name in given and arguments[name] is not given}
        arguments |= dict.fromkeys(self.betas, case.beta)
        with self._taps(case, leaves), self._coefficient(case.beta), torch.enable_grad(), raised_as(self._failure):
            loss = _loss_of(self.function(**arguments), self.name)
            used = leaves if loss.requires_grad else []
            gradients = torch.autograd.grad(loss, used, allow_unused=True, materialize_grads=True) if used else ()
        for key, one in before.items():
            if isinstance(given.get(key), Tensor) and (how := difference(given[key].detach(), one)):
                self.writes[key] = f"it wrote into {key} of the batch: {how}"
        return Called(loss.detach().double().cpu(), {"raw": self._joined(gradients)} if gradients else {})

    def _failure(self, error: BaseException) -> BaseException:
        return error if isinstance(error, KltestError) else failure(self.name, error, source_file(self.function))

    def _joined(self, parts: Any) -> Tensor:
        rows, length = self.batch.ids.shape
        joined = torch.cat([*parts]) if len({one.shape[1:] for one in parts}) == 1 else None
        if joined is None or len(joined) != rows or joined.shape[1] > length:
            shapes = ", ".join(str(tuple(one.shape)) for one in parts)
            raise UsageError(
                f"{self.name} runs the model on another batch than it got: logits {shapes} for ids {(rows, length)}. "
                "Sequences without padding (packed) cannot be looked at; give a loss that takes log-probs by name"
            )
        return torch.nn.functional.pad(joined, (0, 0, length - joined.shape[1], 0))

    def _replaced(self, case: Case, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return log-probs of the batch, exchanged as a case says."""
        found, keys = {}, self.batch.keys
        for field in ("ref_logp", "old_logp", "rollout_logp"):
            if (key := keys.get(field)) is None or case.ref == GIVEN or (case.ref == OTHER and field != "ref_logp"):
                continue
            own = given[key].clone()
            if case.ref == OTHER:
                found[key] = elsewhere(own)
            elif self.logp is not None:
                width = min(own.shape[1], self.logp.shape[1])
                own[:, -width:] = self.logp[:, -width:].to(own)
                found[key] = own
        if case.altered is not None:
            dead = case.altered[:, :-1]
            for field in ("ref_logp", "old_logp", "rollout_logp"):
                if (key := keys.get(field)) is not None:
                    own = found.get(key, given[key]).clone()
                    width = min(own.shape[1], dead.shape[1])
                    own[:, -width:] = torch.where(
                        dead[:, -width:].to(own.device), own[:, -width:] - 3.0, own[:, -width:]
                    )
                    found[key] = own
        return found

    @contextmanager
    def _taps(self, case: Case, leaves: list[Tensor]) -> Iterator[None]:
        """Catch the logits of both models, and change them as a case says."""
        logp: list[Tensor] = []
        rows = {"policy": 0, "reference": 0}

        def tapped(module: nn.Module, args: Any, output: Any) -> Any:
            is_policy = module is self.model
            acts = adapters_act(module)
            bare = is_policy and not acts and self.pair.reference is not None and self.pair.reference.bare
            reference = not is_policy or not torch.is_grad_enabled() or bare
            kind = "reference" if not is_policy or bare else "without gradient" if reference else "policy"
            self.scored[kind] = self.scored.get(kind, 0) + 1
            logits = output if isinstance(output, Tensor) else _logits(output)
            if logits is None:
                return output
            role = "reference" if reference else "policy"
            self.pair.passes[role] += 1
            if case.altered is not None and len(logits) + rows[role] <= len(case.altered):
                dead = case.altered[rows[role] : rows[role] + len(logits), -logits.shape[1] :, None]
                logits = torch.where(dead.to(logits.device), logits.flip(-1), logits)
            rows[role] += len(logits)
            if reference:
                logits = logits * FLATTER if case.ref == OTHER else logits
            else:
                logits = logits.detach().requires_grad_()
                leaves.append(logits)
                logp.append(logits.detach())
            return _with_logits(output, logits)

        with ExitStack() as stack:
            for module in {id(one): one for one in (self.model, self.ref) if isinstance(one, nn.Module)}.values():
                stack.callback(module.register_forward_hook(tapped).remove)
            yield
        if case == Case(case.beta) and logp and len(whole := torch.cat(logp)) == len(self.batch.ids):
            width = min(self.batch.width, whole.shape[1] - 1)
            log_probs = (whole[:, -width - 1 : -1].float() / self.pair.temperature).log_softmax(-1)
            targets = self.batch.ids[:, -width:].to(whole.device)
            self.logp = log_probs.gather(2, targets[..., None])[..., 0]

    @contextmanager
    def _coefficient(self, beta: float) -> Iterator[None]:
        if self.attribute is None:
            yield
            return
        before = getattr(self.owner, self.attribute)
        setattr(self.owner, self.attribute, beta)
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, before)


def _logits(output: Any) -> Tensor | None:
    found = getattr(output, "logits", output[0] if isinstance(output, tuple) else None)
    return found if isinstance(found, Tensor) and found.dim() == 3 else None


def _with_logits(output: Any, logits: Tensor) -> Any:
    if isinstance(output, Tensor):
        return logits
    if type(output) is tuple:
        return (logits, *output[1:])
    changed = copy.copy(output)
    changed.logits = logits
    return changed


def _loss_of(answer: Any, name: str) -> Tensor:
    if isinstance(answer, Mapping):
        answer = answer.get("loss")
    elif not isinstance(answer, Tensor):
        answer = answer[0] if isinstance(answer, tuple | list) and answer else getattr(answer, "loss", None)
    if not isinstance(answer, Tensor) or answer.numel() != 1:
        raise TargetError(f"{name} returned no scalar tensor as its loss, alone, first of a tuple or as `loss`")
    return answer.reshape(())


def subject_of(
    loss: Any, batch: Batch, tables: Tables, pair: Pair, model: Any, ref: Any, options: Mapping[str, Any]
) -> ByName | Whole:
    """Return the loss as it is called; UsageError if nothing fills one of its parameters."""
    given = dict(options.get("arguments") or {})
    if runs_the_model(loss):
        return Whole(loss, batch, pair, model, ref, given)
    parameters = _parameters(loss)
    for name in parameters:
        value = batch.given.get(name)
        if name in given or not isinstance(value, Tensor):
            continue
        if name in ATTENTION:
            given[name] = batch.attention[:, -batch.width :].to("cpu", value.dtype)
        elif field_named(name) is None or (field_named(name) in ROW_FIELDS and value.dim() == 2):
            given[name] = value.cpu()
    call = Call(placement=options.get("placement"), credit=options.get("credit"), arguments=given)
    return ByName(resolve(loss, call, options.get("name")), batch, tables, options.get("beta") or 1.0)


def runs_the_model(loss: Any) -> bool:
    """Return True for a callable that takes a model or a batch, not the fields of rollouts."""
    names = _parameters(loss)
    return any(name in (*ROLES["model"], *ROLES["batch"]) for name in names) and not any(
        field_named(name) in ("logp", "logits") for name in names
    )


def _parameters(loss: Any) -> list[str]:
    if isinstance(loss, str | Loss) or not callable(loss):
        return []
    try:
        return [*inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters]
    except (TypeError, ValueError):
        return []
