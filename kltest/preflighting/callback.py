"""A callback for trainers of transformers and TRL: one preflight on the first batch, before the first update."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from transformers import TrainerCallback

from kltest.auditing.callback import aside
from kltest.errors import KltestError, KltestWarning, UsageError
from kltest.preflighting.preflight import preflight
from kltest.preflighting.report import PASSED, Preflight

LOSS = "compute_loss"


class KLPreflightCallback(TrainerCallback):
    """Runs `kltest.preflight` on the first batch: `trainer.add_callback(KLPreflightCallback(trainer))`.

    The loss is the trainer's own `compute_loss`, at its coefficient (`trainer.beta`), or a callable that is filled by
    name. Training is left as it is, bit for bit.

    Args:
        trainer: The trainer.
        loss: A loss as for `kltest.preflight`; default the trainer's.
        coefficient: The trainer's attribute that is its coefficient.
        ref: The reference; default the trainer's `ref_model`, or the model without its adapters.
        failure: "raise" stops training with the report if the verdict is not "passed", "warn" warns, "log" does
            neither. Of a preflight that cannot be made likewise.
        options: More options of `kltest.preflight`, as `on_policy` or `arguments`.

    Attributes:
        report: The Preflight, None before the first batch. Its numbers are logged as `kl_preflight/…`.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        loss: Callable[..., Any] | str | None = None,
        ref: Any = None,
        coefficient: str = "beta",
        failure: Literal["raise", "warn", "log"] = "raise",
        **options: Any,
    ) -> None:
        if not hasattr(trainer, LOSS):
            raise UsageError(f"{type(trainer).__name__} has no {LOSS}; call kltest.preflight in its loop instead")
        if failure not in ("raise", "warn", "log"):
            raise UsageError(f"failure={failure!r}: give raise, warn or log")
        if getattr(trainer, "is_deepspeed_enabled", False):
            raise UsageError("DeepSpeed splits the weights over devices: they cannot be looked at")
        self.trainer, self.loss, self.failure, self.options = trainer, loss, failure, options
        self.coefficient, self.logged = coefficient, False
        self.ref = getattr(trainer, "ref_model", None) if ref is None else ref
        self.report: Preflight | None = None
        self.own: Callable[..., Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Listen to what the trainer computes losses of, until the first batch."""
        if self.report is None and self.own is None:
            self.own = getattr(self.trainer, LOSS)
            vars(self.trainer)[LOSS] = self._compute_loss

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the trainer as it was."""
        if self.own is not None:
            vars(self.trainer).pop(LOSS, None)
        self.own = None

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Log the numbers once, with TRL's own metrics if the trainer is one of its."""
        if self.report is None or self.logged:
            return
        self.logged, metrics = True, getattr(self.trainer, "_metrics", None)
        found = {f"kl_preflight/{name}": one for name, one in self.report.scalars().items()}
        if metrics is None:
            self.trainer.log(found)
        else:  # a log of its own would empty them too early
            for name, value in found.items():
                metrics["train"][name].append(value)

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.own
        assert own is not None
        self.on_train_end(None, None, None)
        try:
            self._look(own, model, inputs, args, kwargs)
        except KltestError as error:
            if self.failure == "raise":
                raise
            self._say(f"no kltest preflight: {error}")
        return own(model, inputs, *args, **kwargs)

    def _look(self, own: Callable[..., Any], model: Any, inputs: Any, args: Any, kwargs: Any) -> None:
        trainer = self.trainer
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}
        settings = getattr(trainer, "args", None)

        def trained(model: Any, inputs: Any, beta: float) -> Any:
            setattr(trainer, self.coefficient, beta)
            return own(model, inputs, *args, **kwargs)

        beta = getattr(trainer, self.coefficient, None)
        if self.loss is None and not beta:
            raise UsageError(
                f"there is no KL term to look at: {type(trainer).__name__}.{self.coefficient} is "
                f"{'not there' if beta is None else beta}; name its attribute, coefficient=…, or give the term, loss=…"
            )
        given: dict[str, Any] = {
            "temperature": float(getattr(trainer, "temperature", 1.0) or 1.0),
            "dtype": next((one for name, one in low.items() if getattr(settings, name, False)), None),
            "tokenizer": getattr(trainer, "processing_class", None),
            "name": type(trainer).__name__ if self.loss is None else None,
            "beta": beta or None,
            **self.options,
        }
        with aside(trainer):
            self.report = preflight(self.loss or trained, model, self.ref, inputs, **given)
        if self.report.verdict != PASSED:
            if self.failure == "raise":
                self.report.raise_for_failure()
            self._say(self.report.to_text())

    def _say(self, text: str) -> None:
        if self.failure == "warn":
            warnings.warn(text, KltestWarning, stacklevel=3)
