"""Audit what each estimator follows on a trained policy, a line of audits.csv an estimator: minutes of one core.

python -m experiments.finetune.audits > experiments/finetune/audits.csv
"""

import math
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from kltest.auditing.models import load as load_model
from kltest.auditing.passes import CutModel, Models
from kltest.auditing.report import Audit
from kltest.auditing.run import Auditing
from kltest.auditing.units import drawn
from kltest.files import as_csv
from kltest.finetune.models import load
from kltest.finetune.run import run
from kltest.finetune.settings import Settings
from kltest.finetune.tasks import task_named
from kltest.grading.options import Options
from kltest.loss.global_state import preserved
from kltest.reproduce.frames import Row

from ..records import rounded
from .experiment import FIGURES, settings_for
from .settings import AUDITS, LARGER

# Held-out prompts, of which an audit draws its own.
PROMPTS = 1024


def audits(settings: Settings, estimators: Iterable[str], units: int) -> Iterator[Row]:
    """Train the policy of a run, and audit each estimator on rollouts of held-out prompts."""
    task = task_named(settings.task, "")
    with tempfile.TemporaryDirectory() as folder:
        ended = run(settings, Path(folder), quiet=True)[-1]
        policy = load_model(f"{folder}/model", "model", seed=0, dtype="float32", device="cpu")
    reference = load(settings, task, torch.device("cpu")).reference
    prompts = [one.prompt for one in task.draw("held-out", PROMPTS, np.random.default_rng(0))]
    models = Models(CutModel(policy), CutModel(reference))
    options = Options.of(
        group_size=settings.group_size, error_rate=AUDITS["error_rate"], margin=AUDITS["margin"], expect="reverse_kl"
    )
    lengths = {"group_size": settings.group_size, "max_new_tokens": task.max_tokens}
    for name in estimators:
        auditing = Auditing(name, models, options, units=units)
        # As `kltest audit`, but of so many prompts whatever the first ones say: one look instead of several.
        auditing.looks = 1
        with auditing.sketch.listening(), preserved(0):
            for rollouts in islice(drawn(policy, prompts, temperature=1.0, seed=0, **lengths), units):
                auditing.add(rollouts)
        yield {"estimator": name, "kl": rounded(ended["kl"], FIGURES), **row(auditing.report())}


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
    sys.stdout.write(as_csv(list(audits(settings_for({**LARGER, "seed": 0}), AUDITS["estimators"], AUDITS["units"]))))
