"""A run, from top to bottom: load the models; then step by step measure, generate, update, write down.

`run` is the loop. `Training` holds what changes in it, the policy and its optimiser, with one method for each part of a
step: `_measure`, `_generate`, `_update`, `_optimise`. Behind them stand `kltest.finetune.rollouts` (random streams),
`update` and `objective` (the gradient), `evaluation` (what is measured) and `checkpoints` (the folder).
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kltest.errors import KltestError, TargetError, UsageError
from kltest.finetune.checkpoints import CHECKPOINT, Record, RunFolder
from kltest.finetune.evaluation import compare_gradients, evaluate, of_batch, of_ratios
from kltest.finetune.models import Models, load
from kltest.finetune.objective import Objective
from kltest.finetune.processes import Processes
from kltest.finetune.rollouts import check_prompts, draw, longest
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Task, task_named
from kltest.finetune.update import NotFiniteError, accumulate
from kltest.language_models.generation import Rollouts
from kltest.language_models.models import is_tiny, parameters_asked, save
from kltest.language_models.scoring import score_in_parts
from kltest.sweeps.progress import Progress


def run(settings: Settings, folder: Path | None = None, *, again: bool = False, quiet: bool = False) -> list[Record]:
    """Train and measure; return a record for each step, which lacks what was not measured then (names: METRICS).

    Args:
        settings: Of the run.
        folder: Where everything is kept; a run that was stopped there continues. None keeps records in memory alone.
        again: True to replace a run in the folder.
        quiet: True to show no progress bar.

    Raises:
        UsageError: The settings cannot be met, or the folder holds another run.
        KltestError: A number is not finite, or memory runs out.
        KeyboardInterrupt: After the step in which Ctrl-C was pressed, with everything kept.
    """
    _set_threads(settings)
    processes = Processes.here(settings.device)
    processes.share(settings.prompts, "prompts")
    task = task_named(settings.task, settings.keys)
    task.draw("held-out", 1, np.random.default_rng(0))  # refuses a task that could not be measured
    files = RunFolder(folder if processes.main else None, settings, again=again)
    objective = Objective(settings)
    # The main process loads first: it may have to train the reference of a tiny model, which the others then read.
    if not processes.main:
        processes.wait()
    models = load(settings, task, processes.device)
    if processes.main:
        processes.wait()
    check_prompts(models.policy, task, settings)
    training = Training(settings, task, models, objective, processes)
    training.restore(files, folder)
    label = f"{settings.resolved.kl}, β = {settings.beta:g}"
    shown = not quiet and processes.main and training.step <= settings.steps
    bar = Progress(label, settings.steps + 1, done=training.step) if shown else nullcontext()
    with bar as progress, interruptible() as interrupted:
        while training.step <= settings.steps:
            record, seconds = training.next(files)
            if processes.main:
                files.add(record, {"step": record["step"], **seconds})
            stopping = bool(processes.largest(int(interrupted.is_set())))
            due = settings.checkpoint_every and training.step % settings.checkpoint_every == 0
            if due or stopping or training.step > settings.steps:
                files.save(training.state())
            if progress:
                progress.advance(_shown(record))
            if stopping:
                raise KeyboardInterrupt
    if folder is not None and processes.main:
        save(models.policy.model.to("cpu", models.dtype), models.policy.tokenizer, folder / "model")
    return files.records


class Training:
    """The policy, its optimiser and the number of the step: everything that changes in a run."""

    def __init__(
        self, settings: Settings, task: Task, models: Models, objective: Objective, processes: Processes
    ) -> None:
        self.settings, self.task, self.models = settings.resolved, task, models
        self.objective, self.processes = objective, processes
        self.step = 0
        self.parameters = [one for one in models.policy.model.parameters() if one.requires_grad]
        kind = torch.optim.SGD if settings.optimiser == "sgd" else torch.optim.Adam
        self.optimiser = kind(self.parameters, lr=settings.learning_rate, fused=True)
        self.batch: Rollouts | None = None
        self._seconds: dict[str, float] = {}

    def next(self, files: RunFolder) -> tuple[Record, dict[str, float]]:
        """Do one step: measure what is due, then update; after the last step measure alone.

        Returns:
            The metrics of the step, and the seconds spent on measuring, generation and update.
        """
        self._seconds, self.batch = {}, None
        record: Record = {"step": self.step}

        def save_failed() -> Path | None:
            batch = None if self.batch is None else vars(self.batch)
            return files.save({**self.state(), "batch": batch}, "failed.pt")

        with located(self.step, "measuring", save_failed), self._timed("measuring"):
            record |= self._measure()
        if self.step < self.settings.steps:
            with located(self.step, "generation", save_failed), self._timed("generation"):
                batch = self.batch = self._generate()
            with located(self.step, "update", save_failed), self._timed("update"):
                record |= self._update(batch)
        self.step += 1
        return record, self._seconds

    def _measure(self) -> Record:
        of = self.models, self.task, self.settings, self.step, self.processes
        record: Record = {}
        if self._due(self.settings.eval_every, ends=True):
            record |= evaluate(*of)
        if self._due(self.settings.gradient_every, ends=False):
            record |= compare_gradients(*of)
        return record

    def _due(self, every: int, *, ends: bool) -> bool:
        """True every so many steps; with `ends` also at the first and the last, without it never at the first."""
        at_an_end = self.step in (0, self.settings.steps)
        return (ends and at_an_end) or (every > 0 and self.step % every == 0 and (ends or self.step > 0))

    def _generate(self) -> Rollouts:
        """This step's rollouts from the present policy, with the reference's log-probs if the KL term reads them."""
        settings = self.settings
        sizes = (settings.prompts, settings.group_size)
        batch = draw(self.models.policy, self.task, settings, "train", (self.step,), *sizes, self.processes)
        if not self.objective.needs_reference:
            return batch
        size, temperature = settings.micro_batch, settings.temperature
        return replace(batch, ref_logp=score_in_parts(self.models.reference, batch, size, temperature=temperature))

    def _update(self, batch: Rollouts) -> Record:
        """`inner_epochs` updates with one batch, whose sampler is the policy before the first of them."""
        settings = self.settings
        record: Record = {}
        # At the last inner epoch the gradient is measured with the sampler of this batch as well.
        measured = settings.inner_epochs > 1 and self._due(settings.gradient_every, ends=False)
        sampler = self.models.policy.frozen() if measured else None
        for epoch in range(settings.inner_epochs):
            if measured and epoch == settings.inner_epochs - 1:
                with self._timed("measuring"):
                    of = self.models, self.task, settings, self.step, self.processes
                    record |= compare_gradients(*of, sampler)
            self.optimiser.zero_grad(set_to_none=True)
            most = longest(settings, self.task)
            info = accumulate(self.objective, self.models, batch, self.processes, longest=most)
            if epoch == 0:
                record |= of_batch(batch, info, self.models.policy.end)
                batch = self.batch = replace(batch, old_logp=info.logp)
            norm = self._optimise(self.step * settings.inner_epochs + epoch)
            record |= {"gradient_norm": norm} if epoch == 0 else {"gradient_norm_last": norm}
        if settings.inner_epochs > 1:
            record |= of_ratios(info, self.objective.settings)
        return record

    def _optimise(self, update: int) -> float:
        """One step of the optimiser; the gradient's norm before it is shortened."""
        settings = self.settings
        self.processes.sum_gradients(self.parameters)
        norm = float(torch.nn.utils.get_total_norm([one.grad for one in self.parameters if one.grad is not None]))
        if not norm < float("inf"):
            raise NotFiniteError(f"the gradient's norm is {norm}")
        if settings.max_norm and norm > settings.max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, settings.max_norm, torch.tensor(norm))
        for group in self.optimiser.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (update + 1) / max(settings.warmup, 1))
        self.optimiser.step()
        return norm

    def state(self) -> dict[str, Any]:
        """Return the state that the rest of the run depends on; prompts and uniforms follow from the step."""
        return {
            "step": self.step,
            "model": self.models.policy.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": torch.get_rng_state(),
        }

    def restore(self, files: RunFolder, folder: Path | None) -> None:
        """Continue from the last checkpoint of the folder; every process reads the same one."""
        state = files.restore()
        if not self.processes.main and folder is not None and (folder / CHECKPOINT).exists():
            state = torch.load(folder / CHECKPOINT, map_location="cpu", weights_only=True)
        if state is None:
            return
        try:
            self.models.policy.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UsageError(f"the checkpoint in {folder} is of another model; start anew with --again") from error
        torch.set_rng_state(state["random"])
        self.step = state["step"]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the seconds inside to one activity, less those of activities nested in it."""
        started, before = time.perf_counter(), sum(self._seconds.values())
        yield
        nested = sum(self._seconds.values()) - before
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started - nested


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Let Ctrl-C ask for an end after the present step; a second one ends the run at once.

    In threads other than the main one, which cannot catch signals, Ctrl-C is left as it is.
    """
    requested = threading.Event()

    def request(*_: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    if threading.current_thread() is not threading.main_thread():
        yield requested
        return
    before = signal.signal(signal.SIGINT, request)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def located(step: int, doing: str, save: Callable[[], Path | None]) -> Iterator[None]:
    """Raise KltestError with the step and the activity if a number is not finite, the KL term fails or memory runs out.

    `save` writes the batch and the state for inspection, and returns the path.
    """
    try:
        yield
    except (NotFiniteError, TargetError) as error:
        path = save()
        where = f"; the batch and the state before it are in {path}" if path else ""
        raise KltestError(f"step {step}, {doing}: {str(error).rstrip('.')}{where}") from error
    except (MemoryError, RuntimeError) as error:
        # torch.OutOfMemoryError is a RuntimeError.
        if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or "not enough memory" in str(error)):
            raise
        lower = {"measuring": "eval_prompts or micro_batch", "generation": "prompts, group_size or max_tokens"}
        raise KltestError(f"step {step}, {doing}: out of memory; lower {lower.get(doing, 'micro_batch')}") from error


def _set_threads(settings: Settings) -> None:
    if settings.threads or (is_tiny(settings.model) and parameters_asked(settings.model) < 1_000_000):
        # Spreading so little work over threads costs more than it gains, and much more if cores are shared.
        torch.set_num_threads(settings.threads or 1)


def _shown(record: Record) -> str:
    names = {"reward": "reward", "reward_held_out": "held-out", "kl": "KL"}
    return ", ".join(f"{label} {record[name]:.3f}" for name, label in names.items() if name in record)
