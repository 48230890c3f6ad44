"""Share that a token-level loss misses in stochastic MDPs: the parts, and what each varies."""

from kltest.sweeps.settings import Settings

# What each part varies; it takes no notice of the other settings.
PARTS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "environments": ("environment", "horizon", "slip", "seed"),
    "estimators": {"environment": "environment", "estimator": "estimator", "seed": "draw"},
    "picture": (),
    "length": ("beta", "reference"),
    "rotation": ("beta", "seed"),
}

# Of the coefficients, those for which random processes are looked at.
ROTATION_BETAS = (0.3, 1.0, 2.0)

SETTINGS = Settings(
    title="What a token-level loss misses in decision processes",
    tags=("exact", "gradient", "mdp"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        "environment": ("chain", "grid", "random"),
        "horizon": (1, 2, 4, 8, 16, 32, 64),
        "slip": (0.0, 0.25, 0.5, 0.75, 1.0),
        "estimator": ("k2-loss", "full-loss", "k3-loss", "k1-reward-immediate", "k1-reward-to-go", "k1-reward"),
        # Policies and references for which estimators are judged.
        "draw": 0,
        "beta": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 2.0),
        "reference": (0.02, 0.1),
    },
    full={
        "draw": tuple(range(10)),
        "horizon": (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256),
        "slip": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        "reference": (0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    },
    seeds={"quick": 3, "full": 20},
    applies=lambda one: one["part"] != "rotation" or one["beta"] in ROTATION_BETAS,
    allowed={
        "horizon": (1, 1000),
        "slip": (0.0, 1.0),
        "estimator": (
            *("k1-loss", "k2-loss", "k3-loss", "abs-loss", "full-loss", "k3-straight-through", "k3-inverted"),
            *("k1-reward", "k1-reward-to-go", "k1-reward-immediate", "k2-reward", "k3-reward"),
        ),
        "draw": (0, 1000),
        "beta": (0.2, 10.0),
        "reference": (0.001, 0.9),
    },
)

# The environments. An action that slips is one that was drawn uniformly.
CHAIN = 9  # states in a row: left, stay or right
GRID = (5, 4)  # columns, rows: right, up, left or down, or where one is at a wall
RANDOM = {"states": 12, "actions": 3, "branches": 3}
# Policy and reference have independent normal logits of these standard deviations around a common table.
SPREAD = {"common": 0.7, "own": 0.7}
# Rollouts are enumerated as well, and the estimators judged, up to this horizon and with this slip.
ENUMERATED = {"horizon": 4, "slip": 0.25, "most": 200_000}

# The picture: where the reference drifts to the right, and the policy departs from it around a coin only.
PICTURE = {"columns": 9, "rows": 5, "horizon": 14, "slip": 0.1, "drift": 1.0, "coin": (6, 3), "pull": 2.0}

# Length: at every step one goes on, which pays 1, or stops; a step that goes on leads on with this chance.
CONTINUES = 0.9
STEPS = 350  # 0.9^350 is 1e-16: nothing is left of a rollout by then

# Rotation: random processes of this size, this many for each seed, all of them ended with chance 1 − CONTINUES a step.
ROTATION = {"states": 3, "actions": 3, "branches": 2, "environments": 12}

# Relative differences below this are rounding.
EXACT = 1e-10
