"""Training with several updates to one sampler, with exact expectations and with drawn rollouts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kltest.environments import sequence
from kltest.sweeps.store import digest
from kltest.training import Problem, Run, train

from .settings import GROUP, RECIPES, TRAINED

Row = dict[str, Any]
MEASURED = ("gap", "kl")


def of_training(configurations: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """A row for each configuration: runs that differ in the environment alone are trained together."""
    first = configurations[0]
    estimator, ratio, _ = RECIPES[first["recipe"]]
    beta, size = TRAINED["beta"], first["batch_size"]
    problems = [problem(one["seed"]) for one in configurations]
    repeats = int(TRAINED["repeats"]) if size else 1
    runs = [
        Run(each, estimator, beta=beta, learning_rate=first["learning_rate"], seed=repeat)
        for each in problems
        for repeat in range(repeats)
    ]
    history = train(
        runs,
        steps=min(first["steps"], int(TRAINED["sampled"])) if size else first["steps"],
        batch_size=size or None,
        group_size=groups(estimator) if not size else None,
        inner_steps=first["inner_steps"],
        ratio=ratio,
        record=[int(TRAINED["early"])],
    )
    rows = []
    for index, one in enumerate(configurations):
        own = slice(index * repeats, (index + 1) * repeats)
        gaps = history.gap[:, own]
        rows.append(
            [
                {
                    **one,
                    **{name: float(getattr(history, name)[-1, own].mean()) for name in MEASURED},
                    "early_gap": float(gaps[1].mean()),
                    "low": float(np.quantile(gaps[-1], 0.1)),
                    "high": float(np.quantile(gaps[-1], 0.9)),
                }
            ]
        )
    return rows


def problem(seed: int) -> Any:
    environment = sequence(int(TRAINED["vocabulary"]), int(TRAINED["length"]))
    return Problem.draw(
        environment, int(digest(["training", seed])[:8], 16), distance=TRAINED["distance"], reward="normal"
    )


def groups(estimator: str) -> int | None:
    """The size of groups in exact training; None where rows are apart."""
    return GROUP if estimator == "leave-one-out" else None
