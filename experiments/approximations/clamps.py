"""A clamped k3: where its gradient is dead, how much of it is left, and whether a policy finds its way back."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kltest.environments import Instance, bandit
from kltest.environments.policies import softmax_gradient
from kltest.estimators import find
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.training import Problem, Run, train
from kltest.truth import gradient, value

from .settings import CLAMPED_TOKENS, LOG_RATIOS, RETURN

Row = dict[str, Any]
REFERENCE = -np.log(np.arange(1, CLAMPED_TOKENS + 1))[None]


def weight(name: str, u: np.ndarray, **options: Any) -> np.ndarray:
    """∂loss/∂log π of a registered estimator at log-ratios u: the weight of g_t."""
    logp = torch.tensor(u, dtype=torch.float64, requires_grad=True)
    find(name).function(logp, torch.zeros_like(logp), **options).sum().backward()
    assert logp.grad is not None
    return logp.grad.numpy()


def zones(one: Mapping[str, Any]) -> list[Row]:
    """The weight on g over a grid of log-ratios, and the edges of the zone that is alive, by bisection."""
    u = np.array(LOG_RATIOS)
    found = {name: weight(name, u) for name in ("k3-loss", "k2-loss")}
    found["k3-clamped"] = weight("k3-clamped", u, bound=one["bound"])

    def alive(at: float) -> bool:
        return bool(weight("k3-clamped", np.array([at]), bound=one["bound"])[0] != 0)

    def edge(inside: float, outside: float) -> float:
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if alive(middle) else (inside, middle)
        return inside

    edges = {"low": edge(-1e-3, -20.0), "high": edge(1e-3, 300.0)}
    return [
        {**edges, "u": at, **{name: float(values[index]) for name, values in found.items()}}
        for index, at in enumerate(LOG_RATIOS)
    ]


def instance_at(lead: float) -> Any:
    """The reference, and a policy in which the likeliest token has run ahead by `lead`."""
    policy = REFERENCE.copy()
    policy[0, 0] += lead
    return Instance.of(bandit(CLAMPED_TOKENS), policy, REFERENCE)


def at_a_lead(one: Mapping[str, Any]) -> list[Row]:
    """Share of the pull that is left along the way back: derivative by the leading logit, and the whole gradient."""
    instance = instance_at(one["lead"])
    found = exact(resolve("k3-clamped", Call(arguments={"bound": one["bound"]})), instance).gradient
    forward = gradient("forward_kl", instance)
    chances, u = np.exp(instance.policy), instance.policy - instance.reference
    alive = np.exp(-u) - 1 + u < one["bound"]
    again = softmax_gradient(np.where(alive, chances - np.exp(instance.reference), 0.0), instance.policy)
    return [
        {
            "kl": value("kl", instance),
            "dead_mass": float(np.exp(instance.reference)[~alive].sum()),
            "pull": float(found[0, 0]),
            "pull of k3-loss": float(forward[0, 0]),
            "relative_bias": float(np.linalg.norm(found - forward) / np.linalg.norm(forward)),
            "theory_error": float(np.linalg.norm(found - again)),
        }
    ]


def way_back(one: Mapping[str, Any]) -> list[Row]:
    """Exact training, without a reward, from a policy that has run ahead: KL(π‖ref) on the way."""
    start = REFERENCE.copy()
    start[0, 0] += one["start"]
    run = Run(
        Problem(bandit(CLAMPED_TOKENS), start, REFERENCE),
        one["penalty"],
        beta=1.0,
        learning_rate=RETURN["learning_rate"],
    )
    kl = train([run], steps=RETURN["steps"], record=1, optima=False).kl[:, 0]
    home = np.flatnonzero(kl < RETURN["home"])
    returned = int(home[0]) if len(home) else None
    shown = sorted({round(step) for step in np.geomspace(1, RETURN["steps"], RETURN["records"])})
    return [{"step": step, "kl": float(kl[step]), "returned": returned} for step in (0, *shown)]
