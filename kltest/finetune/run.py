"""A run, from top to bottom: load the models; then step by step measure, generate, update, write down.

`run` is the loop. `Training` holds what changes in it, the policy and its optimiser, with one method for each part of a
step: `_measure`, `_generate`, `_update`, `_optimise`. Behind them stand `kltest.finetune.rollouts` (random streams),
`objective` (the gradient), `evaluation` (what is measured) and `checkpoints` (the folder).
"""

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.errors import KltestError, TargetError, UsageError
from kltest.finetune.checkpoints import Record, RunFolder
from kltest.finetune.evaluation import compare_gradients, evaluate, of_batch, of_ratios
from kltest.finetune.models import Models, device_of, load
from kltest.finetune.objective import Fields, NotFiniteError, Objective, accumulate
from kltest.finetune.rollouts import check_prompts, draw, stream
from kltest.finetune.settings import NONE, Settings
from kltest.finetune.tasks import Task, task_named
from kltest.language_models.generation import Rollouts
from kltest.language_models.language import LanguageModel
from kltest.language_models.models import is_tiny, parameters_asked, save
from kltest.language_models.scoring import score_in_parts
from kltest.sweeps.progress import Progress


def run(settings: Settings, folder: Path | None = None, *, again: bool = False, quiet: bool = False) -> list[Record]:
    """Train and measure; return a record for each step, which lacks what was not measured then (names: METRICS).

    Args:
        settings: Of the run.
        folder: Where everything is kept; a run that was stopped there continues. None: a temporary folder.
        again: True to replace a run in the folder.
        quiet: True to show no progress bar.

    Raises:
        UsageError: The settings cannot be met, or the folder holds another run.
        KltestError: A number is not finite, or memory runs out.
        KeyboardInterrupt: After the step in which Ctrl-C was pressed, or SIGTERM came, with everything kept; while the
            reference is trained at once, and that part starts again.
    """
    if folder is None:
        with TemporaryDirectory() as temporary:
            return run(settings, Path(temporary), quiet=quiet)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "kltest finetune runs in one process: start it without accelerate launch or torchrun, with micro_batch if "
            "memory is short; a trainer of yours with several processes can be measured with kltest.KLAuditCallback"
        )
    if settings.threads or (is_tiny(settings.model) and parameters_asked(settings.model) < 1_000_000):
        # Spreading so little work over threads costs more than it gains, and much more if cores are shared.
        torch.set_num_threads(settings.threads or 1)
    task = task_named(settings.task, settings.keys)
    if not quiet and (told := getattr(task, "told", "")):
        print(told, file=sys.stderr)
    task.draw("held-out", 1, np.random.default_rng(0))  # refuses a task that could not be measured
    device = device_of(settings.device)
    files = RunFolder(folder, settings, again=again)
    objective = Objective(settings)
    models = load(settings, task, device)
    check_prompts(models.policy, task, settings)
    training = Training(settings, task, models, objective)
    training.restore(files)
    tracker, label = tracker_of(settings, folder), f"{settings.resolved.kl}, β = {settings.beta:g}"
    bar = nullcontext() if quiet else Progress(label, settings.steps + 1, done=training.step)
    with bar as progress, interruptible() as interrupted:
        while training.step <= settings.steps:
            record = training.next()
            files.add(record, training.samples())
            if tracker:
                tracker.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])
            stopping = interrupted.is_set()
            if training.due(settings.checkpoint_every) or stopping or training.step > settings.steps:
                files.save(training.state())
            if progress:
                progress.advance(_shown(record))
            if stopping:
                raise KeyboardInterrupt
    if tracker:
        tracker.end_training()
    save(models.policy.model.to("cpu", models.dtype), models.policy.tokenizer, folder / "model")
    return files.records


class Training:
    """The policy, its optimiser and the number of the step: everything that changes in a run."""

    def __init__(self, settings: Settings, task: Task, models: Models, objective: Objective) -> None:
        self.settings, self.task, self.models, self.objective = settings.resolved, task, models, objective
        self.step = 0
        self.parameters = [one for one in models.policy.model.parameters() if one.requires_grad]
        kind = torch.optim.SGD if settings.optimiser == "sgd" else torch.optim.Adam
        self.optimiser = kind(self.parameters, lr=settings.learning_rate, fused=True)
        self.batch: Rollouts | None = None

    def next(self) -> Record:
        """Do one step and return its metrics: measure what is due, then update; after the last step measure alone."""
        self.batch = None
        record: Record = {"step": self.step}
        activities = {"measuring": self._measure, "generation": self._generate, "update": self._update}
        for name, do in activities.items():
            if name == "measuring" or self.step < self.settings.steps:
                with located(self.step, name):
                    record |= do()
        self.step += 1
        return record

    def _measure(self) -> Record:
        """Evaluate at both ends and every so many steps; compare gradients where the policy is not the reference."""
        of = self.models, self.task, self.settings, self.step
        record: Record = {}
        if self.step in (0, self.settings.steps) or self.due(self.settings.eval_every):
            record |= evaluate(*of)
        if self.step > 0 and self.due(self.settings.gradient_every):
            record |= compare_gradients(*of)
        return record

    def due(self, every: int) -> bool:
        """Return True every so many steps; never if it is 0."""
        return every > 0 and self.step % every == 0

    def _generate(self) -> Record:
        """Draw the step's batch from the present policy, with the reference's log-probs if the KL term reads them."""
        settings = self.settings
        generator, sizes = stream(settings, "train", self.step), (settings.prompts, settings.group_size)
        batch = draw(self.models.policy, self.task, settings, "train", generator, *sizes)
        if self.objective.needs_reference:
            batch = replace(batch, ref_logp=self._log_probs(self.models.reference, batch))
        self.batch = batch
        return {}

    def _log_probs(self, language: LanguageModel, batch: Rollouts) -> Tensor:
        return score_in_parts(language, batch, self.settings.micro_batch, temperature=self.settings.temperature)

    def _update(self) -> Record:
        """`inner_epochs` times `minibatches` updates; the sampler is the policy before the first of them."""
        settings, policy, batch = self.settings, self.models.policy, self.batch
        assert batch is not None
        record: Record = {}
        if settings.minibatches > 1:  # the policy will have moved on when it meets the second one
            batch = self.batch = replace(batch, old_logp=self._log_probs(policy, batch))
        norms: list[float] = []
        for epoch in range(settings.inner_epochs):
            found = []
            for rows in batch.split(len(batch) // settings.minibatches):
                self.optimiser.zero_grad(set_to_none=True)
                found.append(accumulate(self.objective, self.models, batch.rows(rows)))
                norms.append(self._optimise(self.step * settings.updates + len(norms)))
            logps, logged = zip(*found, strict=True)
            fields = Fields.of(batch, torch.cat(logps))
            if epoch == 0:
                record |= {**of_batch(batch, fields, logged, policy.end), "gradient_norm": norms[0]}
                batch = self.batch = replace(batch, old_logp=fields.old_logp)
        if settings.updates > 1:
            record |= {"gradient_norm_last": norms[-1], **of_ratios(fields, self.objective)}
        return record

    def _optimise(self, update: int) -> float:
        """One step of the optimiser; the gradient's norm before it is shortened."""
        settings = self.settings
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, settings.max_norm or math.inf))
        if not math.isfinite(norm):
            raise NotFiniteError(f"the gradient's norm is {norm}")
        for group in self.optimiser.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (update + 1) / max(settings.warmup, 1))
        self.optimiser.step()
        return norm

    def samples(self) -> list[Record]:
        """Return the first rollouts of the step as texts."""
        if self.batch is None:
            return []
        batch, texts = self.batch.rows(slice(self.settings.samples)), self.models.policy.texts
        prompts, completions = texts(batch.prompts, batch.prompt_mask), texts(batch.tokens, batch.mask)
        assert batch.reward is not None
        return [
            {"step": self.step - 1, "prompt": prompt, "completion": completion, "reward": reward}
            for prompt, completion, reward in zip(prompts, completions, batch.reward.cpu().tolist(), strict=True)
        ]

    def state(self) -> dict[str, Any]:
        """Return the state that the rest of the run depends on; prompts and uniforms follow from the step."""
        model, optimiser = self.models.policy.model.state_dict(), self.optimiser.state_dict()
        return {"step": self.step, "model": model, "optimiser": optimiser, "random": torch.get_rng_state()}

    def restore(self, files: RunFolder) -> None:
        """Continue from the last checkpoint of the folder."""
        state = files.restore()
        if state is not None:
            self.models.policy.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            torch.set_rng_state(state["random"])
            self.step = state["step"]


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C, or SIGTERM, ask for an end after the present step; a second one ends the run at once.

    In threads other than the main one, which cannot catch signals, both are left as they are.
    """
    requested, main = threading.Event(), threading.current_thread() is threading.main_thread()

    def request(*_: object) -> None:
        requested.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM) if main}
    try:
        yield requested
    finally:
        restore()


@contextmanager
def located(step: int, doing: str) -> Iterator[None]:
    """Raise KltestError with step and activity if a number is not finite, the KL term fails or memory runs out."""
    try:
        yield
    except (NotFiniteError, TargetError) as error:
        raise KltestError(f"step {step}, {doing}: {error}") from error
    except (MemoryError, RuntimeError) as error:
        # torch.OutOfMemoryError is a RuntimeError.
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)):
            raise
        raise KltestError(
            f"step {step}, {doing}: out of memory; lower micro_batch, prompts, group_size, max_tokens or eval_prompts"
        ) from error


def tracker_of(settings: Settings, folder: Path) -> Any:
    """Return an Accelerator whose tracker of that name is started; None if the settings name none.

    Raises:
        UsageError: There is no such tracker, or it is not installed.
    """
    if settings.tracker == NONE:
        return None
    try:
        from accelerate import Accelerator

        tracking = Accelerator(cpu=settings.device == "cpu", log_with=settings.tracker, project_dir=folder)
        tracking.init_trackers("kltest", {**asdict(settings), "kl_options": json.dumps(settings.kl_options)})
    except (ImportError, ValueError) as error:
        raise UsageError(f"tracker: {error}") from error
    if not tracking.trackers:
        raise UsageError(f"tracker: {settings.tracker} is not installed: python -m pip install {settings.tracker}")
    return tracking


def _shown(record: Record) -> str:
    names = {"reward": "reward", "reward_held_out": "held-out", "kl": "KL"}
    return ", ".join(f"{label} {record[name]:.3f}" for name, label in names.items() if name in record)
