"""The effective β: the multiple of a KL term that logged rewards or advantages hold, and which term it is."""

from collections.abc import Iterator

import numpy as np

from kltest.diagnosing.answers import FINDING, REPORTED, Answer, judged, missing, question
from kltest.diagnosing.intervals import Units
from kltest.diagnosing.logs import Logs

FITS = 0.99
"""Share of the variation that a term has to explain to be the one."""
TERMS = {"k1": lambda u: u, "k2": lambda u: u**2 / 2, "k3": lambda u: np.expm1(-np.maximum(u, -50.0)) + u}
Fit = tuple[float, str, np.ndarray, np.ndarray]
"""The share that a KL term explains, its name, and sums (n,) over units; the ratio of their means is β."""


@question("coefficient", "ref_logp", "reward", "shaped_reward|advantage")
def coefficient(logs: Logs, units: Units, ref: str, reward: str, held: str) -> Answer:
    """The multiple of a KL term in the shaped reward, or in the advantage."""
    if held == "advantage" and "group" not in logs.columns:
        return missing("coefficient", "shaped_reward, or group with several rollouts a prompt")
    where, fits = logs.names[held], list((of_rewards if held == "shaped_reward" else of_advantages)(logs, units))
    if not fits:
        return Answer("coefficient", REPORTED, f"{where} holds no penalty beside {logs.names[reward]}", {"beta": 0.0})
    share, name, above, below = max(fits, key=lambda fit: round(fit[0], 6))
    if share < FITS:
        text = (
            f"a critic, a clip or a β that changes apart: {name} explains most of {where}, {100 * max(share, 0):.0f} %"
        )
        return missing("coefficient", text)
    beta = units.estimate(lambda one, other: one / other, above, below)
    text, status = f"{where} holds a penalty of {beta} × {name}, which explains {100 * share:.4g} %", REPORTED
    if judged(beta, low=0) == FINDING:
        text, status = f"{text}. The sign is wrong: it rewards distance", FINDING
    return Answer("coefficient", status, text, {"beta": beta, "explained": share}, "KL103" if status == FINDING else "")


def terms(logs: Logs) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the KL terms (N, T) of tokens, by name."""
    for own in (one for one in ("logp", "old_logp", "rollout_logp") if one in logs.columns):
        for name, k in TERMS.items():
            yield f"{name} of {logs.names[own]}", k(logs.gap(own, "ref_logp"))


def of_rewards(logs: Logs, units: Units) -> Iterator[Fit]:
    """Yield fits of what the shaped reward lacks, a token and a rollout at a time; none if it lacks nothing."""
    reward, shaped = logs.columns["reward"], logs.columns["shaped_reward"]
    lacks = {}
    if shaped.ndim == 2:  # a reward of the whole rollout is paid at its last token
        last = logs.live.shape[1] - 1 - logs.live[:, ::-1].argmax(axis=1)
        each = reward if reward.ndim == 2 else (np.arange(shaped.shape[1]) == last[:, None]) * reward[:, None]
        lacks["token"] = np.where(logs.live, each - shaped, 0.0)
    lacks["rollout"] = logs.whole(reward) - logs.whole(shaped)
    for size, lacking in lacks.items():
        for name, term in terms(logs) if np.abs(lacking).max() > 1e-9 else ():
            x = term if lacking.ndim == 2 else term.sum(axis=1)
            above, below = units.sums(lacking * x), units.sums(x**2)
            left = lacking - above.sum() / max(below.sum(), 1e-300) * x
            yield 1 - float((left**2).sum() / (lacking**2).sum()), f"{name}, a {size}", above, below


def of_advantages(logs: Logs, units: Units) -> Iterator[Fit]:
    """Yield fits of the advantage by reward and KL term within each prompt; none if the reward alone explains it.

    Advantages are a(R − βX) + c, with a and c of the prompt. By Cramer's rule a·det and aβ·det are polynomials of
    sums over the prompt; β is the ratio of their means over prompts.
    """
    advantage, whole = logs.columns["advantage"].reshape(len(logs), -1), logs.whole(logs.columns["reward"])[:, None]
    at = logs.live if advantage.shape[1] > 1 else logs.live.any(axis=1).reshape(-1, 1)
    counts = np.maximum(units.sums(at), 1)

    def centred(values: np.ndarray) -> np.ndarray:
        return np.where(at, values - (units.sums(np.where(at, values, 0.0)) / counts)[logs.group, None], 0.0)

    a, r = centred(advantage), centred(whole)
    aa, ar, rr = units.sums(a**2), units.sums(a * r), units.sums(r**2)
    if (aa - ar**2 / np.where(rr > 0, rr, np.inf)).sum() <= 1e-9 * aa.sum():
        return
    for name, term in terms(logs):
        credits = {"whole rollouts": term.sum(axis=1)[:, None]}
        if advantage.shape[1] > 1:
            credits |= {"to go": term[:, ::-1].cumsum(axis=1)[:, ::-1], "immediate": term}
        for credit, value in credits.items():
            x = centred(value)
            ax, rx, xx = units.sums(a * x), units.sums(r * x), units.sums(x**2)
            det, of_r, of_x = rr * xx - rx**2, ar * xx - ax * rx, ax * rr - ar * rx
            sure = det > 1e-9 * rr * xx
            explained = ((of_r * ar + of_x * ax) / np.where(sure, det, np.inf)).sum()
            share = float(explained / max(aa[sure].sum(), 1e-300))
            yield share, f"{name}, credit: {credit}", np.where(sure, -of_x, 0.0), np.where(sure, of_r, 0.0)
