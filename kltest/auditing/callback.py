"""A callback for TRL's trainers: every few steps, an audit of the gradient that training follows.

The trainer's own loss is called on the trainer's own batch, at its coefficient and at 0, and differentiated down to the
log-probs. If the KL is in the reward, the batch is scored once more with a coefficient of 0. Training is left as it is.
"""

import copy
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainerCallback

from kltest.auditing.audit import buffers_kept, still
from kltest.auditing.passes import CutModel, Models
from kltest.auditing.report import Audit
from kltest.auditing.run import FIRST_LOOK, LEAST, Auditing
from kltest.auditing.units import narrowed
from kltest.errors import KltestError, UsageError
from kltest.grading.options import Options
from kltest.language_models.generation import Rollouts
from kltest.language_models.language import LanguageModel
from kltest.loss.global_state import preserved
from kltest.samples.sketch import SIZE

LOGGED = ("reverse_kl", "local_reverse_kl", "local_forward_kl")
FORWARD, SCORE, LOSS = "_get_per_token_logps_and_entropies", "_generate_and_score_completions", "compute_loss"
# Fields that a batch is given to carry: group, step of generation, advantages at β = 0, log-probs under the sampler.
GROUP, STEP, WITHOUT, OLD = "kl_audit_group", "kl_audit_step", "kl_audit_without", "kl_audit_old"


class KLAuditCallback(TrainerCallback):
    """Audits a GRPOTrainer, an RLOOTrainer, or a subclass: `trainer.add_callback(KLAuditCallback(trainer, every=100))`.

    Every `every` optimizer steps it collects the rollouts of at least `units` prompts, over several steps if need be,
    and logs `kl_audit/…` with the trainer's metrics: the distance from the declared gradient, how many units there
    were, by how much bias exceeds the noise of one step, and with the ends of their intervals the share of ∇KL(π‖ref)
    that a token-level term misses, and cosine and coefficient for the gradients in `names`. A prompt whose rollouts
    serve several steps counts in one of them.

    Args:
        trainer: The trainer, with a coefficient `beta` other than 0.
        every: Optimizer steps from one audit to the next.
        units: Fewest prompts of an audit.
        expect: The gradient that is claimed, or a combination.
        names: Named gradients to log.
        ref: The reference; default the trainer's.
        error_rate: As for `kltest.audit`.
        margin: Likewise.
        seed: Likewise.
        sketch: Likewise.

    Attributes:
        audits: The Audit of each step at which one ended; `last` is the latest.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        every: int = 100,
        units: int = 32,
        expect: str = "reverse_kl",
        names: Sequence[str] = LOGGED,
        ref: Any = None,
        error_rate: float = 0.01,
        margin: float = 0.05,
        seed: int = 0,
        sketch: int = SIZE,
    ) -> None:
        self.options = Options.of(
            expect=expect, error_rate=error_rate, margin=margin, seed=seed, name=type(trainer).__name__
        )
        if every < 1 or units < LEAST:
            raise UsageError(f"every={every}, units={units}: give at least 1 and {LEAST}")
        if absent := [name for name in (FORWARD, SCORE, LOSS, "beta") if not hasattr(trainer, name)]:
            raise UsageError(f"{self.options.name} has no {absent[0]}; call kltest.audit in its loop instead")
        if getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False):
            raise UsageError("FSDP or DeepSpeed splits the weights over devices: they cannot be audited")
        self.trainer, self.every, self.units, self.names, self.sketch = trainer, every, units, names, sketch
        self.ref = getattr(trainer, "ref_model", None) if ref is None else ref
        if not trainer.beta or self.ref is None:
            raise UsageError("there is no KL to audit: beta is 0, or the trainer has no ref_model and none was given")
        self.audits: dict[int, Audit] = {}
        self.audit: Auditing | None = None
        self.own: dict[str, Callable[..., Any]] = {}
        self.batches: list[dict[str, Tensor]] = []
        self.open, self.groups = False, 0

    @property
    def last(self) -> Audit | None:
        """The latest audit, None before the first."""
        return next(reversed(self.audits.values()), None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Listen to what the trainer scores and computes losses of."""
        self.on_train_end(args, state, control)
        self.own = {name: getattr(self.trainer, name) for name in (SCORE, LOSS)}
        vars(self.trainer).update({SCORE: self._score, LOSS: self._compute_loss})

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the trainer as it was."""
        for name in self.own:
            vars(self.trainer).pop(name, None)
        self.own, self.batches, self.audit, self.open = {}, [], None, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Begin an audit if it is time."""
        self.open |= state.global_step % self.every == 0
        self.batches = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Measure what this step was computed on; the weights are still the same."""
        if self.batches:
            with self._not_in_the_way():
                self._measure(state)

    @property
    def reuse(self) -> int:
        """The number of optimizer steps that one generation serves."""
        args = self.trainer.args
        batches = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        return math.ceil(batches * getattr(args, "num_iterations", 1) / args.gradient_accumulation_steps)

    def _score(self, inputs: Any) -> Any:
        trainer, score = self.trainer, self.own[SCORE]
        if not (self.open and trainer.model.training):
            return score(inputs)
        answers: dict[str, list[Any]] = {"_generate": [], "_calculate_rewards": []}
        recorded: dict[str, Any] = {name: _recorded(getattr(trainer, name), answers[name]) for name in answers}
        with mock.patch.multiple(trainer, **recorded):
            found = score(inputs)
        more = {}
        if found.get("ref_per_token_logps") is None:
            with aside(trainer):
                vars(trainer).update({name: mock.Mock(return_value=answers[name][0]) for name in answers}, beta=0.0)
                more[WITHOUT] = score(inputs)["advantages"]
        if self.reuse > 1 and found.get("old_per_token_logps") is None:
            ids, mask = (torch.cat([found[f"prompt_{one}"], found[f"completion_{one}"]], 1) for one in ("ids", "mask"))
            with aside(trainer), torch.no_grad():
                width = found["completion_ids"].shape[1]
                more[OLD] = getattr(trainer, FORWARD)(trainer.model, ids, mask, width)[0]
        rows = torch.arange(len(found["completion_ids"]), device=found["completion_ids"].device)
        more |= {GROUP: self.groups + rows // trainer.num_generations, STEP: 0 * rows + trainer.state.global_step}
        self.groups = int(more[GROUP].max()) + 1
        return {**found, **more}

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.own[LOSS]
        if self.open and self.trainer.model.training and GROUP in inputs:
            plain = self.trainer.accelerator.unwrap_model(model)
            with self._not_in_the_way():
                self.batches.append(self._batch(inputs, lambda given: own(plain, given, *args, **kwargs)))
        return own(model, inputs, *args, **kwargs)

    def _batch(self, inputs: Any, loss: Callable[[Any], Tensor]) -> dict[str, Tensor]:
        """Return the rollouts of a batch, and the gradient of its loss's KL part at their log-probs."""
        trainer, beta = self.trainer, self.trainer.beta
        without = {**inputs, "advantages": inputs[WITHOUT]} if WITHOUT in inputs else inputs
        found: list[Tensor] = []
        for coefficient, given in ((beta, inputs), (0.0, without)):
            passed: list[Any] = []
            with aside(trainer):  # random numbers, as those of dropout, are the same both times
                vars(trainer)[FORWARD] = _recorded(getattr(trainer, FORWARD), passed)
                trainer.beta = coefficient
                computed = loss(dict(given))
                if not passed:
                    raise UsageError(f"the loss of {self.options.name} does not call {FORWARD}")
                found += torch.autograd.grad(computed, passed[-1][0], allow_unused=True, materialize_grads=True)
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        steps = 1 if scaled else trainer.current_gradient_accumulation_steps
        mask = inputs["completion_mask"]
        mask = mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]
        keys = ("sampling_per_token_logps", "old_per_token_logps", OLD)
        old = next((inputs[key] for key in keys if inputs.get(key) is not None), None)
        return {
            "prompts": inputs["prompt_ids"],
            "prompt_mask": inputs["prompt_mask"].bool(),
            "tokens": inputs["completion_ids"],
            "mask": mask.bool(),
            "group": inputs[GROUP],
            "gradient": (found[0] - found[1]) / (beta * steps),
            "now": (inputs[GROUP] + inputs[STEP] - trainer.state.global_step) % self.reuse == 0,
            **({} if old is None else {"old_logp": old}),
        }

    def _measure(self, state: Any) -> None:
        trainer, step = self.trainer, joined(self.batches)
        gradient, now, rows = step.pop("gradient"), step.pop("now"), len(step["group"])
        rollouts = Rollouts(**step, sampled_logp=torch.zeros_like(gradient))
        plain = trainer.accelerator.unwrap_model(trainer.model)
        policy, ref = (LanguageModel.of(one, trainer.processing_class) for one in (plain, self.ref))
        with aside(trainer), still(policy, ref):
            if self.audit is None:
                models = Models(CutModel(policy), CutModel(ref), None, float(trainer.temperature))
                self.audit = Auditing(self._of_unit, models, self.options, self.sketch, FIRST_LOOK)
            with self.audit.sketch.listening():
                for group in rollouts.group[now].unique():
                    which = (rollouts.group == group).nonzero()[:, 0]
                    unit = narrowed(rollouts.rows(which))
                    self.weights = gradient[which, : unit.tokens.shape[1]] * rows / len(which)
                    self.audit.add(unit)
            if self.audit.units < self.units:
                return
            found = self.audits[state.global_step] = self.audit.report()
        self.audit, self.open = None, False
        # Metrics are logged when the trainer does: its `log` would empty them too early.
        for name, value in self._scalars(found, rows).items():
            trainer._metrics["train"][f"kl_audit/{name}"].append(value)

    def _of_unit(self, logp: Tensor) -> Tensor:
        """A loss with the gradient that the trainer's loss has at the log-probs of the current unit."""
        if logp.shape != self.weights.shape:
            raise UsageError("these rollouts are not those of the unit")
        return (logp * self.weights.to(logp)).sum()

    def _scalars(self, audit: Audit, rows: int) -> dict[str, float]:
        found = {"units": float(audit.units), "distance": audit.distance.value}
        if audit.crossing:
            found["bias_over_noise"] = math.sqrt(rows / audit.crossing)
        if audit.missed is not None:
            found |= audit.missed.named("missed")
        for row in audit.named:
            for kind in ("cosine", "coefficient") if row.name in self.names else ():
                if (one := getattr(row, kind)) is not None:
                    found |= one.named(f"{kind}_{row.name}")
        return found

    @contextmanager
    def _not_in_the_way(self) -> Iterator[None]:
        """Training goes on if an audit fails, without further ones."""
        try:
            yield
        except KltestError as error:
            warnings.warn(f"kltest audits no longer: {error}", stacklevel=2)
            self.every, self.open, self.audit, self.batches = 2**63, False, None, []


def _recorded(method: Callable[..., Any], answers: list[Any]) -> Callable[..., Any]:
    """Return the method; what it returns is added to `answers`."""

    def called(*args: Any, **kwargs: Any) -> Any:
        answers.append(method(*args, **kwargs))
        return answers[-1]

    return called


@contextmanager
def aside(trainer: Any) -> Iterator[None]:
    """Inside, nothing lasts that happens to a trainer: its attributes and metrics, buffers, and random numbers."""
    kept, model = dict(vars(trainer)), trainer.model
    records = {name: one for name, one in kept.items() if name[0] == "_" and isinstance(one, dict | deque)}
    vars(trainer).update({name: copy.deepcopy(one) for name, one in records.items()})
    devices = {one.device for one in model.parameters() if one.device.type == "cuda"}
    try:
        with buffers_kept(model), preserved(), torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(kept)


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join batches row by row: prompts padded on the left, completions on the right."""

    def widened(name: str, one: Tensor) -> Tensor:
        more = max(part[name].shape[-1] for part in parts) - one.shape[-1]
        return one if one.dim() == 1 else pad(one, (more, 0) if name.startswith("prompt") else (0, more))

    return {name: torch.cat([widened(name, part[name]) for part in parts]) for name in parts[0]}
