"""The 1,000-arm bandit of the baseline study: k1 + λ(w − 1) in both places, where λ is nothing but a baseline."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kltest.environments import Instance, bandit
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.training import PerRun, Problem, Run, State, train

from .settings import ARMS, RECORDED

Row = dict[str, Any]


def tables() -> tuple[np.ndarray, np.ndarray]:
    """(1, K) logits of the reference and of the start: the reference's are drawn first."""
    generator = np.random.default_rng(int(ARMS["seed"]))
    count = int(ARMS["count"])
    reference = generator.normal(0, ARMS["reference"], count)
    reference -= np.logaddexp.reduce(reference)
    return reference[None], (reference + generator.normal(0, ARMS["start"], count))[None]


def instance() -> Instance:
    reference, start = tables()
    return Instance.of(bandit(int(ARMS["count"])), start, reference)


def least_noisy_value(state: State) -> Tensor:
    """(R,) the λ of the least noisy value, −Cov(u, w)/Var w, exactly."""
    p, u = state.log_policy[:, 0].exp(), (state.log_policy - state.log_reference)[:, 0]
    w = (-u).exp()
    kl = (p * u).sum(dim=1)
    # E w = 1, since policy and reference are positive everywhere.
    return -((p * u * w).sum(dim=1) - kl) / ((p * w**2).sum(dim=1) - 1)


def least_noisy_gradient(state: State) -> Tensor:
    """(R,) the λ of the least noisy gradient, 1 + E[u‖g‖²]/E‖g‖², exactly."""
    p, u = state.log_policy[:, 0].exp(), (state.log_policy - state.log_reference)[:, 0]
    norms = 1 - 2 * p + (p**2).sum(dim=1, keepdim=True)
    return 1 + (p * u * norms).sum(dim=1) / (p * norms).sum(dim=1)


def coefficients() -> dict[str, float]:
    """Both at the start."""
    one = instance()
    policy, reference = (torch.from_numpy(table)[None] for table in (one.policy, one.reference))
    state = State(policy, reference, policy)
    return {"value": float(least_noisy_value(state)), "gradient": float(least_noisy_gradient(state))}


def noise(one: Mapping[str, Any]) -> list[Row]:
    """Variance of value and gradient of one rollout at the start, over all arms."""
    found = exact(resolve("lambda-baseline", Call(arguments={"lam": one["lam"]})), instance())
    assert found.value is not None
    size = float((found.gradient**2).sum())
    best = {f"least_noisy_{name}": value for name, value in coefficients().items()}
    return [{"value_variance": found.value.std**2, "gradient_variance": found.variance / size, **best}]


def training(one: Mapping[str, Any]) -> list[Row]:
    """A row for each run's end, and one for each recorded update with the median and the middle 80 %."""
    reference, start = tables()
    problem = Problem(bandit(int(ARMS["count"])), start, reference)
    rules = {"value": least_noisy_value, "gradient": least_noisy_gradient}
    lam = PerRun(rules[one["rule"]] if one["rule"] in rules else float(one["rule"]))
    runs = [
        Run(problem, "lambda-baseline", beta=1.0, learning_rate=one["rate"], seed=seed, options={"lam": lam})
        for seed in range(one["runs"])
    ]
    record = sorted({round(step) for step in np.linspace(0, one["steps"], RECORDED)})
    history = train(runs, steps=one["steps"], batch_size=one["batch_size"], record=record, optima=False)
    ends = [{"what": "end", "run": run, "kl": float(kl)} for run, kl in enumerate(history.kl[-1])]
    low, median, high = np.quantile(history.kl, (0.1, 0.5, 0.9), axis=1)
    path = [
        {"what": "path", "step": int(step), "kl": float(median[at]), "low": float(low[at]), "high": float(high[at])}
        for at, step in enumerate(history.steps)
    ]
    return [*ends, *path]
