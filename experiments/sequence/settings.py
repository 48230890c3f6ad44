"""Share of ∇KL(π‖ref) that a token-level loss misses on sequences: the parts, and what each of them varies."""

from kltest.sweeps.settings import Settings

# What each part varies; it takes no notice of the other settings.
PARTS: dict[str, tuple[str, ...] | dict[str, str]] = {
    "length": ("length", "steering", "seed"),
    "vocabulary": ("vocabulary", "steering", "seed"),
    "estimators": {"length": "length", "estimator": "estimator", "seed": "draw"},
    "credit": ("steering", "seed"),
    "conditions": ("seed",),
    "root": ("estimator",),
    "field": ("length", "steering", "seed"),
    "circulation": {"seed": "draw"},
    "ends": ("seed",),
}

# Jacobians are worked out up to this length.
LONGEST_FIELD = 1000

SETTINGS = Settings(
    title="What a token-level loss misses on sequences",
    tags=("exact", "gradient", "sequence"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        "length": (1, 2, 5, 10, 30, 100, 300, 1000, 10_000),
        "vocabulary": (2, 4, 8, 16, 32, 64),
        "steering": (0.0, 0.5, 0.75, 0.9, 0.99),
        "estimator": ("k2-loss", "full-loss", "k3-loss", "k1-reward-immediate", "k1-reward-to-go"),
        # Policies and references for which estimators are judged, and rectangles.
        "draw": 0,
    },
    full={
        "draw": tuple(range(10)),
        "length": (1, 2, 3, 5, 10, 20, 30, 50, 100, 300, 1000, 3000, 10_000),
        "vocabulary": (2, 3, 4, 8, 16, 32, 64, 128),
        "steering": (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999),
    },
    seeds={"quick": 2, "full": 10},
    applies=lambda one: one["part"] != "field" or one["length"] <= LONGEST_FIELD,
    allowed={
        "length": (1, 10_000),
        "vocabulary": (2, 200),
        "steering": (0.0, 0.999),
        "draw": (0, 1000),
        "estimator": (
            *("k1-loss", "k2-loss", "k3-loss", "abs-loss", "full-loss", "k3-straight-through", "k3-inverted"),
            *("k1-reward", "k1-reward-to-go", "k1-reward-immediate", "k2-reward", "k3-reward"),
        ),
    },
)

# Where a part does not vary them.
VOCABULARY = 8
LENGTH = 100
STEERING = 0.9

# Credit: a discount γ from 0 to 1, and critics that know this share of the KL that is still to come.
CREDIT_LENGTH = 24
DISCOUNTS = (0.0, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
CRITICS = (0.0, 0.5, 0.9, 1.0)
ENUMERATED = {"vocabulary": 3, "length": 5}  # where generalised advantages are formed rollout by rollout as well

# Conditions: policies of whole prefixes, in an environment small enough to be enumerated.
CONDITIONS = ("both context-free", "policy context-free", "reference context-free", "relabelled", "neither")
PREFIXES = {"vocabulary": 3, "length": 4}

# The blind root: the chance p of the second token, and the KL d that awaits after it.
CHANCES = (0.1, 0.3, 0.5, 0.7, 0.9)
DEPARTURES = (0.1, 0.3, 0.6)  # below log 2, the most that a coin can differ from a fair one

# Circulation: corners of the first rectangle of two logits, the root's and the one after its second token; of others a
# side is 1 to 3 long.
CORNERS = ((-1.5, 1.0), (0.5, 2.5))

# Ends: training from several starts in an environment of whole prefixes.
ENDS = {"vocabulary": 2, "length": 3, "starts": 6, "beta": 1.0, "steps": 4000, "learning_rate": 3.0}

# Relative differences below this are rounding; what is called a difference is above 1e-3.
EXACT = 1e-10
