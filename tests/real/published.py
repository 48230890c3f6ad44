"""What the KL terms of published libraries follow, worked out by hand from their source, setting by setting.

u = logp − ref_logp, w = e^(−u), ρ = e^(logp − old_logp), g = ∇ log π; a per-token term f(u) in the loss follows the
weight f'(u) on g. Under "stale", E_μ[f'(u)·g] without a ratio has no name (None), except for f' = 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Case:
    """One setting of one function, and what is to be found. `options` go to `kltest grade` as they are."""

    target: str
    arguments: dict[str, object]
    current: dict[str, Combination]
    stale: dict[str, Combination] = field(default_factory=dict)
    dtype: str = "float64"
    reduction: str = "per-row"
    lifted: bool = False
    expect: str = "reverse_kl"
    verdict: str = "refuted"

    @property
    def title(self) -> str:
        settings = " ".join(f"{key}={value}" for key, value in self.arguments.items())
        declared = "" if self.expect == "reverse_kl" else f" --expect {self.expect}"
        return f"{self.target.rpartition(':')[2]} {settings}{declared}"


@dataclass(frozen=True)
class Library:
    """How to install a library (arguments of `pip install`, one call each, torch being there) and what to grade."""

    installs: tuple[tuple[str, ...], ...]
    cases: tuple[Case, ...]


def scaled(table: dict[str, Combination], **factors: float | None) -> dict[str, Combination]:
    """A table with some worlds' coefficients multiplied; None for a world says that nothing is to be named there."""
    found = dict(table)
    for world, factor in factors.items():
        combination = table[world]
        named = combination is not None and factor is not None
        found[world] = {name: factor * value for name, value in combination.items()} if named else None
    return found


def verl() -> Library:
    """core_algos.kl_penalty: per token, without mask or sampler; "+" keeps the value and borrows k2's gradient."""
    target = "verl.trainer.ppo.core_algos:kl_penalty"
    found = {
        "kl": ONE,
        "abs": SIGN,
        "mse": LOG_RATIO,
        "low_var_kl": INVERSE_RATIO,
        "k1+": LOG_RATIO,
        "low_var_kl+": LOG_RATIO,
    }
    cases = [Case(target, {"kl_penalty": name}, current) for name, current in found.items()]
    cases.append(Case(target, {"kl_penalty": "mse"}, LOG_RATIO, expect="local_reverse_kl", verdict="confirmed"))
    return Library((("verl==0.9.1",),), tuple(cases))


def openrlhf() -> Library:
    """compute_approx_kl: float32 inside, so coefficients hold to 1e-4; the unbiased gradient is sg(min(ρ, 10))·u·g.

    The package imports what a machine without a GPU does not have, so the function is lifted out of its file.
    """
    target = "openrlhf.models.utils:compute_approx_kl"
    plain = {"k1": (ONE, ONE_STALE), "k2": (LOG_RATIO, NAMELESS), "k3": (INVERSE_RATIO, NAMELESS)}
    cases = []
    for name, (current, stale) in plain.items():
        for unbiased in (False, True):
            expected = (LOG_RATIO, LOG_RATIO_STALE) if unbiased else (current, stale)
            arguments = {"kl_estimator": name, "unbiased_gradient": unbiased}
            cases.append(Case(target, arguments, *expected, dtype="float32", lifted=True))
    return Library((("--no-deps", "openrlhf==0.11.2"),), tuple(cases))


def liger() -> Library:
    """k3_loss_fn, whose two parameters say nothing, and ppo_loss_fn, whose KL part is k3 under each normalisation.

    Divided by the row's length (grpo) or by the batch's tokens (dapo), T = 3 costs a factor of 3 where lengths are
    equal, and ragged rows follow no named gradient; by a constant (dr_grpo), a factor of 3 everywhere; times L/T
    (luspo), nothing at fixed length. With the ratio ρ_t·k3, differentiable, the weight is ρ_t·u; with the geometric
    mean of the sequence's ratio it is (1/T)·Σ_s k3_s + 1 − w_t, so ⅓ of E[Σk3·g] + local_forward_kl.
    """
    module = "liger_kernel.chunked_loss.grpo_loss"
    whole = f"{module}:LigerFusedLinearGRPOFunction.ppo_loss_fn"
    third = {"local_forward_kl": 1 - 1 / 3, "reverse_kl": 1 / 3}
    ratio = {"loss_type": "luspo", "use_bias_correction_kl": True}
    return Library(
        (("--no-deps", "liger-kernel==0.8.5"),),
        (
            Case(f"{module}:k3_loss_fn", {"log_p": "@ref_logp", "log_q": "@logp"}, INVERSE_RATIO),
            Case(f"{module}:k3_loss_fn", {"log_p": "@logp", "log_q": "@ref_logp"}, RATIO),
            Case(
                whole,
                {"loss_type": "dr_grpo", "max_completion_length": 3},
                scaled(INVERSE_RATIO, bandit=1 / 3, sequence=1 / 3, ragged=1 / 3),
                NAMELESS,
                reduction="mean",
            ),
            Case(
                whole,
                {"loss_type": "grpo"},
                scaled(INVERSE_RATIO, sequence=1 / 3, ragged=None),
                NAMELESS,
                reduction="mean",
            ),
            Case(
                whole,
                {"loss_type": "dapo"},
                scaled(INVERSE_RATIO, sequence=1 / 3, ragged=None),
                NAMELESS,
                reduction="coupled",
            ),
            Case(whole, ratio, scaled(LOG_RATIO, ragged=None), scaled(LOG_RATIO_STALE, ragged=None), reduction="mean"),
            Case(
                whole,
                {**ratio, "importance_sampling_level": "sequence"},
                {**LOG_RATIO, "sequence": third, "ragged": None},
                {**NAMELESS, "bandit": {"reverse_kl": 1.0}},
                reduction="mean",
            ),
        ),
    )


LIBRARIES = {"liger": liger(), "openrlhf": openrlhf(), "verl": verl()}
"""The quickest to install first: that one is graded by default."""
