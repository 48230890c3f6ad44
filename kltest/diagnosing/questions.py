"""What logs of rollouts can be asked: one function a question, in the order of the report.

μ is the sampler as the logs know it, the engine (`rollout_logp`), else `old_logp`, else the policy itself. Two facts
hold for tokens that were drawn from μ: E_μ[log μ − log x] ≥ 0 for every x, and a token's weight x/μ has the expectation
1, or the mass S that x gives to the tokens that μ can draw (Σ_v μ·x/μ = Σ_(v: μ > 0) x). Logs that break one of them do
not hold the log-probs that the tokens were drawn with.
"""

from typing import Any

import numpy as np

from kltest.diagnosing.answers import FINDING, NOTHING, REPORTED, Answer, judged, missing, question
from kltest.diagnosing.intervals import Estimate, Units
from kltest.diagnosing.logs import LOG_PROBS, Logs
from kltest.names import listed

MARGIN = 0.01
"""Mass that the mean weight of a token may be off without a finding."""
SURPRISE = 0.02
"""Nats a token that draws may be likelier, or less likely, than those of the policy without a finding."""
SLOPE = 0.02
"""A ratio of temperatures that differs from 1 by less is no finding."""
MISMATCH = 0.01
"""Nats a token between engine and trainer that are more than rounding: it causes about 1e-3."""
NEGLIGIBLE = 1e-4
"""Nats a token below which a negative KL is rounding."""
SHARE = 0.9
"""Share of the rollouts from which on the mask leaves a token out on purpose."""
CLIP, CAP = 0.2, 2.0
"""The usual clip of a ratio, 1 ± 0.2, and the usual cap of an importance weight."""
SHOWN_VERSIONS = 5
SAMPLER = "rollout_logp|old_logp|logp"
TRAINER = "old_logp|logp"


def effective(log_weights: np.ndarray) -> float:
    """Return (Σw)²/Σw² as a percentage of the number of weights."""
    weights = np.exp(log_weights - log_weights.max())
    return float(100 * weights.sum() ** 2 / (weights**2).sum() / len(weights))


def mean_weight(logs: Logs, units: Units, one: str, other: str) -> Estimate:
    """Return the mean over tokens of the weight one/other."""
    weights = np.where(logs.live, np.exp(np.minimum(logs.gap(one, other), 50.0)), 0.0)
    return units.mean(weights, logs.live, unseen=True)


def distance(logs: Logs, units: Units, own: str, other: str) -> tuple[np.ndarray, Estimate]:
    """Return terms (N, T) of KL(own‖other) at the prefixes that were drawn, and the mean weight other/own.

    They are k3. Under a sampler beside `own` they are weighted, own/μ, and tokens that it cannot draw are left out. If
    the sampler is `own` but the mean weight cannot be 1, so that k3 is biased, they are k1, which has more noise.
    """
    gap, weight = logs.gap(own, other), mean_weight(logs, units, other, own)
    k3, drew = np.expm1(-np.maximum(gap, -50.0)) + gap, logs.first(*SAMPLER.split("|")) or own
    if drew != own:
        return np.exp(np.minimum(logs.gap(own, drew), 50.0)) * k3, weight
    return k3 if weight.low <= 1 <= weight.high else gap, weight


@question("columns")
def columns(logs: Logs, units: Units) -> Answer:
    """Columns that hold no log-probs, and columns that are shifted against the sampler's by one token."""
    found, own = list(logs.wrong), logs.first(*SAMPLER.split("|")) or ""
    for other in (one for one in LOG_PROBS if own and one in logs.columns and one != own):
        for shift, side in ((-1, "left"), (1, "right")):
            if shifted(logs, units, own, other, shift).low > 0:
                found.append(f"{logs.names[other]} fits {logs.names[own]} better one token to the {side}")
    if found:
        return Answer("columns", FINDING, "; ".join(found))
    if len(logs.columns.keys() & {*LOG_PROBS}) < 2:
        return missing("columns", "two columns of log-probs")
    return Answer("columns", NOTHING, "Log-probs are at most 0, and no column is shifted by a token")


def shifted(logs: Logs, units: Units, own: str, other: str, shift: int) -> Estimate:
    """Return by how much the covariance with the sampler grows if another column is shifted."""
    both = logs.live & np.roll(logs.live, shift, axis=1)
    both[:, 0 if shift > 0 else -1] = False
    x, y = (logs.columns[name] - logs.columns[name][logs.live].mean() for name in (own, other))
    return units.mean(np.where(both, x * (np.roll(y, shift, axis=1) - y), 0.0))


@question("mask", SAMPLER)
def mask(logs: Logs, units: Units, own: str) -> Answer:
    """Tokens that the mask counts or leaves out though it should not."""
    rows = logs.live.any(axis=1)
    live, written = logs.live[rows], logs.written[rows]
    holds = written & np.any([logs.columns[name][rows] != 0 for name in LOG_PROBS if name in logs.columns], axis=0)
    begun, to_come = np.maximum.accumulate(live, axis=1), np.maximum.accumulate(live[:, ::-1], axis=1)[:, ::-1]
    before, gaps, behind = holds & ~begun, begun & to_come & ~live, holds & ~to_come
    zeros = live & ~np.maximum.accumulate(holds[:, ::-1], axis=1)[:, ::-1]
    found, facts = [], []
    for side, beside, room in (("last", behind, written & ~to_come), ("first", before, written & ~begun)):
        one = beside.sum(axis=1) == 1
        if "mask" in logs.names and one.mean() > 0.5 and one.sum() >= SHARE * room.any(axis=1).sum():
            found.append(f"the {side} token is left out: one masked position there has log-probs, in most rollouts")
    if (share := (zeros.sum(axis=1) > 1).mean()) > 0.05:
        found.append(f"padding counts: {100 * share:.0f} % of the rollouts end with zeros that count")
    if prompt_counts(logs, units, own):
        found.append("the prompt counts: all rollouts of a prompt begin with the same log-probs")
    if gaps.any():
        facts.append(f"{100 * gaps.any(axis=1).mean():.0f} % of the rollouts have masked tokens between others (KL208)")
    if behind.any():
        facts.append(f"{behind.sum():,} positions behind the mask have log-probs, which a mean without it takes in")
    if not rows.all():
        facts.append(f"{(~rows).sum()} rollouts have no token that counts")
    if found:
        return Answer("mask", FINDING, "; ".join((*found, *facts)).capitalize(), related="KL501")
    if "mask" not in logs.names:
        return missing("mask", "mask, and positions that it leaves out: an end that was cut off leaves no trace")
    if not (written & ~live).any():
        left = f"positions that {logs.names['mask']} leaves out; it leaves out none"
        return missing("mask", f"{left}, and an end that was cut off leaves no trace")
    return Answer("mask", NOTHING, "; ".join(facts) or "It ends where log-probs end")


def prompt_counts(logs: Logs, units: Units, own: str) -> bool:
    """Return whether rollouts begin with tokens that nobody drew.

    If the other rollouts of a prompt draw their first token freely, 1{all draw that of the first}/p^(G − 1) has the
    expectation 1, with p its probability; so has the product over prompts, which is above 1/rate with probability rate.
    """
    first, unit = logs.first_tokens(own)
    begins = np.zeros(len(units))
    begins[unit[::-1]] = first[::-1]
    free = -(begins * np.maximum(np.bincount(unit, minlength=len(units)) - 1, 0)).sum()
    return bool((np.abs(first - begins[unit]) <= 1e-6).all() and free > np.log(1 / units.rate))


@question("staleness", "logp", "old_logp|rollout_logp")
def staleness(logs: Logs, units: Units, new: str, old: str) -> Answer:
    """How far the policy has moved from the one that drew the rollouts."""
    drew = np.broadcast_to(logs.columns.get("version", np.zeros(len(logs))).reshape(len(logs), -1), logs.live.shape)
    versions = np.unique(drew[logs.live])
    if logs.are_copies(new, old):
        text = f"{logs.names[new]} and {logs.names[old]} are equal: every ratio is 1"
        if len(versions) == 1:
            return Answer("staleness", REPORTED, f"{text}, as before the first update on a batch", {"kl": 0.0})
        text += f", though {len(versions)} versions of the weights drew the rollouts: {logs.names[old]} was recomputed"
        return Answer("staleness", FINDING, f"{text}, and no ratio corrects for age", related="KL301")
    terms, _ = distance(logs, units, old, new)
    kl, per_token = units.mean(terms), units.mean(terms, logs.live)
    left = effective(-logs.gap(old, new).sum(axis=1))
    numbers: dict[str, Any] = {"kl": kl, "kl_token": per_token, "effective_rollouts": left}
    text = f"KL(old‖π): {kl} nats a rollout, {per_token} a token. Weights of whole rollouts leave {left:.0f} % of them"
    for one in versions[::-1][:SHOWN_VERSIONS] if len(versions) > 1 else ():
        of = logs.live & (drew == one)
        numbers[f"kl_token_version_{one:g}"] = units.mean(np.where(of, terms, 0.0), of)
        text += f"; version {one:g}: {numbers[f'kl_token_version_{one:g}']} a token"
    if old == "rollout_logp":
        text += ". The engine's own difference is part of it: age alone needs old_logp"
    return Answer("staleness", REPORTED, text, numbers)


@question("engine", "rollout_logp", TRAINER)
def engine(logs: Logs, units: Units, own: str, trainer: str) -> Answer:
    """How far the engine's log-probs are from the trainer's."""
    gap, (terms, weight) = logs.gap(own, trainer), distance(logs, units, own, trainer)
    kl, apart = units.mean(terms, logs.live), units.mean(np.abs(gap), logs.live)
    most, left = float(np.abs(gap).max()), effective(-gap.sum(axis=1))
    numbers = {"gap": apart, "largest_gap": most, "kl_token": kl, "effective_rollouts": left}
    text = f"{logs.names[own]} and {logs.names[trainer]} are {apart} apart, {most:.2g} at most; KL {kl} nats a token. "
    text += f"Weights of whole rollouts leave {left:.0f} % of them"
    if trainer == "logp":
        return Answer("engine", REPORTED, f"{text}. Age is part of it: the engine alone needs old_logp", numbers)
    if judged(weight, 1 - MARGIN, 1 + MARGIN) == FINDING:
        return Answer("engine", REPORTED, f"{text}. See truncation", numbers)
    if (status := judged(kl, high=MISMATCH)) == FINDING:
        text += f". Rounding causes less than {MISMATCH:g}: other weights, temperature or precision"
        if "ref_logp" in logs.columns and np.abs(logs.gap(own, "ref_logp")).sum() < np.abs(gap).sum():
            text += f", or exchanged columns: {logs.names['ref_logp']} is nearer to the engine"
    return Answer("engine", status, text, numbers, "KL703" if status == FINDING else "")


@question("truncation", "rollout_logp", TRAINER)
def truncation(logs: Logs, units: Units, own: str, trainer: str) -> Answer:
    """The mass that a truncated and renormalised engine keeps; log-probs that the tokens were not drawn with."""
    mass = mean_weight(logs, units, trainer, own)
    of, numbers = f"{logs.names[trainer]}/{logs.names[own]}", {"kept_mass": mass}
    if (status := judged(mass, 1 - MARGIN, 1 + MARGIN)) != FINDING:
        text = f"Mean weight {of} of a token: {mass}; 1 if no mass is cut off"
    elif mass.value > 1:
        text = f"Mean weight {of} of a token: {mass}. More than 1: tokens were not drawn with these log-probs "
        text += "(temperature, truncation, other weights)"
    else:
        least = np.quantile(np.exp(-logs.gap(own, trainer)[logs.live]), 0.01)
        text = (
            f"The sampler keeps {mass} of the trainer's probability and renormalises: top-k, min-p or top-p, which is "
        )
        text += f"then about {least:.2f}. Every ratio {of} holds the kept mass"
    return Answer("truncation", status, text, numbers, "KL703" if status == FINDING else "")


@question("sampling", "entropy", TRAINER)
def sampling(logs: Logs, units: Units, entropy: str, own: str) -> Answer:
    """Whether tokens are likelier than the policy's own draws: E[−log π(y)] = H if they were drawn from π."""
    if own == "old_logp" and "logp" in logs.columns and np.abs(logs.gap(own, "logp")).sum() > 1e-3 * logs.live.sum():
        return missing("sampling", "entropy before the first update: logp and old_logp differ, and it may be of either")
    found = units.mean(np.where(logs.live, -logs.columns[own] - logs.columns[entropy], 0.0), logs.live)
    text = f"A token's surprise less the entropy: {found} nats; 0 for draws of the policy"
    if (status := judged(found, -SURPRISE, SURPRISE)) == FINDING:
        why = "Truncation, or a temperature below 1," if found.value < 0 else "A temperature above 1, or other weights,"
        text += f". {why} drew the tokens and is not in the log-probs"
    return Answer("sampling", status, text, {"surprise": found}, "KL703" if status == FINDING else "")


@question("temperature", "rollout_logp", "old_logp", "group")
def temperature(logs: Logs, units: Units, own: str, trainer: str, _: str) -> Answer:
    """The ratio of the temperatures of engine and trainer, from first tokens of rollouts of the same prompt.

    In one context log-probs of two tokens differ by (z_1 − z_2)/temperature, whatever the normaliser.
    """
    squares = []
    for name in (own, trainer):
        first, unit = logs.first_tokens(name)
        sums, counts = np.bincount(unit, first), np.maximum(np.bincount(unit), 1)
        squares.append(np.bincount(unit, (first - (sums / counts)[unit]) ** 2, minlength=len(units)))
    if squares[0].sum() <= 1e-9:
        return missing("temperature", "rollouts of a prompt whose first tokens differ")
    slope = units.estimate(lambda one, other: np.sqrt(other / one), *squares)
    status, text = judged(slope, 1 - SLOPE, 1 + SLOPE), f"Temperature of the engine over that of the trainer: {slope}"
    return Answer("temperature", status, text, {"ratio": slope}, "KL702" if status == FINDING else "")


@question("reference", "ref_logp", SAMPLER)
def reference(logs: Logs, units: Units, ref: str, own: str) -> Answer:
    """The distance from the reference, and columns that are mixed up."""
    named = logs.names[ref]
    if copies := [logs.names[one] for one in LOG_PROBS if one != ref and logs.are_copies(ref, one)]:
        text = f"{named} is a copy of {listed(copies)}: the KL to it is none to a reference"
        return Answer("reference", FINDING, f"{text}. Right only before the first update", related="KL101")
    gap, weight = logs.gap(own, ref), mean_weight(logs, units, ref, own)
    kl, per_token = units.mean(gap), units.mean(gap, logs.live)
    numbers = {"kl": kl, "kl_token": per_token, "mean_weight": weight}
    text = f"KL({'π' if own == 'logp' else 'μ'}‖ref): {kl} nats a rollout, {per_token} a token"
    if (status := judged(per_token, low=-NEGLIGIBLE)) == FINDING:
        text += f". No KL is negative: {named} and {logs.names[own]} are exchanged, or other log-probs drew the tokens"
    elif judged(weight, high=1 + MARGIN) == FINDING:
        status = FINDING
        text += f". Mean weight {named}/{logs.names[own]} {weight}: above 1, as these log-probs did not draw the tokens"
    return Answer("reference", status, text, numbers, "KL103" if status == FINDING else "")


@question("ratio", "logp", "prox_logp|old_logp|rollout_logp")
def ratio(logs: Logs, units: Units, new: str, old: str) -> Answer:
    """How often a clip or a cap acts, and how much of the sample its weights leave."""
    gap = logs.gap(new, old)
    above, below = gap > np.log1p(CLIP), gap < np.log1p(-CLIP)
    beyond, left = units.mean(above | below, logs.live), effective(gap[logs.live])
    numbers: dict[str, Any] = {"beyond_clip": beyond, "effective_tokens": left}
    text = (
        f"Share of ratios π/{logs.names[old]} beyond 1 ± {CLIP}: {beyond}; weights of tokens leave {left:.0f} % of them"
    )
    if "advantage" in logs.columns:
        sign = logs.columns["advantage"].reshape(len(logs), -1)
        numbers["clipped"] = units.mean((above & (sign > 0)) | (below & (sign < 0)), logs.live)
        text += f"; the clip acts on {numbers['clipped']}"
    if "rollout_logp" in logs.columns and (trainer := logs.first("old_logp", "prox_logp")):
        numbers["beyond_cap"] = units.mean(logs.gap(trainer, "rollout_logp") > np.log(CAP), logs.live)
        text += f"; weights {logs.names[trainer]}/{logs.names['rollout_logp']} above {CAP:g}: {numbers['beyond_cap']}"
    return Answer("ratio", REPORTED, text, numbers)


@question("kl to go", "ref_logp", SAMPLER)
def kl_to_go(logs: Logs, units: Units, ref: str, own: str) -> Answer:
    """Variances of log-ratios among rollouts of a prompt: near what bounds how much a token-level term lacks, not it.

    The first is that of Σ_(s>t) u_s among rollouts that reach position t, averaged over tokens; the second that of Σu.
    The bound has Var(K), K the sum of next-token KLs along a rollout, which log-probs of sampled tokens do not show:
    Var(Σu) = Var(K) + Σ_t E[Var(u_t|s_t)] + 2·Σ_t E[Cov(u_t, KL to go|s_t)] may be more or less. With rewards and β,
    Σu − R/β is log π/π* and a constant of the prompt, and β·Var(Σu − R/β)/2 is to second order J* − J(π), whatever π
    was trained with; at the fixed point of a token-level term it is K and a constant.
    """
    u = logs.gap(own, ref)
    after = np.where(logs.live, u[:, ::-1].cumsum(axis=1)[:, ::-1] - u, 0.0)
    # Rollouts whose prompts are unknown are compared two by two.
    within = units if "group" in logs.columns else Units(np.arange(len(logs)) // 2, units.rate)
    found, whole = spread(within, after, logs.live), u.sum(axis=1)
    if not np.isfinite(found.value):
        return missing("kl to go", "several rollouts")
    text = f"Variance of the log-ratio to go: {found} nats²; of "
    if logs.beta and {"reward", "group"} <= logs.columns.keys():
        whole = whole - logs.whole(logs.columns["reward"]) / logs.beta
        one, half = spread(within, whole[:, None]), logs.beta / 2
        lacking = Estimate(half * one.value, half * one.low, half * one.high)
        numbers = {"variance": found, "from_optimum": one, "lacking": lacking}
        text += (
            f"a rollout's log-ratio less reward/{logs.beta:g}: {one}. To second order the policy lacks {lacking} of "
            "reward − β·KL; at the fixed point of a token-level term that variance is the one of the bound. "
            "Neither is a share of ∇KL: that needs gradients (kltest audit)"
        )
    else:
        numbers = {"variance": found, "rollout_variance": (one := spread(within, whole[:, None]))}
        text += (
            f"a rollout's: {one}. Neither is the variance that bounds what a token-level term lacks, nor a share of "
            "∇KL: kltest audit has both"
        )
    return Answer("kl to go", REPORTED, text, numbers)


def spread(units: Units, values: np.ndarray, live: np.ndarray | None = None) -> Estimate:
    """Return the variance within units of numbers (N, T), position by position, averaged over those of live tokens."""
    live = np.ones(values.shape, dtype=bool) if live is None else live
    sums, squares, counts = (np.zeros((len(units), values.shape[1])) for _ in range(3))
    # Less the mean: a large constant would cancel digits.
    values = np.where(live, values - values[live].mean() if live.any() else values, 0.0)
    for into, each in ((sums, values), (squares, values**2), (counts, live)):
        np.add.at(into, units.group, each)
    shares = np.where(counts > 1, counts / np.maximum(counts - 1, 1), 0.0)
    scatter = (shares * (squares - sums**2 / np.maximum(counts, 1))).sum(axis=1)
    return units.estimate(lambda one, two: one / two, scatter, np.where(counts > 1, counts, 0.0).sum(axis=1))
