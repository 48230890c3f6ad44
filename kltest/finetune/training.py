"""What changes in a run, the policy and its optimiser, and one step of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kltest.errors import UsageError
from kltest.finetune.drawing import draw, longest
from kltest.finetune.faults import NotFiniteError, told
from kltest.finetune.journal import Journal, Record
from kltest.finetune.measure import compare_gradients, evaluate
from kltest.finetune.models import Models
from kltest.finetune.objective import Objective
from kltest.finetune.processes import Processes
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Task
from kltest.finetune.update import accumulate, needs_reference
from kltest.finetune.watching import of_batch, of_ratios
from kltest.language_models.rollouts import Rollouts
from kltest.language_models.scoring import score_in_parts


class Training:
    """The policy, its optimiser and how far it is: all that changes in a run."""

    def __init__(
        self, settings: Settings, task: Task, models: Models, objective: Objective, processes: Processes
    ) -> None:
        self.settings, self.task, self.models = settings, task, models
        self.objective, self.processes = objective, processes
        self.step = 0
        self.parameters = [one for one in models.policy.model.parameters() if one.requires_grad]
        self.optimiser = _optimiser(settings, self.parameters)
        self._batch: Rollouts | None = None
        self._seconds: dict[str, float] = {}

    def next(self, journal: Journal) -> tuple[Record, dict[str, float]]:
        """Measure what is due, then one step; after the last step the measurements alone."""
        self._seconds, self._batch = {}, None
        record: Record = {"step": self.step}

        def keep() -> Path | None:
            batch = None if self._batch is None else vars(self._batch)
            return journal.keep({**self.state(), "batch": batch}, "failed.pt")

        with told(self.step, "measuring", keep), self._timed("measuring"):
            record |= self._measured()
            self.processes.wait()
        if self.step < self.settings.steps:
            with told(self.step, "generation", keep), self._timed("generation"):
                batch = self._batch = self._drawn()
            with told(self.step, "update", keep), self._timed("update"):
                record |= self._updated(batch)
        self.step += 1
        return record, self._seconds

    def _measured(self) -> Record:
        """Every so many steps, and at the start and the end."""
        settings = self.settings
        found: Record = {}
        if self.processes.main and self._due(settings.eval_every, ends=True):
            found |= evaluate(self.models, self.task, settings, self.step)
        if self.processes.main and self._due(settings.gradient_every, ends=False):
            found |= compare_gradients(self.models, self.task, settings, self.step)
        return found

    def _due(self, every: int, *, ends: bool) -> bool:
        at_an_end = self.step in (0, self.settings.steps)
        return (ends and at_an_end) or (every > 0 and self.step % every == 0 and (ends or self.step > 0))

    def _drawn(self) -> Rollouts:
        """This step's rollouts from the present policy, with the reference's log-probs if they are needed."""
        settings = self.settings
        sizes = (settings.prompts, settings.group_size)
        batch = draw(self.models.policy, self.task, settings, "train", (self.step,), *sizes, self.processes)
        if needs_reference(self.objective):
            ref_logp = score_in_parts(
                self.models.reference, batch, settings.micro_batch, temperature=settings.temperature
            )
            batch = replace(batch, ref_logp=ref_logp)
        return batch

    def _updated(self, batch: Rollouts) -> Record:
        """`inner_epochs` updates with one batch, whose sampler is the policy before the first."""
        settings = self.settings
        record: Record = {}
        measured = settings.inner_epochs > 1 and self._due(settings.gradient_every, ends=False)
        sampler = self.models.policy.frozen() if measured and self.processes.main else None
        for epoch in range(settings.inner_epochs):
            if measured and epoch == settings.inner_epochs - 1:
                with self._timed("measuring"):
                    if sampler is not None:
                        record |= compare_gradients(self.models, self.task, settings, self.step, sampler)
                    self.processes.wait()
            self.optimiser.zero_grad(set_to_none=True)
            followed = accumulate(
                self.objective,
                self.models.policy,
                self.models.reference,
                batch,
                self.processes,
                longest=longest(settings, self.task),
            )
            if epoch == 0:
                record |= of_batch(batch, followed, self.models.policy.end)
                batch = self._batch = replace(batch, old_logp=followed.logp)
            norm = self._moved(self.step * settings.inner_epochs + epoch)
            record |= {"gradient_norm": norm} if epoch == 0 else {"gradient_norm_last": norm}
        if settings.inner_epochs > 1:
            record |= of_ratios(followed, self.objective.settings)
        return record

    def _moved(self, update: int) -> float:
        """One step of the optimiser; the norm of the gradient."""
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
        """What the rest of the run depends on: prompts and uniforms come from the number of the step."""
        return {
            "step": self.step,
            "model": self.models.policy.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": torch.get_rng_state(),
        }

    def restore(self, journal: Journal, folder: Path | None) -> None:
        """Go on from the last checkpoint of the folder, every process from the same."""
        state = journal.restored()
        if not self.processes.main and folder is not None and (folder / "checkpoint.pt").exists():
            state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
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
        """Seconds are added to what they are spent on, and to nothing around it."""
        started, before = time.perf_counter(), sum(self._seconds.values())
        yield
        inside = sum(self._seconds.values()) - before
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started - inside


def _optimiser(settings: Settings, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if settings.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=settings.learning_rate, fused=True)
    return torch.optim.Adam(parameters, lr=settings.learning_rate, fused=True)
