"""What logs of rollouts can be asked: one function a question, in the order of the report.

μ is the sampler as the logs know it, the engine (`rollout_logp`), else `old_logp`, else the policy itself. Two facts
hold for tokens that were drawn from μ: E_μ[log μ − log x] ≥ 0 for every x, and a token's weight x/μ has the expectation
1, or the mass S that x gives to the tokens that μ can draw (Σ_v μ·x/μ = Σ_(v: μ > 0) x). Logs that break one of them do
not hold the log-probs that the tokens were drawn with.
"""

import numpy as np

from kltest.diagnosing.answers import (
    FINDING,
    INCONCLUSIVE,
    NOT_LOOKED_AT,
    NOTHING,
    REPORTED,
    SAME,
    SHARE,
    Answer,
    are_copies,
    needs,
)
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
"""Nats a token between engine and trainer from which on they are not the same model. Rounding causes about 1e-3."""
NEGLIGIBLE = 1e-4
"""Nats a token below which a negative KL is rounding."""
CLIP, CAP = 0.2, 2.0
"""The usual clip of a ratio, 1 ± 0.2, and the usual cap of an importance weight."""
SHOWN_VERSIONS = 5


def sampler(logs: Logs) -> str | None:
    """Return the column of the log-probs that tokens were drawn with."""
    return logs.first("rollout_logp", "old_logp", "logp")


def effective(log_weights: np.ndarray) -> float:
    """Return (Σw)²/Σw² as a share of the number of weights."""
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))


def mean_weight(logs: Logs, units: Units, one: str, other: str) -> Estimate:
    """Return the mean over tokens of the weight one/other."""
    weights = np.where(logs.live, np.exp(np.minimum(logs.gap(one, other), 50.0)), 0.0)
    return units.mean(weights, logs.live, unseen=True)


def unusable(logs: Logs) -> dict[str, str]:
    """Return the columns that cannot be log-probs, with the reason."""
    found = {}
    for name in (one for one in LOG_PROBS if one in logs.columns):
        values = logs.columns[name][logs.live]
        if (values > 1e-3).mean() > 1 - SHARE:
            kind = "probabilities" if values.min() >= 0 and values.max() <= 1 else "negatives of log-probs, or logits"
            found[name] = f"{logs.names[name]} has positive numbers, up to {values.max():.3g}: {kind}?"
    return found


def columns(logs: Logs, units: Units) -> Answer:
    """Log-probs that cannot be log-probs, and columns that are shifted against the sampler's by one token."""
    wrong = unusable(logs)
    found, usable = [*wrong.values()], logs.without(wrong)
    own = sampler(usable)
    for name in (one for one in LOG_PROBS if one in usable.columns and own is not None and one != own):
        for shift, side in ((-1, "left"), (1, "right")):
            if shifted(usable, units, str(own), name, shift).above(0):
                found.append(f"{logs.names[name]} fits {logs.names[str(own)]} better one token to the {side}")
    if found:
        return Answer("columns", FINDING, "; ".join(found))
    return Answer("columns", NOTHING, "Log-probs are at most 0, and no column is shifted by a token")


def shifted(logs: Logs, units: Units, own: str, other: str, shift: int) -> Estimate:
    """Return by how much the covariance with the sampler grows if another column is shifted."""
    both = logs.live & np.roll(logs.live, shift, axis=1)
    both[:, 0 if shift > 0 else -1] = False
    x, y = (
        np.where(logs.live, logs.columns[name] - logs.columns[name][logs.live].mean(), 0.0) for name in (own, other)
    )
    return units.mean(np.where(both, x * (np.roll(y, shift, axis=1) - y), 0.0))


def mask(logs: Logs, units: Units) -> Answer:
    """Tokens that the mask counts or leaves out though it should not."""
    live, found = logs.live, []
    zero = np.all([logs.columns[name] == 0 for name in LOG_PROBS if name in logs.columns], axis=0)
    some = live.any(axis=1)
    last = live.shape[1] - 1 - live[:, ::-1].argmax(axis=1)
    position = np.arange(live.shape[1])
    inside = position <= last[:, None]
    gaps = inside & ~live & (np.logical_or.accumulate(live, axis=1)) & some[:, None]
    behind = ~inside & logs.written & some[:, None]
    holding = behind & ~zero
    trailing = live & np.logical_and.accumulate((zero | ~live)[:, ::-1], axis=1)[:, ::-1]
    one_behind = (holding.sum(axis=1) == 1) & holding[np.arange(len(last)), np.minimum(last + 1, live.shape[1] - 1)]
    if "mask" in logs.names and one_behind[some].mean() >= 0.9:
        found.append("it leaves out the last token: just one position behind it has log-probs")
    before = (position < live.argmax(axis=1)[:, None]) & logs.written & ~zero & some[:, None]
    if "mask" in logs.names and (before.sum(axis=1) == 1)[some].mean() >= 0.9 and before[some, 0].mean() >= 0.9:
        found.append("it leaves out the first token")
    if (padded := (trailing.sum(axis=1) > 1)[some].mean()) > 0.05:
        found.append(f"it counts padding: {100 * padded:.0f} % of the rollouts end with zeros that count")
    if prompt_counts(logs, units):
        found.append(
            "it counts the prompt: all rollouts of a prompt begin with the same log-probs, though they need not"
        )
    numbers: dict[str, Estimate | float] = {
        "masked_gaps": float((gaps.any(axis=1)).mean()),
        "positions_behind": float(holding.sum()),
        "empty_rollouts": float((~some).sum()),
    }
    facts = []
    if gaps.any():
        facts.append(f"{100 * numbers['masked_gaps']:.0f} % of the rollouts have masked tokens between others (KL208)")
    if holding.any():
        facts.append(
            f"{holding.sum():,} positions behind the mask have log-probs: a mean without the mask takes them in"
        )
    if not some.all():
        facts.append(f"{(~some).sum()} rollouts have no token that counts")
    if found:
        return Answer("mask", FINDING, "; ".join((*found, *facts)).capitalize(), numbers, "KL501")
    if "mask" not in logs.names:
        return needs("mask", "mask; without it all tokens count but zeros at the end")
    if not (logs.written & ~live).any():
        return needs(
            "mask", "positions that do not count: in this file all do, and an end that was cut off leaves no trace"
        )
    return Answer("mask", NOTHING, "; ".join(facts) or "It ends where log-probs end", numbers)


def prompt_counts(logs: Logs, units: Units) -> bool:
    """Return whether rollouts begin with tokens that nobody drew.

    If the other rollouts of a prompt draw their first token freely, 1{all draw that of the first}/p^(G − 1) has the
    expectation 1, with p its probability; so has the product over prompts, which is above 1/rate with probability rate.
    """
    own = sampler(logs)
    if own is None or len(units) == len(logs):
        return False
    rows = np.flatnonzero(logs.live.any(axis=1))
    first = logs.columns[own][rows, logs.live[rows].argmax(axis=1)]
    unit = logs.group[rows]
    begins = np.full(len(units), np.nan)
    begins[unit[::-1]] = first[::-1]
    if (np.abs(first - begins[unit]) > SAME).any():
        return False
    counts = np.bincount(unit, minlength=len(units))
    return float((-begins * (counts - 1))[counts > 0].sum()) > np.log(1 / units.rate)


def distance(logs: Logs, units: Units, own: str, other: str) -> tuple[np.ndarray, Estimate]:
    """Return the terms (N, T) of KL(own‖other) with the least noise that holds, and the mean weight other/own.

    k3, as long as the mean weight may be 1, which it is if tokens were drawn from `own`; else k1.
    """
    gap, weight = logs.gap(own, other), mean_weight(logs, units, other, own)
    return np.where(
        logs.live, np.expm1(-np.maximum(gap, -50.0)) + gap, 0.0
    ) if weight.low <= 1 <= weight.high else gap, weight


def staleness(logs: Logs, units: Units) -> Answer:
    """How far the policy has moved from the one that drew the rollouts."""
    old = logs.first("old_logp", "rollout_logp")
    if "logp" not in logs.columns or old is None:
        return needs("staleness", "logp, and old_logp or rollout_logp")
    version = logs.get("version")
    drew = np.empty(0) if version is None else np.broadcast_to(version.reshape(len(logs), -1), logs.live.shape)
    versions = np.unique(drew[logs.live]) if len(drew) else drew
    if are_copies(logs, "logp", old):
        text = f"{logs.names['logp']} and {logs.names[old]} are equal: every ratio is 1"
        if len(versions) < 2:
            return Answer("staleness", REPORTED, f"{text}, as before the first update on a batch", {"kl": 0.0})
        text += (
            f", though {len(versions)} versions of the weights drew the rollouts. {logs.names[old]} was computed again"
        )
        return Answer("staleness", FINDING, f"{text}: no ratio corrects for age", related="KL301")
    terms, _ = distance(logs, units, old, "logp")
    numbers: dict[str, Estimate | float] = {
        "kl": units.mean(terms),
        "kl_token": units.mean(terms, logs.live),
        "effective_rollouts": effective(logs.gap("logp", old).sum(axis=1)),
    }
    text = (
        f"KL({'μ' if old == sampler(logs) else 'old'}‖π): {numbers['kl']} nats a rollout, {numbers['kl_token']} a "
        f"token. Weights of whole rollouts leave {100 * numbers['effective_rollouts']:.0f} %"
    )
    for one in versions[::-1][:SHOWN_VERSIONS] if len(versions) > 1 else ():
        of = logs.live & (drew == one)
        numbers[f"kl_token_version_{one:g}"] = units.mean(np.where(of, terms, 0.0), of)
        text += f"; version {one:g}: {numbers[f'kl_token_version_{one:g}']} a token"
    if old == "rollout_logp":
        text += ". The engine's own difference is part of it: age alone needs old_logp"
    return Answer("staleness", REPORTED, text, numbers)


def engine(logs: Logs, units: Units) -> Answer:
    """How far the engine's log-probs are from the trainer's."""
    trainer = logs.first("old_logp", "logp")
    if "rollout_logp" not in logs.columns or trainer is None:
        return needs("engine", "rollout_logp, and old_logp or logp")
    one, other = logs.names["rollout_logp"], logs.names[trainer]
    if are_copies(logs, "rollout_logp", trainer):
        return needs("engine", f"the engine's own log-probs: {one} is a copy of {other}")
    gap = logs.gap("rollout_logp", trainer)
    terms, weight = distance(logs, units, "rollout_logp", trainer)
    kl, apart = units.mean(terms, logs.live), units.mean(np.abs(gap), logs.live)
    numbers: dict[str, Estimate | float] = {
        "gap": apart,
        "largest_gap": float(np.abs(gap).max()),
        "kl_token": kl,
        "effective_rollouts": effective(-gap.sum(axis=1)),
    }
    text = (
        f"{one} and {other} are {apart} apart, {numbers['largest_gap']:.2g} at most; KL {kl} nats a token. Weights of "
        f"whole rollouts leave {100 * numbers['effective_rollouts']:.0f} %"
    )
    if trainer == "logp":
        return Answer("engine", REPORTED, f"{text}. Age is part of it: the engine alone needs old_logp", numbers)
    if weight.below(1 - MARGIN) or weight.above(1 + MARGIN):
        return Answer("engine", REPORTED, f"{text}. See truncation", numbers)
    if kl.above(MISMATCH):
        text += f". Rounding causes less than {MISMATCH:g}: other weights, temperature or precision"
        return Answer("engine", FINDING, text, numbers, "KL703")
    return Answer("engine", NOTHING if kl.below(MISMATCH) else INCONCLUSIVE, text, numbers)


def truncation(logs: Logs, units: Units) -> Answer:
    """The mass that a truncated and renormalised engine keeps; log-probs that the tokens were not drawn with."""
    trainer = logs.first("old_logp", "logp")
    if "rollout_logp" not in logs.columns or trainer is None:
        return needs("truncation", "rollout_logp, and old_logp or logp")
    one, other = logs.names["rollout_logp"], logs.names[trainer]
    if are_copies(logs, "rollout_logp", trainer):
        return needs("truncation", f"the engine's own log-probs: {one} is a copy of {other}")
    mass = mean_weight(logs, units, trainer, "rollout_logp")
    numbers: dict[str, Estimate | float] = {"kept_mass": mass}
    if mass.below(1 - MARGIN):
        numbers["least_kept_mass"] = float(np.quantile(np.exp(logs.gap(trainer, "rollout_logp")[logs.live]), 0.01))
        text = (
            f"The sampler keeps {mass} of the trainer's probability and renormalises: top-k, min-p or top-p (of about "
            f"{numbers['least_kept_mass']:.2g}). Every ratio {other}/{one} holds the kept mass"
        )
        return Answer("truncation", FINDING, text, numbers, "KL703")
    text = f"Mean weight {other}/{one} of a token: {mass}"
    if mass.above(1 + MARGIN):
        text += ". More than 1: tokens were not drawn with these log-probs (temperature, truncation, other weights)"
        return Answer("truncation", FINDING, text, numbers, "KL703")
    status = NOTHING if mass.within(1 - MARGIN, 1 + MARGIN) else INCONCLUSIVE
    return Answer("truncation", status, f"{text}; 1 if no mass is cut off", numbers)


def raw_log_probs(logs: Logs, units: Units) -> Answer:
    """Whether tokens are likelier than the policy's own draws: E[−log π(y)] = H if they were drawn from π."""
    own = logs.first("old_logp", "logp")
    if "entropy" not in logs.columns or own is None:
        return needs("sampling", "entropy, and old_logp or logp, of the policy that drew")
    if {"logp", "old_logp"} <= set(logs.columns) and np.abs(logs.gap("logp", "old_logp"))[logs.live].mean() > 1e-3:
        return needs(
            "sampling", "logs before the first update: it is unknown whose the entropy is, logp and old_logp differ"
        )
    found = units.mean(np.where(logs.live, -logs.columns[own] - logs.columns["entropy"], 0.0), logs.live)
    text = f"A token's surprise less the entropy: {found} nats; 0 for draws of the policy"
    if found.below(-SURPRISE):
        text += ". Truncation, or a temperature below 1, drew the tokens and is not in the log-probs"
    elif found.above(SURPRISE):
        text += ". A temperature above 1, or other weights, drew the tokens and are not in the log-probs"
    else:
        status = NOTHING if found.within(-SURPRISE, SURPRISE) else INCONCLUSIVE
        return Answer("sampling", status, text, {"surprise": found})
    return Answer("sampling", FINDING, text, {"surprise": found}, "KL703")


def temperature(logs: Logs, units: Units) -> Answer:
    """The ratio of the temperatures of engine and trainer, from first tokens of rollouts of the same prompt.

    In one context log-probs of two tokens differ by (z_1 − z_2)/temperature, whatever the normaliser.
    """
    if "rollout_logp" not in logs.columns or "old_logp" not in logs.columns or len(units) == len(logs):
        return needs("temperature", "rollout_logp, old_logp, and group with several rollouts a prompt")
    if are_copies(logs, "rollout_logp", "old_logp"):
        return needs("temperature", "the engine's own log-probs")
    rows = np.flatnonzero(logs.live.any(axis=1))
    at, unit = logs.live[rows].argmax(axis=1), logs.group[rows]
    counts = np.maximum(np.bincount(unit, minlength=len(units)), 1)
    squares = []
    for name in ("rollout_logp", "old_logp"):
        first = logs.columns[name][rows, at]
        centred = first - (np.bincount(unit, weights=first, minlength=len(units)) / counts)[unit]
        squares.append(np.bincount(unit, weights=centred**2, minlength=len(units)))
    if squares[0].sum() <= SAME:
        return needs("temperature", "rollouts of a prompt whose first tokens differ")
    slope = units.estimate(lambda one, other: np.sqrt(other / one), *squares)
    numbers: dict[str, Estimate | float] = {"ratio": slope}
    text = f"Temperature of the engine over that of the trainer: {slope}"
    if slope.above(1 + SLOPE) or slope.below(1 - SLOPE):
        return Answer("temperature", FINDING, text, numbers, "KL702")
    return Answer("temperature", NOTHING if slope.within(1 - SLOPE, 1 + SLOPE) else INCONCLUSIVE, text, numbers)


def reference(logs: Logs, units: Units) -> Answer:
    """The distance from the reference, and columns that are mixed up."""
    own = sampler(logs)
    if "ref_logp" not in logs.columns or own is None:
        return needs("reference", "ref_logp")
    ref = logs.names["ref_logp"]
    copies = [name for name in ("logp", "old_logp", "rollout_logp", "prox_logp") if name in logs.columns]
    copies = [logs.names[name] for name in copies if are_copies(logs, "ref_logp", name)]
    if copies:
        text = f"{ref} is a copy of {listed(copies)}: the KL to it is that to the policy, not to a reference"
        return Answer("reference", FINDING, f"{text}. Right only before the first update", related="KL101")
    gap = logs.gap(own, "ref_logp")
    kl, per_token = units.mean(gap), units.mean(gap, logs.live)
    weight = mean_weight(logs, units, "ref_logp", own)
    numbers: dict[str, Estimate | float] = {"kl": kl, "kl_token": per_token, "mean_weight": weight}
    text = f"KL({'μ' if own != 'logp' else 'π'}‖ref): {kl} nats a rollout, {per_token} a token"
    if per_token.below(-NEGLIGIBLE):
        text += f". No KL is negative: {ref} and {logs.names[own]} are exchanged, or other log-probs drew the tokens"
        return Answer("reference", FINDING, text, numbers, "KL103")
    if weight.above(1 + MARGIN):
        text += f". Mean weight {ref}/{logs.names[own]}: {weight}; more than 1: these log-probs did not draw the tokens"
        return Answer("reference", FINDING, text, numbers)
    status = NOTHING if per_token.above(-NEGLIGIBLE) else INCONCLUSIVE
    return Answer("reference", status, f"{text}; {ref} is no copy of another column", numbers)


def ratio(logs: Logs, units: Units) -> Answer:
    """How often a clip or a cap acts, and how much of the sample its weights leave."""
    base = logs.first("prox_logp", "old_logp", "rollout_logp")
    if "logp" not in logs.columns or base is None:
        return needs("ratio", "logp, and prox_logp, old_logp or rollout_logp")
    logs_of = logs.gap("logp", base)
    weights = np.exp(np.clip(logs_of, -50, 50))
    above, below = logs.live & (weights > 1 + CLIP), logs.live & (weights < 1 - CLIP)
    numbers: dict[str, Estimate | float] = {
        "beyond_clip": units.mean(above | below, logs.live),
        "effective_tokens": effective(logs_of[logs.live]),
    }
    text = f"Share of ratios π/{logs.names[base]} beyond 1 ± {CLIP}: {numbers['beyond_clip']}"
    advantage = logs.get("advantage")
    if advantage is not None:
        sign = advantage.reshape(len(logs), -1)
        numbers["clipped"] = units.mean((above & (sign > 0)) | (below & (sign < 0)), logs.live)
        text += f"; the clip acts on {numbers['clipped']}"
    text += f"; weights of tokens leave {100 * numbers['effective_tokens']:.0f} %"
    if "rollout_logp" in logs.columns and (trainer := logs.first("old_logp", "prox_logp")) is not None:
        numbers["beyond_cap"] = units.mean(logs.live & (logs.gap(trainer, "rollout_logp") > np.log(CAP)), logs.live)
        text += f"; weights of trainer over engine above {CAP:g}: {numbers['beyond_cap']}"
    return Answer("ratio", REPORTED, text, numbers)


def kl_to_go(logs: Logs, units: Units) -> Answer:
    """The variance of the KL to go, which enters the bound on what a token-level term misses."""
    own = sampler(logs)
    if "ref_logp" not in logs.columns or own is None or are_copies(logs, own, "ref_logp"):
        return needs("kl to go", "ref_logp, no copy of another column")
    u = logs.gap(own, "ref_logp")
    after = np.where(logs.live, u[:, ::-1].cumsum(axis=1)[:, ::-1] - u, 0.0)
    pairs = len(units) == len(logs)
    unit = np.arange(len(logs)) // 2 if pairs else logs.group
    found = Units(unit, units.rate)
    found.rate = units.rate
    sums, squares, counts = (np.zeros((len(found), u.shape[1])) for _ in range(3))
    for into, values in ((sums, after), (squares, after**2), (counts, logs.live)):
        np.add.at(into, unit, values)
    several = counts > 1
    scatter = np.where(several, squares - sums**2 / np.maximum(counts, 1), 0.0) * counts / np.maximum(counts - 1, 1)
    value = found.estimate(lambda one, two: one / two, scatter.sum(axis=1), np.where(several, counts, 0.0).sum(axis=1))
    units.asked += 1
    if not np.isfinite(value.value):
        return needs("kl to go", "several rollouts")
    which = "(prompts unknown)" if pairs else "of a prompt"
    return Answer(
        "kl to go",
        REPORTED,
        f"Variance of the log-ratio to go among rollouts {which}: {value} nats². It enters the bound on what a "
        "token-level term misses; it is no share of ∇KL, which needs gradients (kltest audit)",
        {"variance": value},
        "KL201",
    )


OF_LOG_PROBS = (
    mask,
    staleness,
    engine,
    truncation,
    raw_log_probs,
    temperature,
    reference,
    ratio,
    kl_to_go,
)
