"""The gradients of real libraries' KL terms, worked out by hand from their source, setting by setting, in one table.

u = log π − log ref of a token, w = e^(−u), ρ = π/μ of a token, g = ∇log π of a token, T = 3 the length of every
rollout of the environment "sequence". A per-token term f(u) that is differentiated puts the weight f'(u) on g. A
next-token gradient is called local; averaged over prefixes that the sampler drew it is local at the sampler, and
without a ratio over its tokens as well (@rollouts). None is an unnamed gradient: weights that depend on differing
lengths or on the batch's own rollouts, and clipped ratios.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Combination = Mapping[str, float] | None
Environments = Mapping[str, Combination]
ENVIRONMENTS = ("bandit", "sequence", "ragged")
RESOLUTION = {"float64": 5e-6, "float32": 1e-3}
"""On coefficients, relative: six digits are recorded; float32 is identified up to 1e-4 of the gradient's size."""


def each(combination: Combination) -> dict[str, Combination]:
    """The same in all environments."""
    return dict.fromkeys(ENVIRONMENTS, combination)


def local(name: str, at: str = "") -> dict[str, Combination]:
    """A gradient where there is one step, its next-token part where there are more."""
    return {"bandit": {name: 1.0}, "sequence": {f"local_{name}{at}": 1.0}, "ragged": {f"local_{name}{at}": 1.0}}


def scaled(environments: Environments, **factors: float | None) -> dict[str, Combination]:
    """Coefficients multiplied by a factor for each environment; None makes the gradient unnamed there."""
    found = dict(environments)
    for environment, factor in factors.items():
        combination = environments[environment]
        named = combination is not None and factor is not None
        found[environment] = {name: factor * value for name, value in combination.items()} if named else None
    return found


def by_tokens(environments: Environments) -> dict[str, Combination]:
    """Divided by the tokens of the row or of the batch."""
    return scaled(environments, sequence=1 / 3, ragged=None)


def everywhere(environments: Environments, factor: float, bandit: float | None = None) -> dict[str, Combination]:
    """Divided by a constant; `bandit` where the constant is another one there."""
    return scaled(environments, bandit=factor if bandit is None else bandit, sequence=factor, ragged=factor)


def uncorrected(environments: Environments) -> dict[str, Combination]:
    """The same weights on rollouts of another sampler, without a ratio. (Those of zero are to be given.)"""
    at_rollouts = lambda to: to and {f"{name}@rollouts": value for name, value in to.items()}  # noqa: E731
    return {environment: at_rollouts(to) for environment, to in environments.items()}


WHOLE = each({"reverse_kl": 1.0})
NAMELESS = each(None)
LOG_RATIO, LOG_RATIO_STALE = local("reverse_kl"), {**local("reverse_kl", "@sampler"), "bandit": {"reverse_kl": 1.0}}
INVERSE_RATIO = local("forward_kl")
SIGN = everywhere(local("total_variation"), 2.0)
ONE, ONE_STALE = each({"zero": 1.0}), each({"from_sampler_kl": -1.0})
NO_GRADIENT: dict[str, Combination] = {**ONE, "ragged": {"inverse_length": 1.0}}
NO_GRADIENT_STALE: dict[str, Combination] = {
    "bandit": {"from_sampler_kl": -1.0},
    "sequence": {"from_sampler_kl": -1 / 3},
    "ragged": {"inverse_length@rollouts": 1.0},
}
"""k1 divided by the tokens of a row: E[g/L], which is 0 where lengths are equal."""
UNEVEN = {"ragged": None}
"""Pairs of rows that are coupled by their number of tokens: where lengths are equal they are not."""
OF_LENGTHS: dict[str, Any] = {
    **{"groups": {"ragged": {"inverse_length_of2": 1.0}}, "reduction": "coupled"},
    "stale_groups": {"ragged": {"inverse_length_of2@rollouts": 1.0}},
}
"""k1 divided by the tokens of a batch, as pairs of rows show it: E[(g_1 + g_2)/(L_1 + L_2)]."""
MIXED = {**LOG_RATIO, "sequence": {"reverse_kl": 1 / 3, "local_forward_kl": 2 / 3}, "ragged": None}
OTHERS = {**MIXED, "sequence": {"reverse_kl": 1 / 3, "local_forward_kl": 2 / 3, "other_tokens_forward_kl": -1 / 3}}
MIXED_STALE = {**MIXED, "sequence": {f"{name}@mean_ratio": value for name, value in OTHERS["sequence"].items()}}
MIXED_NO_RATIO = uncorrected(OTHERS)
"""Of the geometric mean of ratios, below."""
PAIRS: dict[str, Any] = {"groups": UNEVEN, "reduction": "coupled"}
OFF_POLICY: dict[str, Any] = {"stale": WHOLE, "stale_groups": WHOLE, "verdict": "confirmed"}

K1 = "k1 = u has the weight 1 on g, and E[g] = 0; with stale rollouts E_μ[g] = −∇KL(μ‖π)."
K2 = "k2 = u²/2 has the weight u: the next token's reverse KL, and the truth where there is one token."
K3 = "k3 = w − 1 + u has the weight 1 − w: the next token's forward KL; without a ratio stale rollouts weight it."
RATIO = "ρ·k3, both differentiated, has the weight ρ·(k3 + 1 − w) = ρ·u: k2's, at the prefixes of the sampler."
GEOMETRIC = (
    "The geometric mean of the T ratios, differentiated, gives every token Σk3/T, and E[Σk3·g] is ∇KL − the forward "
    "KL's local part, so that with k3's own 1 − w there are 1/T of the truth and 1 − 1/T of that part. Stale, only a "
    "single token has the right ratio."
)
REWARD = "Minus β·Σu in the reward of a policy gradient: E[Σu·g] is the truth, as E[∇Σu] = 0."
CHARGED = "ρ of the whole sequence times its Σu, on every token's g: the truth, from any sampler."
BY_ROW = "Divided by the row's tokens: 1/T, no name where lengths differ."
LENGTH = "Divided by its tokens, 1/T; E[g/L] = ∇E[1/L] is left where lengths differ, and the reference is not in it."
BY_BATCH = "Divided by the batch's tokens: 1/T, no name where lengths differ, which couples rows."
BY_CONSTANT = "Summed over tokens, divided by a constant."
SUMMED = "Summed over tokens, averaged over rollouts."
WHITENED = "Advantages are divided by their spread in the batch: no name."


@dataclass(frozen=True)
class Derived:
    """The expected findings of a setting, and why, in words.

    `current` and `stale` are environments graded rollout by rollout, `groups` and `stale_groups` those graded in larger
    batches. Without `stale`, nothing corrects for another sampler. `lifted`: the function is taken out of a file that
    cannot be imported.
    """

    why: str
    current: Environments = field(default_factory=dict)
    stale: Environments | None = None
    groups: Environments = field(default_factory=dict)
    stale_groups: Environments | None = None
    dtype: str = "float64"
    reduction: str = "mean"
    verdict: str = "refuted"
    lifted: bool = False

    @property
    def off_policy(self) -> tuple[Environments, Environments]:
        """With rollouts of another sampler, one by one and in larger batches."""
        alone = uncorrected(self.current) if self.stale is None else self.stale
        return alone, uncorrected(self.groups) if self.stale_groups is None else self.stale_groups


def disagreements(derived: Derived, row: Mapping[str, Any]) -> Iterator[str]:
    """Differences between a row and its derivation, one sentence each."""
    if row["error"]:
        yield f"it was not graded: {row['error']}"
    for key in ("verdict", "dtype", "reduction"):
        if row[key] != getattr(derived, key):
            yield f"{key} is {row[key]}, not {getattr(derived, key)}"
    if any("lifted" in note for note in row["notes"]) != derived.lifted:
        yield f"lifted out of its file: {'not ' * derived.lifted}expected otherwise"
    expected = {
        (sampler, several, environment): combination
        for several, kinds in enumerate(zip((derived.current, derived.groups), derived.off_policy, strict=True))
        for sampler, environments in zip(("current", "stale"), kinds, strict=True)
        for environment, combination in environments.items()
    }
    found = {(each["sampler"], int(each["batch"] > 1), each["environment"]): each for each in row["gradients"]}
    if len(found) != len(row["gradients"]) or found.keys() != expected.keys():
        yield f"graded are {sorted(found)}, not {sorted(expected)}"
    for key in sorted(found.keys() & expected.keys()):
        identified = found[key]["identified"]
        if not _equal(identified, expected[key], RESOLUTION[derived.dtype]):
            yield f"{key[2]}, {key[0]}{', several' * key[1]}: identified {identified}, not {expected[key]}"


def _equal(found: Combination, expected: Combination, resolution: float) -> bool:
    if found is None or expected is None:
        return found is expected
    return found.keys() == expected.keys() and all(
        math.isclose(found[name], expected[name], rel_tol=resolution) for name in expected
    )


def trl() -> dict[str, Derived]:
    """GRPOTrainer multiplies k3 by its ratio by default; log-probs and losses are float32, whatever the model is."""

    def grpo(
        why: str, current: Environments, stale: Environments | None = None, how: str = "mean", **more: Any
    ) -> Derived:
        more = {"dtype": "float32", **more}
        coupled = {"groups": UNEVEN} if how == "coupled" else {}
        return Derived(why, current, stale, reduction=how, **coupled, **more)

    def rloo(why: str, groups: Environments, stale: Environments, **more: Any) -> Derived:
        more = {"dtype": "float32", "reduction": "coupled", **more}
        return Derived(why, groups=groups, stale_groups=stale, **more)

    fresh = "Fresh completions are their own sampler, so that ρ is 1 and is differentiated all the same."
    luspo, by_sequence = "grpo/loss_type=luspo", "importance_sampling_level=sequence"
    clipped = f"{REWARD} It is that of the sampler, log μ − log ref, and the clip of stale ratios leaves no name."
    corrected, plain = "use_bias_correction_kl=true", "use_bias_correction_kl=false"
    batch = by_tokens(LOG_RATIO)
    found = {
        "grpo/defaults": grpo(f"{RATIO} {fresh} {BY_BATCH}", batch, how="coupled"),
        f"grpo/{corrected}": grpo(f"The default: {RATIO} {fresh} {BY_BATCH}", batch, how="coupled"),
        f"grpo/{plain}": grpo(f"{K3} {BY_BATCH}", by_tokens(INVERSE_RATIO), how="coupled"),
        "grpo/loss_type=dr_grpo": grpo(f"{RATIO} {BY_CONSTANT} It is 512.", everywhere(LOG_RATIO, 1 / 512)),
        luspo: grpo(f"{RATIO} {fresh} {SUMMED}", LOG_RATIO),
        f"{luspo},{plain}": grpo(f"{K3} {SUMMED}", INVERSE_RATIO),
        f"{luspo},{plain},num_iterations=2": grpo(f"{K3} {SUMMED}", INVERSE_RATIO),
        f"{luspo},{plain},{by_sequence}": grpo(f"The level is that of the policy loss. {K3} {SUMMED}", INVERSE_RATIO),
        f"{luspo},{plain},{by_sequence},num_iterations=2": grpo(f"{K3} {SUMMED}", INVERSE_RATIO),
        f"{luspo},{corrected}": grpo(f"{RATIO} {fresh} {SUMMED}", LOG_RATIO),
        f"{luspo},{corrected},num_iterations=2": grpo(f"{RATIO} {SUMMED}", LOG_RATIO, LOG_RATIO_STALE),
        f"{luspo},{corrected},{by_sequence}": grpo(f"{GEOMETRIC} {SUMMED} {fresh}", MIXED, MIXED_NO_RATIO),
        f"{luspo},{corrected},{by_sequence},num_iterations=2": grpo(f"{GEOMETRIC}", MIXED, MIXED_STALE),
        f"{luspo},steps_per_generation=2": grpo(f"{RATIO} {SUMMED}", LOG_RATIO, LOG_RATIO_STALE),
        f"{luspo},temperature=0.7": grpo(f"Drawn and scored at one temperature. {RATIO} {SUMMED}", LOG_RATIO),
        f"grpo_from_logprobs/loss_type=luspo,{plain},num_iterations=2": grpo(
            f"{K3} {SUMMED}", INVERSE_RATIO, dtype="float64"
        ),
        f"grpo_from_logprobs/loss_type=luspo,{corrected},num_iterations=2": grpo(
            f"{RATIO} {SUMMED}", LOG_RATIO, LOG_RATIO_STALE, dtype="float64"
        ),
        "grpo/recipe=sequence_kl": grpo(f"sg(ρ)·(Σu)²/2: {CHARGED}", WHOLE, WHOLE, verdict="confirmed"),
        "rloo/defaults": rloo(clipped, WHOLE, NAMELESS),
        "rloo/num_iterations=2": rloo(clipped, WHOLE, NAMELESS),
        "rloo/normalize_advantages=true": rloo(WHITENED, NAMELESS, NAMELESS),
        "rloo/epsilon=1000": rloo(
            "Unclipped, the whole sequence's ratio puts E_μ right, and log μ − log ref is KL(π‖ref) − KL(π‖μ).",
            WHOLE,
            each({"reverse_kl": 1.0, "to_sampler_kl": -1.0}),
        ),
        "rloo/recipe=defaults,on-policy": rloo(REWARD, WHOLE, {}, verdict="confirmed"),
        "rloo/recipe=sequence_kl": rloo(f"sg(ρ)·(Σu)²/2: {CHARGED}", WHOLE, WHOLE, verdict="confirmed"),
    }
    for name in ("dapo", "bnpo", "cispo", "vespo"):
        found[f"grpo/loss_type={name}"] = grpo(f"{RATIO} {fresh} {BY_BATCH}", batch, how="coupled")
    for name in ("grpo", "sapo"):
        found[f"grpo/loss_type={name}"] = grpo(f"{RATIO} {fresh} {BY_ROW}", batch)
    return found


def verl() -> dict[str, Derived]:
    """kl_penalty is per token, without mask or sampler; "+" keeps the value and borrows k2's gradient.

    KL in the reward: outcome estimators give every token Σu, REMAX and its like Σ_{s≥t} u_s. Among n rollouts of a
    prompt, minus their mean leaves 1 − 1/n, minus the others' leaves all.
    """
    summed = "loss_agg_mode=seq-mean-token-sum"
    kinds = {
        "kl": (K1, ONE, ONE_STALE),
        "k1": (K1, ONE, ONE_STALE),
        "abs": ("|u| has the weight sign(u).", SIGN, None),
        "mse": (K2, LOG_RATIO, None),
        "k2": (K2, LOG_RATIO, None),
        "low_var_kl": (K3, INVERSE_RATIO, None),
        "k3": (K3, INVERSE_RATIO, None),
    }
    found = {f"kl_penalty/{name}": Derived(*derived, reduction="per-row") for name, derived in kinds.items()}
    for name in kinds:
        found[f"kl_penalty/{name}+"] = Derived(f"Its value with k2's gradient. {K2}", LOG_RATIO, reduction="per-row")
    batch, third = by_tokens(INVERSE_RATIO), by_tokens(WHOLE)
    found |= {
        "kl_loss/token-mean": Derived(f"{K3} {BY_BATCH}", batch, groups=UNEVEN, reduction="coupled"),
        "kl_loss/token-sum": Derived(f"{K3} Summed over tokens and rollouts.", INVERSE_RATIO, reduction="sum"),
        "kl_loss/seq-mean-token-sum": Derived(f"{K3} {SUMMED}", INVERSE_RATIO),
        "kl_loss/seq-mean-token-mean": Derived(f"{K3} {BY_ROW}", batch),
        "kl_loss/seq-mean-token-sum-norm": Derived(
            f"{K3} {BY_CONSTANT} It is the width of the batch: 1, and 3.", everywhere(INVERSE_RATIO, 1 / 3, 1)
        ),
        "ppo_loss/use_kl_loss": Derived(
            f"{K3} {BY_BATCH} The sampler's log-probs enter the policy loss only.",
            batch,
            **PAIRS,
        ),
        f"ppo_loss/kl_loss_type=k1+,{summed}": Derived(f"Its value with k2's gradient. {K2} {SUMMED}", LOG_RATIO),
    }

    def charged(why: str, current: Environments, groups: Environments, **more: Any) -> Derived:
        # Stale: log μ − log ref with each token's own ratio, clipped.
        stale = {"stale": dict.fromkeys(current), "stale_groups": dict.fromkeys(groups)}
        return Derived(f"{REWARD} {why}", current, groups=groups, **{"reduction": "coupled", **stale, **more})

    halved, alone = each({"reverse_kl": 0.5}), {"sequence": None}
    centred = "Of two rollouts' rewards half is their mean, which is taken off."
    others = "The other rollout's reward is taken off, which costs nothing."
    return found | {
        "kl_in_reward/remax": charged(BY_BATCH, third, UNEVEN),
        f"kl_in_reward/remax,{summed}": charged(SUMMED, WHOLE, {}, reduction="mean"),
        "kl_in_reward/rloo": charged(f"{others} {BY_BATCH}", third, third),
        f"kl_in_reward/rloo,{summed}": charged(
            f"{others} {SUMMED} Stale: log μ − log ref with each token's own ratio, clipped.", WHOLE, WHOLE
        ),
        f"kl_in_reward/grpo,norm_adv_by_std_in_grpo=False,{summed}": charged(f"{centred} {SUMMED}", WHOLE, halved),
        "kl_in_reward/gpg": charged(
            f"{centred} It multiplies by n over the number of rewards that are not 0. Of two binary rewards none is 0 "
            "once they are charged, and one is at β = 0 wherever they differ, which doubles the weight of the reward "
            f"there: the difference holds half of ∇E[R] more. {BY_BATCH}",
            third,
            {
                "bandit": {"reverse_kl": 0.5, "expected_reward": 0.5},
                "sequence": {"reverse_kl": 1 / 6, "expected_reward": 1 / 6},
                "ragged": None,
            },
        ),
        "kl_in_reward/opo": charged(
            f"{centred} (Weighted by lengths, which are equal.) {BY_BATCH}", third, by_tokens(halved)
        ),
        "kl_in_reward/grpo_passk": charged("The best rollout's alone, over a spread.", {}, NAMELESS),
        "kl_in_reward/gae": charged(f"{WHITENED} One token alone has no spread, which is an error.", alone, NAMELESS),
        "kl_in_reward/sequence-corrected": charged(
            f"Log-probs computed anew, so that it is log π − log ref. {others} {CHARGED}",
            *(WHOLE, WHOLE),
            **OFF_POLICY,
        ),
    }


def openrlhf() -> dict[str, Derived]:
    """compute_approx_kl makes float32 of its log-ratios; its unbiased gradient is sg(min(ρ, 10))·u·g for every kind.

    The KL in the reward is credited with Σ_{s≥t} u_s of its own, outside the baseline.
    """
    plain = {"k1": (K1, ONE, ONE_STALE), "k2": (K2, LOG_RATIO, None), "k3": (K3, INVERSE_RATIO, None)}
    unbiased = "The weight ρ·u on g, whatever the kind: the next token's reverse KL, at the prefixes of the sampler."
    found = {}
    for name, (why, current, stale) in plain.items():
        alone: dict[str, Any] = {"dtype": "float32", "reduction": "per-row", "lifted": True}
        found[f"compute_approx_kl/{name}"] = Derived(why, current, stale, **alone)
        found[f"compute_approx_kl/{name},unbiased_gradient"] = Derived(unbiased, LOG_RATIO, LOG_RATIO_STALE, **alone)
        loss: dict[str, Any] = {"dtype": "float32", "reduction": "coupled", "groups": UNEVEN}
        of_k1 = (f"{K1} {LENGTH}", NO_GRADIENT, NO_GRADIENT_STALE)
        divided = of_k1 if name == "k1" else (f"{why} {BY_BATCH}", by_tokens(current))
        found[f"kl_loss/{name}"] = Derived(*divided, **{**loss, **(OF_LENGTHS if name == "k1" else {})})
        found[f"kl_loss/{name},unbiased_gradient=True"] = Derived(
            f"{unbiased} {BY_BATCH}", by_tokens(LOG_RATIO), by_tokens(LOG_RATIO_STALE), **loss
        )

    def charged(
        why: str, groups: Environments, current: Environments | None = None, stale_groups: Environments | None = None
    ) -> Derived:
        alone = current or {}
        stale = (dict.fromkeys(alone), groups, stale_groups or dict.fromkeys(groups))
        return Derived(f"{why} Stale: log μ − log ref with clipped ratios.", alone, *stale, "float32", "coupled")

    third = by_tokens(WHOLE)
    alone_whitened = {"sequence": None, "ragged": None}
    one_token = "One token alone has no spread."
    credited = "E[Σ_{s≥t} c(u_s)·g] is ∇E[Σc] − E[c'(u)·g], summed over tokens"
    return found | {
        "kl_loss/k3,token_level_loss=False": Derived(f"{K3} {BY_ROW}", by_tokens(INVERSE_RATIO), dtype="float32"),
        "kl_in_reward/gae": charged(f"{WHITENED} {one_token}", NAMELESS, alone_whitened),
        "kl_in_reward/reinforce": charged(f"{WHITENED} {one_token}", NAMELESS, alone_whitened),
        "kl_in_reward/reinforce_baseline": charged(WHITENED, NAMELESS),
        "kl_in_reward/rloo": charged(f"{REWARD} {BY_BATCH}", third),
        "kl_in_reward/dr_grpo": charged(f"{REWARD} {BY_BATCH}", third),
        "kl_in_reward/group_norm": charged(f"{REWARD} Only the reward is divided by a spread. {BY_BATCH}", third),
        "kl_in_reward/flash_reinforce": charged(
            f"{REWARD} {BY_BATCH} The batch's mean reward is taken off, and a clip depends on the sign of the rest: "
            "with stale rollouts rows are coupled at any length.",
            *(UNEVEN, third, NAMELESS),
        ),
        "kl_in_reward/rloo,k2": charged(
            f"{credited}: for k2 ∇E[Σu²/2] − the next token's reverse KL. {BY_BATCH}",
            {
                "bandit": {"squared_log_ratio": 1.0, "reverse_kl": -1.0},
                "sequence": {"squared_log_ratio_sum": 1 / 3, "local_reverse_kl": -1 / 3},
                "ragged": None,
            },
        ),
        "kl_in_reward/rloo,k3": charged(
            f"{credited}: for k3, whose mean is the KL, ∇KL − the next token's forward KL. {BY_BATCH}",
            {
                "bandit": {"reverse_kl": 1.0, "forward_kl": -1.0},
                "sequence": {"reverse_kl": 1 / 3, "local_forward_kl": -1 / 3},
                "ragged": None,
            },
        ),
        "kl_loss/sequence": Derived(CHARGED, WHOLE, WHOLE, verdict="confirmed"),
    }


def liger() -> dict[str, Derived]:
    """k3_loss_fn, and ppo_loss_fn, whose KL part is k3 under each normalisation; fused it is the same in float32."""

    def whole(
        why: str,
        current: Environments,
        stale: Environments | None = None,
        how: str = "mean",
        dtype: str = "float64",
    ) -> Derived:
        return Derived(why, current, stale, UNEVEN if how == "coupled" else {}, None, dtype, how)

    loss = "ppo_loss_fn/loss_type="
    ratio, by_sequence = "use_bias_correction_kl=True", "importance_sampling_level=sequence"
    by_row = f"{K3} {BY_ROW}"
    constant = f"{BY_CONSTANT} It is given as 3."
    lengths = (
        "Weighted by the row's length over the mean one: summed over tokens where lengths are equal, else no name."
    )
    mean_of_k3, mean_of_ratio = by_tokens(INVERSE_RATIO), by_tokens(LOG_RATIO)
    mean_of_ratio_stale = by_tokens(LOG_RATIO_STALE)
    found = {
        "k3_loss_fn/log_p=ref_logp": Derived(K3, INVERSE_RATIO, reduction="per-row"),
        f"{loss}cispo": whole(
            f"{K3} {BY_BATCH} Its upper bound of 0.2 cuts every ratio off: nothing depends on the sampler.",
            mean_of_k3,
            how="coupled",
        ),
        "fused/loss_type=dapo": whole(f"{K3} {BY_BATCH}", mean_of_k3, how="coupled", dtype="float32"),
        f"{loss}dr_grpo": whole(f"{K3} {constant}", everywhere(INVERSE_RATIO, 1 / 3)),
        f"{loss}luspo": whole(f"{K3} {lengths}", scaled(INVERSE_RATIO, ragged=None)),
        f"{loss}luspo,{by_sequence}": whole(f"{K3} {lengths}", scaled(INVERSE_RATIO, ragged=None)),
        f"{loss}grpo,{by_sequence}": whole(f"The level is that of the policy loss. {by_row}", mean_of_k3),
        f"{loss}dapo,{ratio}": whole(f"{RATIO} {BY_BATCH}", mean_of_ratio, mean_of_ratio_stale, "coupled"),
        f"{loss}grpo,{ratio}": whole(f"{RATIO} {BY_ROW}", mean_of_ratio, mean_of_ratio_stale),
        f"{loss}dr_grpo,{ratio}": whole(
            f"{RATIO} {constant}", everywhere(LOG_RATIO, 1 / 3), everywhere(LOG_RATIO_STALE, 1 / 3)
        ),
        f"{loss}luspo,{ratio}": whole(
            f"{RATIO} {lengths}", scaled(LOG_RATIO, ragged=None), scaled(LOG_RATIO_STALE, ragged=None)
        ),
        f"{loss}luspo,{ratio},{by_sequence}": whole(f"{GEOMETRIC} {lengths}", MIXED, MIXED_STALE),
        "fused/loss_type=dr_grpo": whole(f"{K3} {constant}", everywhere(INVERSE_RATIO, 1 / 3), dtype="float32"),
        f"fused/loss_type=dr_grpo,{ratio}": whole(
            f"{RATIO} {constant}", everywhere(LOG_RATIO, 1 / 3), everywhere(LOG_RATIO_STALE, 1 / 3), dtype="float32"
        ),
        "fused/kl-in-advantages": Derived(CHARGED, WHOLE, WHOLE, dtype="float32", verdict="confirmed"),
    }
    for name in ("dapo", "bnpo", "vespo"):
        found[f"{loss}{name}"] = whole(f"{K3} {BY_BATCH}", mean_of_k3, how="coupled")
    for name in ("grpo", "sapo"):
        found[f"{loss}{name}"] = whole(by_row, mean_of_k3)
    return found


def torchrl() -> dict[str, Derived]:
    """The KL term of every loss is a mean over all positions, of padding too, whatever the policy loss does."""
    why = f"{K3} Averaged over all positions, padding too: 1/T, on ragged rows as well."
    current = scaled(INVERSE_RATIO, sequence=1 / 3, ragged=1 / 3)
    losses = (
        *("GRPOLoss", "DAPO", "CISPOLoss"),
        *("GRPOLoss,aggregation=prompt_mean", "GRPOLoss,aggregation=none"),
        *("GRPOLoss,masking_strategy=rlhf", "GRPOLoss,masking_strategy=generic", "GRPOLoss,entropy_bonus=False"),
    )
    return {
        **{f"loss/{name}": Derived(why, current, dtype="float32") for name in losses},
        "loss/GRPOLoss,kl_mask_threshold=0.1": Derived(
            f"{why} Tokens far from the sampler are dropped.", current, NAMELESS, dtype="float32"
        ),
        "kl_in_reward/KLComputation": Derived(
            f"{REWARD} Of stale rollouts, log μ − log ref = u − log π/μ without a ratio.",
            *(WHOLE, each({"reverse_kl@rollouts": 1.0, "to_sampler_kl@rollouts": -1.0})),
            reduction="per-row",
        ),
        "loss/SequenceKLGRPOLoss": Derived(CHARGED, WHOLE, WHOLE, dtype="float32", verdict="confirmed"),
    }


def tunix() -> dict[str, Derived]:
    """compute_kl_divergence per token, and grpo_loss_fn, whose default takes k1 and averages rows; float32 inside."""
    methods = {
        "low_var_kl": (K3, INVERSE_RATIO, None),
        "kl": (K1, ONE, ONE_STALE),
        "mse_kl": (K2, LOG_RATIO, None),
    }
    low: dict[str, Any] = {"dtype": "float32"}
    found = {
        f"compute_kl_divergence/{name}": Derived(*derived, reduction="per-row", **low)
        for name, derived in methods.items()
    }
    stale = "Without a ratio, stale rollouts weight it."
    mode = "grpo_loss_fn/kl_loss_mode=mse_kl"
    for name in ("GRPOConfig", "loss_algo=gspo-token"):
        found[f"grpo_loss_fn/{name}"] = Derived(f"{K1} {LENGTH}", NO_GRADIENT, NO_GRADIENT_STALE, **low)
    width = {**by_tokens(LOG_RATIO), "ragged": {"local_reverse_kl": 1 / 3}}
    return found | {
        mode: Derived(f"{K2} {stale} {BY_ROW}", by_tokens(LOG_RATIO), **low),
        "grpo_loss_fn/kl_loss_mode=low_var_kl": Derived(f"{K3} {BY_ROW}", by_tokens(INVERSE_RATIO), **low),
        f"{mode},loss_agg_mode=token-mean": Derived(
            f"{K2} {stale} {BY_BATCH}",
            by_tokens(LOG_RATIO),
            **{**PAIRS, **low},
        ),
        f"{mode},loss_agg_mode=sequence-mean-token-scale": Derived(
            f"{K2} {stale} {BY_CONSTANT} It is the width of the batch: 1, and 3.", width, **low
        ),
        f"{mode},loss_agg_mode=seq-mean-token-sum": Derived(f"{K2} {stale} {SUMMED}", LOG_RATIO, **low),
        f"{mode},loss_agg_mode=sequence-mean-token-sum-norm": Derived(f"{K2} {stale} {SUMMED}", LOG_RATIO, **low),
        "grpo_loss_fn/grpo-sequence-kl": Derived(CHARGED, WHOLE, WHOLE, verdict="confirmed", **low),
    }


def unsloth_zoo() -> dict[str, Derived]:
    """grpo_compute_loss with its own defaults: k3, by rows; the ratio multiplies it where that is asked for."""
    loss = "grpo_compute_loss/"
    ratio, by_sequence = "use_bias_correction_kl=True", "importance_sampling_level=sequence"
    batch = by_tokens(INVERSE_RATIO)
    whole = "max_completion_length, 8192 unless it is given."
    found = {
        f"{loss}{name}": Derived(f"{K3} {BY_ROW}", batch)
        for name in ("alone", "loss_type=sapo", by_sequence, "with_old=False")
    }
    for name in ("bnpo", "dapo", "cispo"):
        found[f"{loss}loss_type={name}"] = Derived(f"{K3} {BY_BATCH}", batch, **PAIRS)
    return found | {
        f"{loss}loss_type=luspo": Derived(f"{K3} {SUMMED}", INVERSE_RATIO),
        f"{loss}loss_type=dr_grpo": Derived(f"{K3} {BY_CONSTANT} {whole}", everywhere(INVERSE_RATIO, 1 / 8192)),
        f"{loss}loss_type=dr_grpo,max_completion_length=1": Derived(f"{K3} {BY_CONSTANT} {whole}", INVERSE_RATIO),
        f"{loss}{ratio}": Derived(f"{RATIO} {BY_ROW}", by_tokens(LOG_RATIO), by_tokens(LOG_RATIO_STALE)),
        f"{loss}{ratio},loss_type=luspo": Derived(f"{RATIO} {SUMMED}", LOG_RATIO, LOG_RATIO_STALE),
        f"{loss}{ratio},{by_sequence},loss_type=luspo": Derived(f"{GEOMETRIC} {SUMMED}", MIXED, MIXED_STALE),
        f"{loss}charged": Derived(CHARGED, WHOLE, WHOLE, verdict="confirmed"),
    }


LIBRARIES = {
    "trl": trl(),
    "verl": verl(),
    "openrlhf": openrlhf(),
    "liger": liger(),
    "torchrl": torchrl(),
    "tunix": tunix(),
    "unsloth-zoo": unsloth_zoo(),
}
DERIVED = {f"{library}:{name}": found for library, cases in LIBRARIES.items() for name, found in cases.items()}
"""By target, `library:setting`."""
