"""Effects of top-k heads, clamps, low precision and division by lengths on the gradient: the parts and their grids."""

from kltest.sweeps.settings import Settings

# What each part varies; it takes no notice of the other settings.
PARTS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "head": ("form", "k", "sharpness", "distance", "seed"),
    "prefixes": ("form", "seed"),
    "drift": ("k", "likely_mass"),
    "clamp": ("bound",),
    "lead": ("bound", "lead"),
    "return": ("penalty", "start"),
    "precision": {
        **{name: name for name in ("estimator", "kind", "rounded", "vocabulary", "log_ratio")},
        "seed": "draw",
    },
    "batch": ("normalised", "batch_size", "seed"),
    "lengths": ("seed",),
    "optimum": {"beta": "beta", "seed": "draw"},
}

SETTINGS = Settings(
    title="Approximations: top-k heads, clamps, precision, lengths",
    tags=("exact", "gradient", "training", "bandit", "ragged"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        # A head alone, and the two registered estimators that add a sampled tail to it.
        "form": ("head-alone", "top-k", "top-k-detached"),
        "k": (1, 2, 4, 8, 16, 32),
        # The policy's chances fall with the rank as rank^(−sharpness).
        "sharpness": (1.0, 2.0),
        # Standard deviation of the logits of the reference around those of the policy.
        "distance": (0.0, 0.03, 0.1, 0.3, 1.0),
        # The largest value that a clamped k3 lets through.
        "bound": (10.0,),
        # How much further than the others one token's logit has come from the reference.
        "lead": (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0),
        "penalty": ("k3-clamped", "k3-loss", "k2-loss"),
        "start": (8.0,),
        "estimator": ("k1-reward", "k2-loss", "k3-loss"),
        "kind": ("bfloat16", "float16", "float32"),
        # What is rounded: the log-probs that come in, or the log-ratio and all arithmetic after it.
        "rounded": ("log-probs", "arithmetic"),
        # Tokens: with so many a usual log-prob is −log V.
        "vocabulary": (64, 4096, 32_768),
        # Standard deviation of the log-ratio.
        "log_ratio": (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3),
        "normalised": ("token-mean", "whole-return"),
        "batch_size": (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        "beta": (0.7, 1.0, 1.5, 2.0),
        # Share of the eight likely tokens in drift.
        "likely_mass": 0.8,
        # Policies that are rounded, and references from which lengths are trained.
        "draw": 0,
    },
    full={
        "likely_mass": (0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.97),
        "draw": tuple(range(10)),
        "k": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32),
        "sharpness": (0.25, 0.5, 1.0, 1.5, 2.0),
        "distance": (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0),
        "bound": (2.0, 5.0, 10.0, 20.0),
        "start": (2.0, 4.0, 6.0, 8.0, 10.0),
        "vocabulary": (8, 64, 512, 4096, 32_768, 131_072),
        "beta": (0.5, 0.7, 1.0, 1.5, 2.0, 5.0),
    },
    seeds={"quick": 2, "full": 20},
    allowed={
        "k": (1, 32),
        "sharpness": (0.0, 4.0),
        "distance": (0.0, 3.0),
        "bound": (0.5, 100.0),
        "lead": (0.1, 15.0),
        "start": (0.5, 12.0),
        "vocabulary": (2, 262_144),
        "log_ratio": (1e-6, 2.0),
        "batch_size": (1, 100_000),
        "beta": (0.2, 100.0),
        "likely_mass": (0.5, 0.99),
        "draw": (0, 1000),
    },
)

# Heads: so many tokens. On prefixes: a vocabulary, a length, a head.
TOKENS = 32
PREFIXES = {"vocabulary": 4, "length": 3, "k": 2}

# Drift: no reward, from the reference. Eight likely tokens share half of the mass or more, the others what is left, so
# that a head of eight stays the likeliest after it lost a factor e; heads of other sizes cut through equal chances.
DRIFT = {"likely": 8, "steps": 400, "learning_rate": 8.0}

# Clamps: a reference of so many tokens with chances 1/rank, of which one runs ahead: the likeliest.
CLAMPED_TOKENS = 16
LOG_RATIOS = tuple(round(-8 + 0.25 * step, 2) for step in range(89))  # −8 … 14
RETURN = {"steps": 2000, "learning_rate": 1.0, "records": 60, "home": 0.01}

# Lengths: up to so many tokens of a vocabulary whose last token ends the rollout.
RAGGED = {"vocabulary": 2, "length": 4}
ENUMERATED_BATCHES = 4  # so large and no larger, all batches are called one by one as well
# A penalty of weight β bounds the step that is stable: the rate is divided by β where that is above 1.
OPTIMUM = {"vocabulary": 3, "length": 3, "steps": 5000, "learning_rate": 2.0}

# Two routes in float64 to sums of up to a few thousand terms of size one.
EXACT = 1e-11
