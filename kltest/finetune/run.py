"""A run, from top to bottom: load the models; then step by step measure, generate, update, write down.

`run` is the loop. `Training` holds what changes in it, the policy and its optimiser, with one method for each part of a
step: `_measure`, `_generate`, `_update`, `_optimise`. Behind them stand `kltest.finetune.rollouts` (random streams),
`update` and `objective` (the gradient), `evaluation` (what is measured) and `checkpoints` (the folder).
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kltest.errors import UsageError, did_you_mean
from kltest.finetune.checkpoints import Record, RunFolder
from kltest.finetune.evaluation import compare_gradients, evaluate, of_batch, of_ratios
from kltest.finetune.models import Models, device_of, load
from kltest.finetune.objective import Fields, Objective
from kltest.finetune.plot import plot
from kltest.finetune.rollouts import check_prompts, draw, longest
from kltest.finetune.settings import NONE, Settings
from kltest.finetune.stopping import interruptible, located
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
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "kltest finetune runs in one process: start it without accelerate launch or torchrun, with micro_batch if "
            "memory is short; a trainer of yours with several processes can be measured with kltest.KLAuditCallback"
        )
    _set_threads(settings)
    task = task_named(settings.task, settings.keys)
    task.draw("held-out", 1, np.random.default_rng(0))  # refuses a task that could not be measured
    device = device_of(settings.device)
    files = RunFolder(folder, settings, again=again)
    objective = Objective(settings)
    models = load(settings, task, device)
    check_prompts(models.policy, task, settings)
    training = Training(settings, task, models, objective)
    training.restore(files)
    label = f"{settings.resolved.kl}, β = {settings.beta:g}"
    tracker = tracker_of(settings, folder)
    shown = not quiet and training.step <= settings.steps
    bar = Progress(label, settings.steps + 1, done=training.step) if shown else nullcontext()
    with bar as progress, interruptible() as interrupted:
        while training.step <= settings.steps:
            record, seconds = training.next(files)
            files.add(record, {"step": record["step"], **seconds}, training.samples())
            if tracker:
                tracker.log({name: value for name, value in record.items() if name != "step"}, step=record["step"])
            stopping = interrupted.is_set()
            due = settings.checkpoint_every and training.step % settings.checkpoint_every == 0
            if due or stopping or training.step > settings.steps:
                files.save(training.state())
            if progress:
                progress.advance(_shown(record))
            if stopping:
                raise KeyboardInterrupt
    if tracker:
        tracker.finish()
    if folder is not None:
        plot(files.records, folder / "run.svg")
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
        of = self.models, self.task, self.settings, self.step
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
        policy = self.models.policy
        batch = draw(policy, self.task, settings, "train", (self.step,), *sizes)
        if settings.truncated == "zero":
            assert batch.reward is not None
            batch = replace(batch, reward=batch.reward.where(batch.ended(policy.end), 0.0))
        if not self.objective.needs_reference:
            return batch
        size, temperature = settings.micro_batch, settings.temperature
        return replace(batch, ref_logp=score_in_parts(self.models.reference, batch, size, temperature=temperature))

    def _update(self, batch: Rollouts) -> Record:
        """`inner_epochs` times `minibatches` updates; the sampler is the policy before the first of them."""
        settings, policy = self.settings, self.models.policy
        record: Record = {}
        # At the last inner epoch the gradient is measured with the sampler of this batch as well.
        measured = settings.inner_epochs > 1 and self._due(settings.gradient_every, ends=False)
        sampler = policy.frozen() if measured else None
        if settings.minibatches > 1:  # the policy will have moved on when it meets the second one
            old_logp = score_in_parts(policy, batch, settings.micro_batch, temperature=settings.temperature)
            batch = self.batch = replace(batch, old_logp=old_logp)
        norms: list[float] = []
        for epoch in range(settings.inner_epochs):
            if measured and epoch == settings.inner_epochs - 1:
                with self._timed("measuring"):
                    record |= compare_gradients(self.models, self.task, settings, self.step, sampler)
            found = []
            for rows in batch.split(len(batch) // settings.minibatches):
                self.optimiser.zero_grad(set_to_none=True)
                most = longest(settings, self.task)
                found.append(accumulate(self.objective, self.models, batch.rows(rows), longest=most))
                norms.append(self._optimise(self.step * settings.updates + len(norms)))
            logps, logged = zip(*found, strict=True)
            fields = Fields.of(batch, torch.cat(logps))
            if epoch == 0:
                record |= {**of_batch(batch, fields, logged, policy.end), "gradient_norm": norms[0]}
                batch = self.batch = replace(batch, old_logp=fields.old_logp)
        if settings.updates > 1:
            record |= {"gradient_norm_last": norms[-1], **of_ratios(fields, settings)}
        return record

    def _optimise(self, update: int) -> float:
        """One step of the optimiser; the gradient's norm before it is shortened."""
        settings = self.settings
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not norm < float("inf"):
            raise NotFiniteError(f"the gradient's norm is {norm}")
        if settings.max_norm and norm > settings.max_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, settings.max_norm, torch.tensor(norm))
        for group in self.optimiser.param_groups:
            group["lr"] = settings.learning_rate * self._scheduled(update)
        self.optimiser.step()
        return norm

    def _scheduled(self, update: int) -> float:
        """The factor of the learning rate: a linear rise, then the schedule's decay towards 0 after the last update."""
        settings = self.settings
        rise = min(1.0, (update + 1) / max(settings.warmup, 1))
        last = settings.steps * settings.updates
        done = max(0, update - settings.warmup) / max(1, last - settings.warmup)
        decay = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return rise * decay.get(settings.schedule, 1.0)

    def samples(self) -> list[Record]:
        """Return the first rollouts of the step as texts."""
        if self.batch is None or not self.settings.samples:
            return []
        batch, decode = self.batch.rows(slice(self.settings.samples)), self.models.policy.decode
        parts = [one.cpu() for one in (batch.prompts, batch.prompt_mask, batch.tokens, batch.mask)]
        pairs = parts[:2], parts[2:]
        prompts, completions = ([decode(ids[live].tolist()) for ids, live in zip(*pair, strict=True)] for pair in pairs)
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
        if state is None:
            return
        try:
            self.models.policy.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
        except (RuntimeError, ValueError, KeyError) as error:
            where = files.folder
            raise UsageError(f"the checkpoint in {where} is of another model; start anew with --again") from error
        torch.set_rng_state(state["random"])
        self.step = state["step"]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Add the seconds inside to one activity, less those of activities nested in it."""
        started, before = time.perf_counter(), sum(self._seconds.values())
        yield
        nested = sum(self._seconds.values()) - before
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started - nested


def tracker_of(settings: Settings, folder: Path | None) -> Any:
    """Return accelerate's tracker of that name, started; None if the settings name none.

    Raises:
        UsageError: There is no such tracker, or it is not installed.
    """
    if settings.tracker == NONE:
        return None
    try:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kinds = {str(name): kind for name, kind in LOGGER_TYPE_TO_CLASS.items()}
        if settings.tracker not in kinds:
            hint = did_you_mean(settings.tracker, kinds)
            raise UsageError(f"tracker: {hint}{settings.tracker!r} is none of {', '.join(kinds)}")
        PartialState(cpu=settings.device == "cpu")  # trackers ask which process is the first
        kind = kinds[settings.tracker]
        tracker = kind("kltest", **({"logging_dir": folder or "."} if kind.requires_logging_directory else {}))
        tracker.start()
    except ImportError as error:
        raise UsageError(f"tracker: {settings.tracker} is not installed ({error})") from error
    tracker.store_init_configuration({**settings.plain(), "kl_options": json.dumps(dict(settings.kl_options))})
    return tracker


def _set_threads(settings: Settings) -> None:
    if settings.threads or (is_tiny(settings.model) and parameters_asked(settings.model) < 1_000_000):
        # Spreading so little work over threads costs more than it gains, and much more if cores are shared.
        torch.set_num_threads(settings.threads or 1)


def _shown(record: Record) -> str:
    names = {"reward": "reward", "reward_held_out": "held-out", "kl": "KL"}
    return ", ".join(f"{label} {record[name]:.3f}" for name, label in names.items() if name in record)
