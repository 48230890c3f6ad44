"""Training with one gradient in one draw of an environment: expected gradients once, sampled ones many times."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from scipy.stats import t

from kltest.environments import bandit, mdp, sequence
from kltest.environments.policies import table
from kltest.reproduce.frames import Row
from kltest.sweeps.run import Batching
from kltest.sweeps.settings import Setting, Settings
from kltest.sweeps.store import digest
from kltest.training import Problem, Run, train

from ..arrays import generator

# The gradient of the penalty that each estimator is an example of, and what the paper calls it.
GRADIENTS = {
    "none": "no penalty",
    "k1-loss": "naive: k1 differentiated",
    "k3-loss": "naive: k3 differentiated",
    "k1-reward-immediate": "partial: each token's own KL",
    "last-token": "last token",
    "k1-reward": "correct: whole rollouts",
}
CORRECT, PARTIAL = "k1-reward", "k1-reward-immediate"

# Logits of references and rewards are normal; returns have a standard deviation of about one.
VOCABULARY, LENGTH = 3, 4
ARMS = 6
STATES, ACTIONS, STEPS = 5, 3, 4
SPREAD = 1.0

SETTINGS = Settings(
    title="Training curves: naive, partial, last-token and correct gradients",
    tags=("exact", "sampled", "training"),
    values={
        "environment": ("bandit", "sequence", "mdp"),
        "estimator": tuple(GRADIENTS),
        "beta": Setting(0.5, allowed=(0.001, 1000.0)),
        "learning_rate": Setting(0.5, allowed=(1e-4, 10.0)),
        "batch_size": Setting(16, allowed=(1, 4096)),
        # Updates, and how many lie between two measurements.
        "updates": Setting(400, allowed=(1, 100_000)),
        "every": Setting(20, full=10, allowed=(1, 10_000)),
        # Sampled runs of one draw of the environment.
        "runs": Setting(16, full=64, allowed=(2, 10_000)),
    },
    seeds={"quick": 3, "full": 10},
)


BATCHING = Batching(("seed", "estimator"), size=18)
MEASURED = ("reward", "kl", "objective")

Configuration = Mapping[str, Any]


def compute_batch(configurations: Sequence[Configuration]) -> list[list[Row]]:
    """A row a measurement: of the expected gradient, and the mean of sampled runs with the reach of its interval."""
    first = configurations[0]
    record = range(0, first["updates"] + 1, first["every"])
    exact = train([_run(one) for one in configurations], steps=first["updates"], record=record, optima=False)
    runs = [_run(one, number) for one in configurations for number in range(first["runs"])]
    drawn = train(runs, steps=first["updates"], batch_size=first["batch_size"], record=record, optima=False)
    # Of the interval of a mean over runs (Student's t).
    quantile = t.ppf(0.975, first["runs"] - 1) / np.sqrt(first["runs"])
    found = []
    for index, one in enumerate(configurations):
        mine, rows = slice(index * one["runs"], (index + 1) * one["runs"]), []
        for at, update in enumerate(exact.steps):
            row = {**one, "update": int(update)}
            for name in MEASURED:
                sampled = getattr(drawn, name)[at, mine]
                row[f"{name}_exact"] = float(getattr(exact, name)[at, index])
                row[name], row[f"{name}_reach"] = float(sampled.mean()), float(quantile * sampled.std(ddof=1))
            rows.append(row)
        found.append(rows)
    return found


def _run(one: Configuration, number: int | None = None) -> Run:
    """With expected gradients, or the sampled run of this number, whose uniforms are those of the other estimators."""
    estimator = None if one["estimator"] == "none" else one["estimator"]
    seed = 0 if number is None else int(digest("curves", one["environment"], one["seed"], number), 16) % 2**32
    which = problem(one["environment"], one["seed"])
    return Run(which, estimator, beta=one["beta"], learning_rate=one["learning_rate"], seed=seed)


@cache
def problem(label: str, seed: int) -> Problem:
    """A random reference, at which training starts, and random rewards.

    The dynamics of the process are the same in all draws: what is trained together differs in its rewards alone.
    """
    base = {"bandit": partial(bandit, ARMS), "sequence": partial(sequence, VOCABULARY, LENGTH)}
    chosen, drawn = base.get(label, partial(mdp, STATES, ACTIONS, STEPS))(), generator("curves", label, seed)
    shape = (chosen.n_contexts, chosen.vocabulary)
    reference = table(SPREAD * drawn.standard_normal(shape))
    reward = drawn.standard_normal(shape) / np.sqrt(chosen.horizon)
    return Problem(replace(chosen, reward=reward), reference, reference)
