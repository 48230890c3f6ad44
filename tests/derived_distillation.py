"""The gradients of libraries' distillation losses, worked out by hand from their source before they were measured.

The reference is the teacher, of which a support has the k likeliest tokens; own, the student's own k. A divergence of
next-token distributions that is differentiated follows its own name, at the prefixes of whatever sampler.
"""

from typing import Any

from derived import (
    BY_BATCH,
    BY_ROW,
    INVERSE_RATIO,
    K2,
    K3,
    LOG_RATIO,
    NAMELESS,
    UNEVEN,
    Derived,
    Environments,
    by_tokens,
    each,
    everywhere,
    local,
    uncorrected,
)

FULL = "The divergence of the whole next-token distribution, differentiated: at the prefixes of whatever sampler."
RENORMALISED = "Both distributions are made anew on the support, where they sum to 1."
TAIL = "All other tokens are one, the tail."
IN_ADVANTAGE = "u of its own token in the advantage of each: the next token's reverse KL."
CLIPPED = "Stale, ratios are clipped: no name."
NO_RATIO = "u, detached, times log π: the weight u on g, and no ratio."
LOW: dict[str, Any] = {"dtype": "float32"}
COUPLED: dict[str, Any] = {"groups": UNEVEN, "reduction": "coupled"}
Pair = tuple[Environments, Environments]


def divergence(*names: str, factor: float = 1.0) -> Pair:
    """A sum of divergences of next-token distributions, fresh and stale, where one step has the same name."""
    fresh = each({f"local_{name}": factor for name in names})
    stale = each({f"local_{name}@sampler": factor for name in names})
    return fresh, {**stale, "bandit": fresh["bandit"]}


def kl(*names: str, factor: float = 1.0) -> Pair:
    """The same of whole KLs, which have the sequence's name where there is one step."""
    fresh, stale = divergence(*names, factor=factor)
    one: dict[str, Any] = {"bandit": dict.fromkeys(names, factor)}
    return {**fresh, **one}, {**stale, **one}


REVERSE, FORWARD, JENSEN_SHANNON = kl("reverse_kl"), kl("forward_kl"), divergence("jensen_shannon")
UNNAMED: Pair = NAMELESS, NAMELESS


def by_batch(why: str, pair: Pair, **more: Any) -> Derived:
    """Over the live tokens of the batch."""
    fresh, stale = map(by_tokens, pair)
    return Derived(f"{why} {BY_BATCH}", fresh, stale, **{**COUPLED, **more})


def by_row(why: str, pair: Pair, **more: Any) -> Derived:
    """Over the tokens of each row."""
    fresh, stale = map(by_tokens, pair)
    return Derived(f"{why} {BY_ROW}", fresh, stale, **more)


def generalised(named: str, default: Pair = JENSEN_SHANNON, **more: Any) -> dict[str, Derived]:
    """KL(teacher‖student) at 0, KL(student‖teacher) at 1, between them the Jensen-Shannon divergence."""
    return {
        f"{named}/defaults": by_batch(f"The divergence of the default weight. {FULL}", default, **more),
        f"{named}/beta=0": by_batch(f"KL(ref‖π). {FULL}", FORWARD, **more),
        f"{named}/beta=1": by_batch(f"KL(π‖ref). {FULL}", REVERSE, **more),
    }


def trl() -> dict[str, Derived]:
    """Trainers that distil. Supports are the teacher's if the KL is forward, the student's own if it is reverse."""
    sampled = (
        "The support is the sampled token, the tail all others. π(a) is differentiated, so that g has the weight "
        "π·(log π/ref − log (1−π)/(1−ref)), which is ∇KL(π‖ref) where there are two tokens, and has no name elsewhere."
    )
    distillation = generalised("distillation", REVERSE, **LOW)
    distillation["distillation/beta=0.5"] = by_batch(f"Half of each. {FULL}", JENSEN_SHANNON, **LOW)
    del distillation["distillation/beta=1"]
    iw_opd = f"{NO_RATIO} It is multiplied by 1.5 less half of the share of Σ|u| before the token: 1.5 of one token."
    # `iw_opd` with another objective.
    jsd = "iw_opd/distillation_objective=jsd"
    return {
        **generalised("gkd"),
        "gold/defaults": by_batch(f"At the temperature of generation. {FULL}", JENSEN_SHANNON),
        **distillation,
        "server_distillation/defaults": by_batch(sampled, UNNAMED),
        "server_distillation/beta=0,topk=2": by_batch(f"Of the teacher. {TAIL}", divergence("forward_kl_top2_tail")),
        "iw_opd/defaults": Derived(
            f"{iw_opd} {BY_BATCH}",
            {"bandit": {"reverse_kl": 1.5}, "sequence": None, "ragged": None},
            {"bandit": {"reverse_kl@rollouts": 1.5}, "sequence": None, "ragged": None},
            **COUPLED,
        ),
        f"{jsd},beta=1,topk=2": by_batch(f"Of the student. {TAIL}", divergence("reverse_kl_own2_tail")),
        f"{jsd},beta=1,topk=2,loss_add_tail=False": by_batch(
            f"Of the student. {RENORMALISED}", divergence("reverse_kl_own2_renormalised")
        ),
        "sdft/defaults": by_row(f"Jensen-Shannon's on the student's support. {RENORMALISED}", UNNAMED),
        "sdft/alpha=1": by_row(f"Of the student. {RENORMALISED}", divergence("reverse_kl_own2_renormalised")),
        "sdft/alpha=1,distillation_add_tail=True": by_row(
            f"Of the student. {TAIL}", divergence("reverse_kl_own2_tail")
        ),
        "sdpo/defaults": by_row(NO_RATIO, (LOG_RATIO, uncorrected(LOG_RATIO))),
    }


def verl() -> dict[str, Derived]:
    """An estimator of the sampled token, or the teacher's top k, as a loss or as minus an advantage."""
    mode, reward = "distillation/loss_mode", "use_policy_gradient=True"
    differs: Environments = {
        **everywhere({**local("reverse_kl"), "sequence": {"local_reverse_kl": 1.0, "local_forward_kl": -1.0}}, 1.0),
        "bandit": {"reverse_kl": 1.0, "forward_kl": -1.0},
    }
    clamped = (
        "Σ ref·log(ref/π) of the teacher's top k, clamped at zero where the student has more of its mass, as some "
        "distributions of sequences have: no name. Those of single tokens, which are a few, have not."
    )
    truncated: Environments = {**NAMELESS, "bandit": {"local_forward_kl_top2": 1.0}}
    return {
        "distillation/defaults": by_batch(K3, (INVERSE_RATIO, uncorrected(INVERSE_RATIO))),
        f"{mode}=k2": by_batch(K2, (LOG_RATIO, uncorrected(LOG_RATIO))),
        f"{mode}=k1,{reward}": by_batch(f"{IN_ADVANTAGE} {CLIPPED}", (LOG_RATIO, NAMELESS)),
        f"{mode}=k3,{reward}": by_batch(
            f"k3 = w − 1 + u in the advantage: E[u·g] − ∇KL(ref‖π), as E[w·g] = −∇KL(ref‖π). {CLIPPED}",
            (differs, NAMELESS),
        ),
        f"{mode}=forward_kl_topk,topk=2": by_batch(clamped, (truncated, truncated), **LOW),
        f"{mode}=forward_kl_topk,topk=2,{reward}": Derived(
            "A number that does not depend on the sampled token in its advantage: E[g] = 0, but for its division by "
            f"lengths. {CLIPPED}",
            {**each({"zero": 1.0}), "ragged": None},
            NAMELESS,
            **COUPLED,
            **LOW,
        ),
    }


def nemo_rl() -> dict[str, Derived]:
    """The teacher's top k, renormalised on both sides unless what is outside is set to e^−100; in float32."""

    support = ("forward_kl_top2_renormalised", "reverse_kl_top2_renormalised")
    outside = "distillation/zero_outside_topk=True"
    stale: Environments = {**NAMELESS, "bandit": {"reverse_kl@rollouts": 1.0, "to_sampler_kl@rollouts": -1.0}}
    return {
        "distillation/defaults": by_batch(f"Half of each KL. {RENORMALISED}", divergence(*support, factor=0.5), **LOW),
        "distillation/kl_type=forward": by_batch(RENORMALISED, divergence(support[0]), **LOW),
        "distillation/kl_type=reverse": by_batch(RENORMALISED, divergence(support[1]), **LOW),
        f"{outside},kl_type=forward": by_batch(
            "The teacher alone is renormalised: −Σ ref·log π over its mass.", UNNAMED, **LOW
        ),
        f"{outside},kl_type=reverse": by_batch(
            "The teacher is renormalised and e^−100 elsewhere: 100 times the student's mass outside outweighs all.",
            UNNAMED,
            **LOW,
        ),
        "opd/defaults": Derived(
            "log ref − log μ in the advantage, on log π alone: on-policy u of its own token. Stale, log μ − log ref "
            f"without a ratio. {BY_BATCH} 1e-8 in the denominator couples rows, in the tenth digit.",
            by_tokens(LOG_RATIO),
            stale,
            by_tokens(LOG_RATIO),
            stale,
            reduction="coupled",
        ),
    }


def torchtune() -> dict[str, Derived]:
    """KLs of whole next-token distributions, in float32; those in chunks are the same."""
    one: dict[str, Pair] = {
        "Forward": FORWARD,
        "Reverse": REVERSE,
        "Symmetric": kl("reverse_kl", "forward_kl", factor=0.5),
    }
    return {
        f"distillation/loss={name}KL{form}": by_batch(FULL, pair, **LOW)
        for name, pair in one.items()
        for form in ("Loss", "WithChunkedOutputLoss")
    }


def roll() -> dict[str, Derived]:
    """Divergences over the teacher's top k, which are renormalised on both sides, or over all tokens."""
    alone: dict[str, Any] = {"reduction": "per-row", **LOW}
    support = f"{RENORMALISED} Of the teacher."
    found: dict[str, Pair] = {
        "forward_kl": FORWARD,
        "reverse_kl": REVERSE,
        "skewed_forward_kl": divergence("skewed_forward_kl10"),
        "skewed_reverse_kl": divergence("skewed_reverse_kl10"),
        "js_divergence": JENSEN_SHANNON,
        # A mixture of both KLs whose weights, held, depend on the prefix.
        "adaptive_kl": UNNAMED,
    }
    whole = {f"distillation/{kind},topk=0": Derived(FULL, *pair, **alone) for kind, pair in found.items()}
    return {
        "distillation/defaults": Derived(support, *divergence("forward_kl_top2_renormalised"), **alone),
        "distillation/reverse_kl": Derived(support, *divergence("reverse_kl_top2_renormalised"), **alone),
        **whole,
        "opd/defaults": by_row(
            f"{IN_ADVANTAGE} {CLIPPED}",
            (LOG_RATIO, NAMELESS),
            **LOW,
        ),
    }


def tinker_cookbook() -> dict[str, Derived]:
    """Self-distillation on the teacher's top k, or with the sampled token's log-ratio as advantage; sums."""
    fresh_and_not = {"reverse_kl": 1.0, "to_sampler_kl": -1.0}
    return {
        "sdft/defaults": Derived(
            "Cross entropy to the renormalised teacher: −Σ ref·log π over the teacher's mass, which differs by prefix.",
            *UNNAMED,
            reduction="sum",
            **LOW,
        ),
        "sdft/reverse=True": Derived(
            f"Of the teacher. {RENORMALISED} The bracket is held, as its own gradient sums to 0.",
            *divergence("reverse_kl_top2_renormalised"),
            reduction="sum",
            **LOW,
        ),
        "sdft/topk=0": Derived(
            f"{IN_ADVANTAGE} Stale, log μ − log ref with the token's own ratio.",
            LOG_RATIO,
            {"bandit": fresh_and_not, "sequence": None, "ragged": None},
            reduction="sum",
            **LOW,
        ),
    }


LIBRARIES = {
    "trl": trl(),
    "verl": verl(),
    "liger": generalised("distillation", **LOW),
    "nemo-rl": nemo_rl(),
    "torchtune": torchtune(),
    "roll": roll(),
    "tinker-cookbook": tinker_cookbook(),
}
DISTILLED = {f"{library}:{name}": found for library, cases in LIBRARIES.items() for name, found in cases.items()}
"""By target, `library:setting`."""
