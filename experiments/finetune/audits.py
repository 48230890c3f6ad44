"""Audit what each estimator follows on a trained policy, a line of audits.csv an estimator: minutes of one core.

python -m experiments.finetune.audits > experiments/finetune/audits.csv
"""

import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import torch

from kltest.auditing.passes import CutModel
from kltest.auditing.passes import Models as AuditedModels
from kltest.auditing.report import Audit
from kltest.auditing.run import Auditing
from kltest.auditing.units import drawn
from kltest.files import as_csv
from kltest.finetune.models import Models, load
from kltest.finetune.objective import Objective
from kltest.finetune.run import Training
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import Task, task_named
from kltest.grading.options import Options
from kltest.loss.global_state import preserved
from kltest.reproduce.frames import Row

from ..records import rounded
from .experiment import FIGURES, settings_for
from .settings import AUDITS, SAME

# Held-out prompts, of which an audit draws its own.
PROMPTS = 1024


def ended(settings: Settings) -> tuple[Models, Task]:
    """Train the policy of a run to its end."""
    task = task_named(settings.task)
    models = load(settings, task, torch.device("cpu"))
    training = Training(settings, task, models, Objective(settings))
    while training.step < settings.steps:
        training.next()
    return models, task


def audit(models: Models, task: Task, settings: Settings, estimator: str, units: int) -> Audit:
    """Audit an estimator on rollouts of held-out prompts."""
    prompts = [one.prompt for one in task.draw("held-out", PROMPTS, np.random.default_rng(0))]
    options = Options.of(
        group_size=AUDITS["group_size"], error_rate=AUDITS["error_rate"], margin=AUDITS["margin"], expect="reverse_kl"
    )
    audited = AuditedModels(CutModel(models.policy), CutModel(models.reference))
    auditing = Auditing(estimator, audited, options, units=units)
    # As `kltest audit`, but of so many prompts whatever the first ones say: one look instead of several.
    auditing.looks = 1
    lengths = {"group_size": AUDITS["group_size"], "max_new_tokens": task.max_tokens}
    with auditing.sketch.listening(), preserved(0):
        source = drawn(models.policy, prompts, temperature=settings.temperature, seed=0, **lengths)
        for rollouts in islice(source, units):
            auditing.add(rollouts)
    return auditing.report()


def audits(settings: Settings, estimators: Iterable[str], units: int) -> Iterator[Row]:
    """Audit each estimator on the policy that a run ends with."""
    models, task = ended(settings)
    for name in estimators:
        yield {"estimator": name, **row(audit(models, task, settings, name, units))}


def row(found: Audit) -> Row:
    """The numbers of an audit; of what is followed the coefficient of its first name, and how many others may fit."""
    follows = found.follows
    intervals = {"distance": found.distance} | ({"coefficient": next(iter(follows.terms.values()))} if follows else {})
    numbers = {"signal_to_noise": found.signal_to_noise, "crossing": found.crossing}
    for name, one in intervals.items():
        numbers |= one.named(name)
    return {
        "verdict": found.verdict,
        "follows": " + ".join(follows.terms) if follows else "zero",
        "rivals": len(follows.rivals) if follows else 0,
        **{
            name: None if one is None or not math.isfinite(one) else rounded(one, FIGURES)
            for name, one in numbers.items()
        },
        **{name: getattr(found, name) for name in ("units", "rollouts", "tokens")},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    policy = settings_for({**SAME, **AUDITS["policy"]})
    sys.stdout.write(as_csv(list(audits(policy, AUDITS["estimators"], AUDITS["units"]))))
