"""The gradients of further libraries' KL terms, most of them graded from a checkout, worked out by hand."""

from typing import Any

from derived import (
    BY_BATCH,
    BY_ROW,
    INVERSE_RATIO,
    K1,
    K2,
    K3,
    LENGTH,
    LOG_RATIO,
    LOG_RATIO_STALE,
    NAMELESS,
    NO_GRADIENT,
    NO_GRADIENT_STALE,
    OF_LENGTHS,
    ONE,
    ONE_STALE,
    RATIO,
    REWARD,
    SIGN,
    SUMMED,
    UNEVEN,
    WHOLE,
    Derived,
    Environments,
    by_tokens,
    each,
    local,
)

RATIO_K1 = "ρ·u, differentiated, has the weight ρ·(u + 1): k2's, at the prefixes of the sampler, as E[g] = 0."
IN_ADVANTAGE = "u of its own token in the advantage of each: the next token's reverse KL."
CLIPPED = "Stale, u is the sampler's and ratios are clipped: no name."
FULL = "The KL of the whole next-token distribution, differentiated: at the prefixes of whatever sampler."
THIRD, INVERSE = by_tokens(LOG_RATIO), by_tokens(INVERSE_RATIO)
THIRD_STALE = by_tokens(LOG_RATIO_STALE)
INVERSE_AT_SAMPLER: Environments = {**local("forward_kl", "@sampler"), "bandit": {"forward_kl": 1.0}}
LOW: dict[str, Any] = {"dtype": "float32"}


def rows(why: str, current: Environments, stale: Environments | None = None, **more: Any) -> Derived:
    """By the row's tokens, which does not couple rows."""
    return Derived(f"{why} {BY_ROW}", current, stale, **more)


def batches(why: str, current: Environments, stale: Environments | None = None, **more: Any) -> Derived:
    """By the batch's tokens, which couples rows of different lengths."""
    return Derived(f"{why} {BY_BATCH}", current, stale, **{"groups": UNEVEN, "reduction": "coupled", **more})


def functions(named: str, kinds: str, **more: Any) -> dict[str, Derived]:
    """A function of log-probs alone, per token, by the names that it has for k1, |u|, k2 and k3."""
    alone: dict[str, Any] = {"reduction": "per-row", **more}
    found = (
        Derived(K1, ONE, ONE_STALE, **alone),
        Derived("|u| has the weight sign(u).", SIGN, **alone),
        Derived(K2, LOG_RATIO, **alone),
        Derived(K3, INVERSE_RATIO, **alone),
    )
    return {f"{named}/{kind}": each for kind, each in zip(kinds.split(), found, strict=True) if kind != "-"}


def slime() -> dict[str, Derived]:
    """policy_loss_function adds its KL, in float32, summed over a row's tokens by their number; k1 unless it is set."""
    nothing = each({"zero": 1.0})
    return {
        "kl_loss/defaults": Derived(f"{K1} {LENGTH}", NO_GRADIENT, NO_GRADIENT_STALE, **LOW),
        "kl_loss/k2": rows(K2, THIRD, **LOW),
        "kl_loss/low_var_kl": rows(K3, INVERSE, **LOW),
        "kl_loss/k1,use_unbiased_kl=True": rows(RATIO_K1, THIRD, THIRD_STALE, **LOW),
        "kl_loss/low_var_kl,use_unbiased_kl=True": rows(RATIO, THIRD, THIRD_STALE, **LOW),
        "kl_loss/low_var_kl,calculate_per_token_loss=True": batches(K3, INVERSE, **LOW),
        **dict.fromkeys(
            (
                "kl_loss/low_var_kl,grpo_std_normalization=False",
                "kl_loss/low_var_kl,advantage_estimator=gspo",
                "kl_loss/low_var_kl,advantage_estimator=cispo",
            ),
            rows(K3, INVERSE, **LOW),
        ),
        "opd/defaults": rows(f"{IN_ADVANTAGE} {CLIPPED}", THIRD, NAMELESS, **LOW),
        "kl_loss/kl_coef,advantage_estimator=grpo": Derived(
            "Returns of grpo are the rewards alone: the KL, which is computed, reaches nothing.",
            nothing,
            nothing,
            **LOW,
        ),
        **functions("compute_approx_kl", "k1 - k2 low_var_kl", **LOW),
    }


def nemo_rl() -> dict[str, Derived]:
    """The KL estimate is multiplied by π/sg(π), or by ρ, and both are differentiated.

    1e-8 in a denominator couples the rows of a batch, in the tenth digit.
    """

    def divided(why: str, current: Environments, stale: Environments | None = None) -> Derived:
        return Derived(f"{why} {BY_BATCH}", current, stale, current, stale, reduction="coupled")

    k1_stale: Environments = {
        "bandit": {"from_sampler_kl": -1.0, "reverse_kl@rollouts": 1.0},
        "sequence": {"from_sampler_kl": -1 / 3, "local_reverse_kl@rollouts": 1 / 3},
        "ragged": None,
    }
    return {
        "clipped_pg/defaults": divided("k3 times π/sg(π) has the weight k3 + 1 − w = u: k2's.", THIRD),
        "clipped_pg/reference_policy_kl_type=k1": divided(
            "u times π/sg(π) has the weight u + 1, and E[g] = 0; stale, E_μ[g] = −∇KL(μ‖π) is left.", THIRD, k1_stale
        ),
        "clipped_pg/use_on_policy_kl_approximation=True": divided(RATIO, THIRD, THIRD_STALE),
    }


def torchtune() -> dict[str, Derived]:
    """k3 in the losses for GRPO, by rows in the recipe's; `GRPOCompletionLoss` takes a batch for one sequence."""
    whole = each({"forward_kl": 1.0})
    return {
        "grpo/loss=GRPOSimpleLoss": rows(K3, INVERSE),
        "grpo/loss=GRPOLoss": batches(K3, INVERSE),
        "grpo/loss=GRPOCompletionLoss": Derived(
            "k3 of log-probs that are summed over tokens, and over the rows of a batch too: the weight 1 − w of all "
            "rollouts together. On-policy that is the whole sequence's forward KL once for each row; stale rollouts "
            "weight the product of several rows, which has no name.",
            *(whole, None, whole, NAMELESS),
            reduction="coupled",
        ),
    }


def skyrl() -> dict[str, Derived]:
    """compute_approx_kl, averaged over the tokens of each row."""
    return {
        "kl_loss/defaults": rows(K3, INVERSE),
        "kl_loss/kl_estimator_type=k1": Derived(f"{K1} {LENGTH}", NO_GRADIENT, NO_GRADIENT_STALE),
        "kl_loss/kl_estimator_type=k2": rows(K2, THIRD),
        **functions("compute_approx_kl", "k1 abs k2 k3"),
    }


def roll() -> dict[str, Derived]:
    """The actor's loss takes k3 whatever is set, averaged over the tokens of each row by default.

    1e-8 in a denominator couples the rows of a batch, in the tenth digit.
    """
    summed = Derived(f"{K3} {SUMMED}", INVERSE_RATIO, None, INVERSE_RATIO, reduction="coupled")
    return {
        "actor_loss/defaults": rows(K3, INVERSE, groups=INVERSE, reduction="coupled"),
        "actor_loss/loss_agg_mode=seq-mean-token-sum": summed,
        **functions("compute_approx_kl", "kl abs mse k3"),
    }


def easyr1() -> dict[str, Derived]:
    """By default k1 is in the reward, over the spread of a group's charged rewards; else it is a loss, in float32."""
    return {
        "kl_in_reward/defaults": Derived(
            f"{REWARD} It is divided by the spread of what is charged, so that β cancels in part. {BY_BATCH}",
            *({}, {}, NAMELESS, NAMELESS),
            reduction="coupled",
        ),
        "kl_loss/defaults": Derived(f"{K1} {LENGTH}", NO_GRADIENT, NO_GRADIENT_STALE, **OF_LENGTHS, **LOW),
        "kl_loss/kl_penalty=low_var_kl,loss_avg_mode=token": batches(K3, INVERSE, **LOW),
        "kl_loss/kl_penalty=low_var_kl,loss_avg_mode=seq": rows(K3, INVERSE, **LOW),
        **functions("compute_kl", "kl abs mse low_var_kl", **LOW),
    }


def prime_rl() -> dict[str, Derived]:
    """Its KL term is the square of log π − log μ; on-policy distillation charges each token with its own u."""
    none = each({"zero": 1.0})
    stale: Environments = {"bandit": {"to_sampler_kl@rollouts": 2.0}, "sequence": None, "ragged": None}
    square = "(log π − log μ)² has the weight 2·(log π − log μ): 0 while rollouts are fresh, and never the reference."
    return {
        "loss/defaults": batches(square, none, stale, groups={}, stale_groups=UNEVEN),
        "loss/kind=ref_kl": batches(
            f"{IN_ADVANTAGE} Stale, tokens that lost 0.2 are left out: no name.", THIRD, NAMELESS
        ),
    }


def areal() -> dict[str, Derived]:
    """A teacher's u is differentiated as it is, or weighted by ρ if the reward's loss has no weight."""
    return {
        "kl_in_reward/defaults": batches(f"{REWARD} {CLIPPED}", by_tokens(WHOLE), NAMELESS, **LOW),
        "teacher/defaults": Derived(f"{K1} {LENGTH}", NO_GRADIENT, NO_GRADIENT_STALE, **OF_LENGTHS),
        "teacher/rl_loss_weight=0": batches(
            "Minus ρ times a detached −u: the weight ρ·u, at the prefixes of the sampler.", THIRD, THIRD_STALE
        ),
    }


def tinker_cookbook() -> dict[str, Derived]:
    """The sampler's log-probs make u, in the advantages of a loss −Σρ·A that is summed over tokens and rows."""
    fresh_and_not = {"reverse_kl": 1.0, "to_sampler_kl": -1.0}
    alone, pairs = ({"local_reverse_kl": 1.0, "reverse_kl": -1 / tokens} for tokens in (3, 6))
    half = {"bandit": {name: value / 2 for name, value in fresh_and_not.items()}, "sequence": None, "ragged": None}
    return {
        "rl/defaults": Derived(
            "A token is charged u minus the mean u of the batch's tokens, its own among them: of n rows of T tokens "
            "1/(nT) of the whole ∇KL is taken off the next token's. With one token and two rows a half is left, and "
            "with one row nothing.",
            {"sequence": alone, "ragged": None},
            {"sequence": None, "ragged": None},
            {"bandit": {"reverse_kl": 1 / 2}, "sequence": pairs, "ragged": None},
            half,
            reduction="coupled",
        ),
        "on_policy_distillation/defaults": Derived(
            f"{IN_ADVANTAGE} Stale, log μ − log ref with the token's own ratio.",
            LOG_RATIO,
            {"bandit": fresh_and_not, "sequence": None, "ragged": None},
            reduction="sum",
        ),
        "on_policy_distillation/kl_discount_factor=1.0": Derived(
            "Σ_{s≥t} u_s in the advantage of each token: the truth on-policy. Stale, log μ − log ref with the token's "
            "own ratio.",
            WHOLE,
            {
                "bandit": fresh_and_not,
                "sequence": {f"{name}@sampler": value for name, value in fresh_and_not.items()},
                "ragged": {f"{name}@sampler": value for name, value in fresh_and_not.items()},
            },
            reduction="sum",
        ),
    }


LIBRARIES = {
    "slime": slime(),
    "nemo-rl": nemo_rl(),
    "torchtune": torchtune(),
    "skyrl": skyrl(),
    "roll": roll(),
    "easyr1": easyr1(),
    "prime-rl": prime_rl(),
    "areal": areal(),
    "tinker-cookbook": tinker_cookbook(),
}
CLONED = {f"{library}:{name}": found for library, cases in LIBRARIES.items() for name, found in cases.items()}
"""By target, `library:setting`."""
