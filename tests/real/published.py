"""What the KL terms of published libraries follow, worked out by hand from their source, setting by setting.

u = logp − ref_logp, w = e^(−u), ρ = e^(logp − old_logp), g = ∇ log π; a per-token term f(u) in the loss follows the
weight f'(u) on g. Under "stale", E_μ[f'(u)·g] without a ratio has no name (None), except for f' = 1. How each setting
is called stands in the library's door, under the same name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kltest.libraries import door  # noqa: E402 - importable without anything installed, from the checkout

Combination = dict[str, float] | None
LOG_RATIO = {"bandit": {"reverse_kl": 1.0}, "sequence": {"local_reverse_kl": 1.0}, "ragged": {"local_reverse_kl": 1.0}}
"""f' = u, on-policy: k2, and whatever borrows k2's gradient."""
LOG_RATIO_STALE = {
    "bandit": {"reverse_kl": 1.0},
    "sequence": {"local_reverse_kl@sampler": 1.0},
    "ragged": {"local_reverse_kl@sampler": 1.0},
}
"""The same with the token's own ratio ρ: the token is put right, the prefixes stay the sampler's."""
INVERSE_RATIO = {
    "bandit": {"forward_kl": 1.0},
    "sequence": {"local_forward_kl": 1.0},
    "ragged": {"local_forward_kl": 1.0},
}
"""f' = 1 − w, on-policy: k3."""
RATIO = {"bandit": {"chi_square": 1.0}, "sequence": {"local_chi_square": 1.0}, "ragged": {"local_chi_square": 1.0}}
"""f' = e^u − 1, on-policy: k3 with its ratio upside down."""
SIGN = {
    "bandit": {"total_variation": 2.0},
    "sequence": {"local_total_variation": 2.0},
    "ragged": {"local_total_variation": 2.0},
}
"""f' = sign(u), on-policy."""
ONE = {world: {"zero": 1.0} for world in ("bandit", "sequence", "ragged")}
"""f' = 1, on-policy: the score function averages to nothing."""
ONE_STALE = {world: {"from_sampler_kl": -1.0} for world in ("bandit", "sequence", "ragged")}
"""E_μ[g] = −∇KL(μ‖π)."""
NAMELESS: dict[str, Combination] = dict.fromkeys(("bandit", "sequence", "ragged"))


WHOLE = {world: {"reverse_kl": 1.0} for world in ("bandit", "sequence", "ragged")}
"""Σu of the whole sequence on every token's g, or Σ_{s≥t} u_s: the truth."""


@dataclass(frozen=True)
class Case:
    """One setting of a library, and what is to be found.

    `current` and `stale` are rows of single rollouts, those that there are; `pairs` rows of pairs under `current`.
    """

    target: str
    current: dict[str, Combination] = field(default_factory=dict)
    stale: dict[str, Combination] = field(default_factory=dict)
    pairs: dict[str, Combination] = field(default_factory=dict)
    dtype: str = "float64"
    reduction: str = "per-row"
    lifted: bool = False
    expect: str = "reverse_kl"
    verdict: str = "refuted"
    arguments: dict[str, object] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.target + ("" if self.expect == "reverse_kl" else f" --expect {self.expect}")


@dataclass(frozen=True)
class Library:
    """How to install a library (arguments of `pip install`, one call each, torch being there) and what to grade."""

    installs: tuple[tuple[str, ...], ...]
    cases: tuple[Case, ...]


def library(name: str, *cases: Case) -> Library:
    """A library as its door says that it is installed."""
    there = door(name)
    installs = tuple(tuple(word.format(version=there.version) for word in call) for call in there.installs)
    return Library(installs, cases)


def scaled(table: dict[str, Combination], **factors: float | None) -> dict[str, Combination]:
    """A table with some worlds' coefficients multiplied; None for a world says that nothing is to be named there."""
    found = dict(table)
    for world, factor in factors.items():
        combination = table[world]
        named = combination is not None and factor is not None
        found[world] = {name: factor * value for name, value in combination.items()} if named else None
    return found


MEAN_OF_TOKENS = {"sequence": 1 / 3, "ragged": None}
"""Divided by the row's or the batch's tokens: T = 3 at fixed length, and nothing that has a name where lengths vary."""


def verl() -> Library:
    """kl_penalty is per token, without mask or sampler; "+" keeps the value and borrows k2's gradient.

    Aggregated, the weights are divided by the batch's tokens (token-mean), by the row's (seq-mean-token-mean), by T
    (…-norm), or not. KL in the reward: outcome estimators give every token Σu, REMAX and its like Σ_{s≥t} u_s. Among n
    rollouts of a prompt, minus their mean leaves 1 − 1/n, minus the others' leaves all. GPG multiplies by n over the
    rewards that are not zero: with a binary reward in pairs, none is zero at β = 1 and one of two is at β = 0 wherever
    rewards differ, which doubles the weight of the reward there, so that the difference holds ½∇E[R] more.
    Whitening divides by what the batch's own rollouts say (no name). Stale rollouts: the token's own ratio, clipped.
    The recipe has the whole ratio, detached, on Σu of the policy's own log-probs.
    """
    kinds = {
        "kl": ONE, "k1": ONE, "abs": SIGN, "mse": LOG_RATIO, "k2": LOG_RATIO,
        "low_var_kl": INVERSE_RATIO, "k3": INVERSE_RATIO,
    }  # fmt: skip
    plus = dict.fromkeys([f"{name}+" for name in kinds], LOG_RATIO)
    modes = {
        "token-mean": (scaled(INVERSE_RATIO, **MEAN_OF_TOKENS), "coupled"),
        "token-sum": (INVERSE_RATIO, "sum"),
        "seq-mean-token-sum": (INVERSE_RATIO, "mean"),
        "seq-mean-token-mean": (scaled(INVERSE_RATIO, **MEAN_OF_TOKENS), "mean"),
        "seq-mean-token-sum-norm": (scaled(INVERSE_RATIO, sequence=1 / 3, ragged=1 / 3), "mean"),
    }
    halved = {world: {"reverse_kl": 0.5} for world in WHOLE}
    third = scaled(WHOLE, **MEAN_OF_TOKENS)
    gpg = {"bandit": {"reverse_kl": 0.5, "expected_reward": 0.5}, "ragged": None}
    gpg["sequence"] = {"reverse_kl": 1 / 6, "expected_reward": 1 / 6}
    summed = "loss_agg_mode=seq-mean-token-sum"

    def charged(name: str, current: dict, pairs: dict, **more: object) -> Case:
        return Case(f"verl:kl_in_reward/{name}", current, pairs=pairs, **{"reduction": "coupled", **more})

    return library(
        "verl",
        *(Case(f"verl:kl_penalty/{name}", current) for name, current in {**kinds, **plus}.items()),
        Case("verl:kl_penalty/mse", LOG_RATIO, expect="local_reverse_kl", verdict="confirmed"),
        *(
            Case(f"verl:kl_loss/{name}", found, pairs={"ragged": None} if how == "coupled" else {}, reduction=how)
            for name, (found, how) in modes.items()
        ),
        Case(
            "verl:ppo_loss/use_kl_loss",
            scaled(INVERSE_RATIO, **MEAN_OF_TOKENS),
            NAMELESS,
            pairs={"ragged": None},
            reduction="coupled",
        ),
        Case(f"verl:ppo_loss/kl_loss_type=k1+,{summed}", LOG_RATIO, reduction="mean"),
        charged("remax", third, {"ragged": None}),
        charged(f"remax,{summed}", WHOLE, {}, reduction="mean", verdict="confirmed"),
        charged("rloo", third, third),
        charged(f"rloo,{summed}", WHOLE, WHOLE, stale=NAMELESS),
        charged(f"grpo,norm_adv_by_std_in_grpo=False,{summed}", WHOLE, halved),
        charged("gpg", third, gpg),
        charged("opo", third, scaled(halved, **MEAN_OF_TOKENS)),
        charged("grpo_passk", {}, NAMELESS),
        charged("sequence-corrected", WHOLE, WHOLE, stale=WHOLE, verdict="confirmed"),
    )


def openrlhf() -> Library:
    """compute_approx_kl: float32 inside, so coefficients hold to 1e-4; the unbiased gradient is sg(min(ρ, 10))·u·g.

    The package imports what a machine without a GPU does not have, so the function is lifted out of its file. The KL
    in the reward is credited with Σ_{s≥t} of its own, outside the baseline. Tokens are averaged over the batch.
    """
    plain = {"k1": ONE, "k2": LOG_RATIO, "k3": INVERSE_RATIO}
    low = {"dtype": "float32"}
    cases = []
    for name, current in plain.items():
        kl = f"openrlhf:compute_approx_kl/{name}"
        # Only with the unbiased gradient do the sampler's log-probs change anything.
        cases.append(Case(kl, current, lifted=True, **low))
        cases.append(Case(f"{kl},unbiased_gradient", LOG_RATIO, LOG_RATIO_STALE, lifted=True, **low))
    third = scaled(WHOLE, **MEAN_OF_TOKENS)
    return library(
        "openrlhf",
        *cases,
        Case(
            "openrlhf:kl_loss/k3",
            scaled(INVERSE_RATIO, **MEAN_OF_TOKENS),
            pairs={"ragged": None},
            reduction="coupled",
            **low,
        ),
        Case(
            "openrlhf:kl_loss/k3,token_level_loss=False",
            scaled(INVERSE_RATIO, **MEAN_OF_TOKENS),
            reduction="mean",
            **low,
        ),
        Case("openrlhf:kl_in_reward/rloo", {}, pairs=third, reduction="coupled", **low),
        Case("openrlhf:kl_in_reward/dr_grpo", {}, pairs=third, reduction="coupled", **low),
        Case("openrlhf:kl_in_reward/reinforce_baseline", {}, pairs=NAMELESS, reduction="coupled", **low),
        Case("openrlhf:kl_loss/sequence", WHOLE, WHOLE, reduction="mean", verdict="confirmed"),
    )


def liger() -> Library:
    """k3_loss_fn, whose two parameters say nothing, and ppo_loss_fn, whose KL part is k3 under each normalisation.

    Divided by the row's length (grpo, sapo) or by the batch's tokens (dapo, bnpo, cispo, vespo), T = 3 costs a factor
    of 3 where lengths are equal, and ragged rows follow no named gradient; by a constant (dr_grpo), a factor of 3
    everywhere; times L/T (luspo), nothing at fixed length. With the ratio ρ_t·k3, differentiable, the weight is ρ_t·u;
    with the geometric mean of the sequence's ratio it is (1/T)·Σ_s k3_s + 1 − w_t, so ⅓ of E[Σk3·g] + local_forward_kl.
    Fused it is the same in float32. The recipe has ρ·Σu of the whole sequence, detached, as a cost on every token.
    """
    third = {"local_forward_kl": 1 - 1 / 3, "reverse_kl": 1 / 3}
    constant = dict.fromkeys(("bandit", "sequence", "ragged"), 1 / 3)
    averaged, unnamed = scaled(INVERSE_RATIO, **MEAN_OF_TOKENS), {"ragged": None}

    def whole(settings: str, current: dict, stale: dict, reduction: str = "mean", call: str = "ppo_loss_fn") -> Case:
        pairs = unnamed if reduction == "coupled" else {}
        low = "float32" if call == "fused" else "float64"
        return Case(f"liger:{call}/loss_type={settings}", current, stale, pairs, low, reduction)

    ratio = "use_bias_correction_kl=True"
    return library(
        "liger",
        Case("liger:k3_loss_fn/log_p=ref_logp", INVERSE_RATIO),
        *(whole(name, averaged, NAMELESS, "coupled") for name in ("dapo", "bnpo", "vespo")),
        # Its default upper bound of 0.2 cuts every ratio off, so that nothing depends on the sampler.
        whole("cispo", averaged, {}, "coupled"),
        *(whole(name, averaged, NAMELESS) for name in ("grpo", "sapo")),
        whole("dr_grpo", scaled(INVERSE_RATIO, **constant), NAMELESS),
        whole("luspo", scaled(INVERSE_RATIO, ragged=None), NAMELESS),
        whole(
            f"dapo,{ratio}", scaled(LOG_RATIO, **MEAN_OF_TOKENS), scaled(LOG_RATIO_STALE, **MEAN_OF_TOKENS), "coupled"
        ),
        whole(f"dr_grpo,{ratio}", scaled(LOG_RATIO, **constant), scaled(LOG_RATIO_STALE, **constant)),
        whole(f"luspo,{ratio}", scaled(LOG_RATIO, ragged=None), scaled(LOG_RATIO_STALE, ragged=None)),
        whole(
            f"luspo,{ratio},importance_sampling_level=sequence",
            {**LOG_RATIO, "sequence": third, "ragged": None},
            {**NAMELESS, "bandit": {"reverse_kl": 1.0}},
        ),
        whole("dr_grpo", scaled(INVERSE_RATIO, **constant), NAMELESS, call="fused"),
        Case("liger:fused/kl-in-advantages", WHOLE, WHOLE, dtype="float32", reduction="mean", verdict="confirmed"),
    )


LIBRARIES = {"liger": liger(), "openrlhf": openrlhf(), "verl": verl()}
"""The quickest to install first: that one is graded by default."""
