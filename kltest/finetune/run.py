"""The run: draw rollouts, follow the gradient, measure, write down; from the last checkpoint, if there is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kltest.finetune.faults import Interrupt
from kltest.finetune.journal import Journal, Record
from kltest.finetune.models import load
from kltest.finetune.objective import Objective
from kltest.finetune.processes import Processes
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import task_named
from kltest.finetune.training import Training
from kltest.language_models.models import parameters_asked, save
from kltest.sweeps.progress import Progress


@dataclass(frozen=True)
class History:
    """The records of a run, one a step, names as in METRICS; what was not measured at a step is missing there."""

    settings: Settings
    records: list[Record]

    def of(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric was measured, and its values."""
        there = [record for record in self.records if name in record]
        return [record["step"] for record in there], [record[name] for record in there]


def run(settings: Settings, folder: Path | None = None, *, again: bool = False, quiet: bool = False) -> History:
    """Train and measure. Everything is kept in `folder`, if one is given, and a run that was stopped there goes on.

    Raises UsageError for settings that cannot be met, KltestError where a loss is not finite or memory does not
    suffice, KeyboardInterrupt after the step in which it was asked for.
    """
    _set_threads(settings)
    processes = Processes.here(settings.device)
    processes.share(settings.prompts, "prompts")
    task = task_named(settings.task)
    journal = Journal(folder if processes.main else None, settings, again=again)
    objective = Objective(settings)
    if not processes.main:
        processes.wait()
    models = load(settings, task, processes.device)
    if processes.main:
        processes.wait()
    training = Training(settings, task, models, objective, processes)
    training.restore(journal, folder)
    label = f"{settings.resolved.kl}, β = {settings.beta:g}"
    shown = not quiet and processes.main and training.step <= settings.steps
    progress = Progress(label, settings.steps + 1, done=training.step) if shown else None
    with Interrupt() as interrupt:
        while training.step <= settings.steps:
            record, seconds = training.next(journal)
            if processes.main:
                journal.add(record, {"step": record["step"], **seconds})
            stopping = bool(processes.largest(int(interrupt.asked)))
            due = settings.checkpoint_every and training.step % settings.checkpoint_every == 0
            if due or stopping or training.step > settings.steps:
                journal.keep(training.state())
            if progress:
                progress.advance(_shown(record))
            if stopping:
                raise KeyboardInterrupt
    if folder is not None and processes.main:
        save(models.policy.model, models.policy.tokenizer, folder / "model")
    return History(settings, journal.records)


def _set_threads(settings: Settings) -> None:
    small = settings.model.startswith("tiny") and parameters_asked(settings.model) < 1_000_000
    if settings.threads or small:
        # Handing out so little work costs more than it gains, and very much more where cores are shared.
        torch.set_num_threads(settings.threads or 1)


def _shown(record: Record) -> str:
    names = {"reward": "reward", "reward_held_out": "held-out", "kl": "KL"}
    return ", ".join(f"{label} {record[name]:.3f}" for name, label in names.items() if name in record)
