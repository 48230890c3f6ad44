"""The effective β: the multiple of a KL term that logged rewards or advantages hold, and which term it is."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kltest.diagnosing.answers import FINDING, NOT_LOOKED_AT, REPORTED, Answer, are_copies, needs
from kltest.diagnosing.intervals import Estimate, Units
from kltest.diagnosing.logs import Logs

FITS = 0.99
"""Share of the variation that a term has to explain to be the one."""
WANTED = "ref_logp, reward, and shaped_reward, or advantage and group with several rollouts a prompt"
TERMS = {
    "k1": lambda u: u,
    "k2": lambda u: u**2 / 2,
    "k3": lambda u: np.expm1(-np.maximum(u, -50.0)) + u,
}


@dataclass(frozen=True)
class Fit:
    """A KL term that was fitted: its name, the share that it explains, and the sums of each unit whose ratio is β."""

    name: str
    share: float
    above: np.ndarray
    below: np.ndarray


def coefficient(logs: Logs, units: Units) -> Answer:
    """The multiple of a KL term in the shaped reward, or in the advantage."""
    if "ref_logp" not in logs.columns or "reward" not in logs.columns:
        return needs("coefficient", WANTED)
    if "shaped_reward" in logs.columns:
        fits, where = list(of_rewards(logs, units)), logs.names["shaped_reward"]
    elif "advantage" in logs.columns and len(units) < len(logs):
        fits, where = list(of_advantages(logs, units)), logs.names["advantage"]
    else:
        return needs("coefficient", WANTED)
    best = max(fits, key=lambda one: round(one.share, 6), default=None)
    if best is None:
        return Answer("coefficient", REPORTED, f"β is 0: {where} holds no penalty beside the reward", {"beta": 0.0})
    if best.share < FITS:
        text = f"no KL term explains {where}: {best.name} comes nearest, with {100 * max(best.share, 0):.0f} %"
        return Answer("coefficient", NOT_LOOKED_AT, f"{text}. A critic, a clip or a β that changes do that")
    beta = units.estimate(lambda one, other: one / other, best.above, best.below)
    numbers: dict[str, Estimate | float] = {"beta": beta, "explained": best.share}
    text = f"{where} holds −{beta} × {best.name}, which explains {100 * best.share:.4g} %"
    if beta.below(0):
        return Answer("coefficient", FINDING, f"{text}. The sign is wrong: distance is rewarded", numbers, "KL103")
    return Answer("coefficient", REPORTED, text, numbers)


def terms(logs: Logs) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the KL terms (N, T) of tokens, by name; columns that are copies stand once."""
    seen: list[str] = []
    for own in ("logp", "old_logp", "rollout_logp"):
        if own in logs.columns and not any(are_copies(logs, own, other) for other in seen):
            seen.append(own)
            u = logs.gap(own, "ref_logp")
            yield from ((f"{name} of {logs.names[own]}", np.where(logs.live, k(u), 0.0)) for name, k in TERMS.items())


def of_rewards(logs: Logs, units: Units) -> Iterator[Fit]:
    """Yield fits of the reward that lacks in the shaped reward, a token and a rollout at a time; none if none lacks."""
    reward, shaped = logs.columns["reward"], logs.columns["shaped_reward"]
    lacks = {"a rollout": _whole(reward, logs) - _whole(shaped, logs)}
    if shaped.ndim == 2:
        last = logs.live.shape[1] - 1 - logs.live[:, ::-1].argmax(axis=1)
        each = reward if reward.ndim == 2 else (np.arange(shaped.shape[1]) == last[:, None]) * reward[:, None]
        lacks = {"a token": np.where(logs.live, each - shaped, 0.0), **lacks}
    for size, lacking in lacks.items():
        if np.abs(lacking).max() <= 1e-9:
            return
        for name, term in terms(logs):
            x = term if lacking.ndim == 2 else term.sum(axis=1)
            square = float((x**2).sum())
            left = lacking - (lacking * x).sum() / square * x if square else lacking
            share = 1 - float((left**2).sum() / (lacking**2).sum())
            yield Fit(f"{name}, {size}", share, units.sums(lacking * x), units.sums(x**2))


def of_advantages(logs: Logs, units: Units) -> Iterator[Fit]:
    """Yield fits of the advantage by reward and KL term within each prompt; none if the reward alone explains it.

    Advantages are a(R − βX) + c, with a and c of the prompt. By Cramer's rule a·det and aβ·det are polynomials of
    sums over the prompt; β is the ratio of their means over prompts.
    """
    live, group = logs.live, logs.group
    whole = _whole(logs.columns["reward"], logs)[:, None]
    advantage = logs.columns["advantage"].reshape(len(logs), -1)
    tokens = advantage.shape[1] > 1
    at = live if tokens else live.any(axis=1)[:, None]
    counts = np.maximum(units.sums(at.astype(float)), 1)

    def centred(values: np.ndarray) -> np.ndarray:
        values = np.where(at, values, 0.0)
        return np.where(at, values - (units.sums(values) / counts)[group, None], 0.0)

    a, r = centred(advantage), centred(whole)
    total = float((a**2).sum())
    arr, rr = units.sums(a * r), units.sums(r**2)
    alone = total - float((arr**2 / np.where(rr > 0, rr, np.inf)).sum())
    if alone <= 1e-9 * total:
        return
    for name, term in terms(logs):
        credits = {"whole rollouts": term.sum(axis=1)[:, None]}
        if tokens:
            credits |= {"to go": term[:, ::-1].cumsum(axis=1)[:, ::-1], "immediate": term}
        for credit, value in credits.items():
            x = centred(value)
            ax, rx, xx = units.sums(a * x), units.sums(r * x), units.sums(x**2)
            det, of_r, of_x = rr * xx - rx**2, arr * xx - ax * rx, ax * rr - arr * rx
            sure = det > 1e-9 * rr * xx
            explained = np.where(sure, (of_r * arr + of_x * ax) / np.where(sure, det, 1.0), 0.0)
            share = float(explained.sum() / max((a**2 * sure[group, None]).sum(), 1e-300))
            yield Fit(f"{name}, credit: {credit}", share, np.where(sure, -of_x, 0.0), np.where(sure, of_r, 0.0))


def _whole(values: np.ndarray, logs: Logs) -> np.ndarray:
    return values if values.ndim == 1 else np.where(logs.live, values, 0.0).sum(axis=1)
