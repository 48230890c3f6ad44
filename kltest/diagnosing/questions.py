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
"""Mass, or nats of surprise, that a mean over tokens may be off without a finding."""
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


def columns(logs: Logs, units: Units) -> Answer:
    """Log-probs that cannot be log-probs, and columns that are shifted against the sampler's by one token."""
    found, own = [], sampler(logs)
    for name in (one for one in LOG_PROBS if one in logs.columns):
        values = logs.columns[name][logs.live]
        if (values > 1e-3).mean() > 1 - SHARE:
            kind = "probabilities" if values.min() >= 0 and values.max() <= 1 else "their negatives, or logits"
            found.append(f"{logs.names[name]} has positive numbers, up to {values.max():.3g}: {kind}, not log-probs")
        elif own is not None and name != own:
            for shift in (-1, 1):
                if shifted(logs, units, own, name, shift).above(0):
                    found.append(
                        f"{logs.names[name]} fits {logs.names[own]} better if it is shifted by one token to the "
                        f"{'left' if shift < 0 else 'right'}: the columns are not aligned"
                    )
    if found:
        return Answer("columns", FINDING, "; ".join(found))
    return Answer("columns", NOTHING, "Log-probs are at most 0 and aligned with the sampler's")


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
        return Answer("mask", NOT_LOOKED_AT, "needs mask; zeros at the end of a rollout were left out", numbers)
    return Answer("mask", NOTHING, "; ".join(facts) or "Ends of rollouts agree with the mask", numbers)


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


def staleness(logs: Logs, units: Units) -> Answer:
    """How far the policy has moved from the one that drew the rollouts."""
    old = logs.first("old_logp", "rollout_logp")
    if "logp" not in logs.columns or old is None:
        return needs("staleness", "logp, and old_logp or rollout_logp")
    gap = -logs.gap("logp", old)
    versions = (
        np.unique(logs.columns["version"][logs.live if logs.columns["version"].ndim == 2 else ...])
        if ("version" in logs.columns)
        else np.empty(0)
    )
    if are_copies(logs, "logp", old):
        text = f"{logs.names['logp']} and {logs.names[old]} are equal: every ratio is 1"
        if len(versions) > 1:
            return Answer(
                "staleness",
                FINDING,
                f"{text}, though {len(versions)} versions of the weights drew the rollouts: {logs.names[old]} was "
                "computed again from the current policy, and no ratio corrects for their age",
                related="KL301",
            )
        return Answer("staleness", REPORTED, text + ", as before the first update on them", {"kl": 0.0})
    numbers: dict[str, Estimate | float] = {
        "kl": units.mean(gap),
        "kl_token": units.mean(gap, logs.live),
        "effective_rollouts": effective(-gap.sum(axis=1)),
    }
    text = (
        f"KL({'μ' if old == sampler(logs) else 'old'}‖π) is {numbers['kl']} nats a rollout, {numbers['kl_token']} a "
        f"token; weights of whole rollouts leave {100 * numbers['effective_rollouts']:.0f} % of them"
    )
    for version in versions[::-1][:SHOWN_VERSIONS] if len(versions) > 1 else ():
        of = logs.live & (logs.columns["version"].reshape(len(logs), -1) == version)
        numbers[f"kl_token_version_{version:g}"] = units.mean(np.where(of, gap, 0.0), of)
        text += f"; version {version:g}: {numbers[f'kl_token_version_{version:g}']}"
    if old == "rollout_logp":
        text += ". The engine's rounding is part of it: age alone needs old_logp"
    return Answer("staleness", REPORTED, text, numbers)


def engine(logs: Logs, units: Units) -> Answer:
    """How far the engine's log-probs are from the trainer's."""
    trainer = logs.first("old_logp", "logp")
    if "rollout_logp" not in logs.columns or trainer is None:
        return needs("engine", "rollout_logp, and old_logp or logp")
    one, other = logs.names["rollout_logp"], logs.names[trainer]
    if are_copies(logs, "rollout_logp", trainer):
        return Answer("engine", NOT_LOOKED_AT, f"{one} is a copy of {other}; it needs the engine's own")
    gap = logs.gap("rollout_logp", trainer)
    numbers: dict[str, Estimate | float] = {
        "gap": units.mean(np.abs(gap), logs.live),
        "largest_gap": float(np.abs(gap).max()),
        "kl_token": units.mean(gap, logs.live),
        "effective_rollouts": effective(-gap.sum(axis=1)),
    }
    text = (
        f"{one} and {other} differ by {numbers['gap']} a token, {numbers['largest_gap']:.3g} at most; weights of whole "
        f"rollouts leave {100 * numbers['effective_rollouts']:.0f} % of them"
    )
    if trainer == "logp":
        return Answer("engine", REPORTED, text + ". Age is part of it: the engine alone needs old_logp", numbers)
    kl = numbers["kl_token"]
    assert isinstance(kl, Estimate)
    if kl.above(MISMATCH):
        return Answer(
            "engine", FINDING, f"{text}. A KL of {kl} nats a token is more than rounding causes", numbers, "KL703"
        )
    status = NOTHING if kl.below(MISMATCH) else INCONCLUSIVE
    return Answer("engine", status, f"{text}. KL {kl} nats a token", numbers)


def truncation(logs: Logs, units: Units) -> Answer:
    """The mass that a truncated and renormalised engine keeps; log-probs that the tokens were not drawn with."""
    trainer = logs.first("old_logp", "logp")
    if "rollout_logp" not in logs.columns or trainer is None:
        return needs("truncation", "rollout_logp, and old_logp or logp")
    if are_copies(logs, "rollout_logp", trainer):
        return Answer("truncation", NOT_LOOKED_AT, "the engine's column is a copy of the trainer's")
    mass = mean_weight(logs, units, trainer, "rollout_logp")
    numbers: dict[str, Estimate | float] = {"kept_mass": mass}
    if mass.below(1 - MARGIN):
        kept = np.exp(logs.gap(trainer, "rollout_logp")[logs.live])
        numbers["least_kept_mass"] = float(np.quantile(kept, 0.01))
        return Answer(
            "truncation",
            FINDING,
            f"The sampler keeps {mass} of the trainer's probability, and its log-probs are renormalised: top-p, top-k or "
            f"min-p; if top-p, of about {numbers['least_kept_mass']:.2g}. Ratios carry the kept mass",
            numbers,
            "KL703",
        )
    if mass.above(1 + MARGIN):
        return Answer(
            "truncation",
            FINDING,
            f"The mean weight {logs.names[trainer]}/{logs.names['rollout_logp']} is {mass}, where 1 is the most that "
            "tokens can give which were drawn with these log-probs: temperature, truncation or other weights are not in them",
            numbers,
            "KL703",
        )
    text = f"The mean weight of trainer over engine is {mass}: no mass is missing"
    if mass.above(1 - MARGIN) and mass.below(1 + MARGIN):
        return Answer("truncation", NOTHING, text + ". Truncation behind raw log-probs is another question", numbers)
    return Answer("truncation", INCONCLUSIVE, f"The mean weight of trainer over engine is {mass}", numbers)


def raw_log_probs(logs: Logs, units: Units) -> Answer:
    """Whether tokens are likelier than the policy's own draws: E[−log π(y)] = H if they were drawn from π."""
    both = "old_logp" in logs.columns and "logp" in logs.columns
    if "entropy" not in logs.columns or (own := logs.first("old_logp", "logp")) is None:
        return needs("sampling", "entropy of the next token, and old_logp or logp, of the policy that drew")
    if both and np.abs(logs.gap("logp", "old_logp"))[logs.live].mean() > 1e-3:
        return needs("sampling", "logp and old_logp that are equal: it is unknown whose the entropy is")
    surprise = np.where(logs.live, -logs.columns[own] - logs.columns["entropy"], 0.0)
    numbers: dict[str, Estimate | float] = {"surprise": (found := units.mean(surprise, logs.live))}
    if found.below(-MARGIN) or found.above(MARGIN):
        kind = "likelier" if found.value < 0 else "less likely"
        why = "top-p, top-k or a temperature below 1" if found.value < 0 else "a temperature above 1 or other weights"
        text = f"Tokens are {kind} than draws of the policy by {abs(found.value):.3g} nats ({found}): {why} drew them"
        return Answer("sampling", FINDING, f"{text}, and the log-probs do not have it", numbers, "KL703")
    sure = found.above(-MARGIN) and found.below(MARGIN)
    text = f"A token's surprise less the entropy is {found} nats, as of the policy's own draws"
    return Answer("sampling", NOTHING if sure else INCONCLUSIVE, text, numbers)


def temperature(logs: Logs, units: Units) -> Answer:
    """The ratio of the temperatures of engine and trainer, from first tokens of rollouts of the same prompt.

    In one context log-probs of two tokens differ by (z_1 − z_2)/temperature, whatever the normaliser.
    """
    if "rollout_logp" not in logs.columns or "old_logp" not in logs.columns or len(units) == len(logs):
        return needs("temperature", "rollout_logp, old_logp, and group with several rollouts a prompt")
    if are_copies(logs, "rollout_logp", "old_logp"):
        return Answer("temperature", NOT_LOOKED_AT, "the engine's column is a copy of the trainer's")
    rows = np.flatnonzero(logs.live.any(axis=1))
    at, unit = logs.live[rows].argmax(axis=1), logs.group[rows]
    counts = np.maximum(np.bincount(unit, minlength=len(units)), 1)
    squares = []
    for name in ("rollout_logp", "old_logp"):
        first = logs.columns[name][rows, at]
        centred = first - (np.bincount(unit, weights=first, minlength=len(units)) / counts)[unit]
        squares.append(np.bincount(unit, weights=centred**2, minlength=len(units)))
    if squares[0].sum() <= SAME:
        return Answer("temperature", NOT_LOOKED_AT, "all rollouts of a prompt begin with the same token")
    slope = units.estimate(lambda one, other: np.sqrt(other / one), *squares)
    numbers: dict[str, Estimate | float] = {"ratio": slope}
    if slope.above(1 + SLOPE) or slope.below(1 - SLOPE):
        text = f"Temperature of the engine over that of the trainer: {slope}"
        return Answer("temperature", FINDING, f"{text}. Log-probs are of different temperatures", numbers, "KL702")
    sure = slope.above(1 - SLOPE) and slope.below(1 + SLOPE)
    text = f"Engine and trainer have one temperature (ratio {slope})"
    return Answer("temperature", NOTHING if sure else INCONCLUSIVE, text, numbers)


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
    if per_token.below(-NEGLIGIBLE):
        return Answer(
            "reference",
            FINDING,
            f"The KL of {logs.names[own]} to {ref} is {per_token} nats a token. No KL of a sampler is negative: the columns "
            "are exchanged, the sign is wrong, or other log-probs drew the tokens",
            numbers,
            "KL103",
        )
    if weight.above(1 + MARGIN):
        text = f"The mean weight {ref}/{logs.names[own]} is {weight}, where 1 is the most"
        return Answer("reference", FINDING, f"{text}: these log-probs did not draw the tokens", numbers)
    text = f"KL({'μ' if own != 'logp' else 'π'}‖ref) is {kl} nats a rollout, {per_token} a token"
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
    text = f"{numbers['beyond_clip']} of the ratios π/{logs.names[base]} lie beyond 1 ± {CLIP}"
    advantage = logs.get("advantage")
    if advantage is not None:
        sign = advantage.reshape(len(logs), -1)
        numbers["clipped"] = units.mean((above & (sign > 0)) | (below & (sign < 0)), logs.live)
        text += f", and the clip acts on {numbers['clipped']}"
    text += f"; token weights leave {100 * numbers['effective_tokens']:.0f} % of the tokens"
    if "rollout_logp" in logs.columns and (trainer := logs.first("old_logp", "prox_logp")) is not None:
        numbers["beyond_cap"] = units.mean(logs.live & (logs.gap(trainer, "rollout_logp") > np.log(CAP)), logs.live)
        text += f"; {numbers['beyond_cap']} of the weights of trainer over engine are above {CAP:g}"
    return Answer("ratio", REPORTED, text, numbers)


def kl_to_go(logs: Logs, units: Units) -> Answer:
    """The variance of the KL to go, which enters the bound on what a token-level term misses."""
    own = sampler(logs)
    if "ref_logp" not in logs.columns or own is None or are_copies(logs, own, "ref_logp"):
        return needs("kl to go", "ref_logp that is no copy of the policy's")
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
        return needs("kl to go", "two rollouts of a prompt, or two prompts")
    which = "of two prompts" if pairs else "of one prompt"
    return Answer(
        "kl to go",
        REPORTED,
        f"The log-ratio that is still to come varies, from rollout to rollout {which} at the same position, by {value} "
        "nats². It bounds what prefixes vary of the KL to go. It is no share of ∇KL: that needs gradients (kltest audit)",
        {"variance": value},
        "KL201",
    )


OF_LOG_PROBS = (
    columns,
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
