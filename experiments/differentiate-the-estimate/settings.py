"""One step: two worked examples, and policies at growing distances from their reference."""

from kltest.sweeps.settings import Settings

# π and ref; Tang & Munos 2025 use the first, the second is the smallest in which a sign turns visibly.
EXAMPLES = {"binary": ((0.8, 0.2), (0.5, 0.5)), "four actions": ((0.4, 0.3, 0.2, 0.1), (0.1, 0.2, 0.3, 0.4))}

# Which of the registered estimators are followed over distances; the examples have all of one step.
FOLLOWED = ("k1-loss", "k2-loss", "k3-loss", "k3-inverted", "abs-loss", "k2-reward", "k3-reward", "top-k")
MORE = ("k1-reward", "k3-both", "full-loss", "k3-clamped", "k3-straight-through", "top-k-detached")

# How a policy leaves its reference: π ∝ ref·e^(t·d), with t such that KL(π‖ref) is what it should be and d random;
# the log-probs of the reference, so that the policy sharpens; or one action alone, the reference's least likely taken
# up or its likeliest dropped.
PATHS = ("random", "sharpened", "taken up", "dropped")
# The other paths are for those whose direction or size is in question there.
EVERYWHERE = ("k2-loss", "k3-loss", "k3-reward", "abs-loss")

SETTINGS = Settings(
    title="Differentiating an estimate of the value",
    tags=("exact", "gradient", "bias", "one-step"),
    values={
        "estimator": FOLLOWED,
        "vocabulary": (2, 4, 32, 128),
        "path": PATHS,
        # Random references, and directions.
        "pairs": 100,
    },
    full={"estimator": FOLLOWED + MORE, "vocabulary": (2, 3, 4, 8, 32, 128, 512), "pairs": 200},
    seeds={"quick": 1, "full": 2},
    allowed={"estimator": FOLLOWED + MORE, "vocabulary": (2, 2048), "path": PATHS, "pairs": (2, 1000)},
    applies=lambda one: one["path"] == "random" or one["estimator"] in EVERYWHERE,
)

# Half decades of KL(π‖ref).
LEVELS = tuple(float(f"{10 ** (power / 2):.3g}") for power in range(-12, 2))
# Probabilities of the first action at which the binary example is drawn, its reference being ½.
PROBABILITIES = tuple(round(0.025 * step, 3) for step in range(1, 40))
QUANTILES = (0.1, 0.5, 0.9)
