"""Which gradient every registered estimator follows: the grid."""

TITLE = "The atlas of estimators"

WORLDS = ("bandit", "sequence", "ragged", "mdp")
SAMPLERS = ("current", "stale")

# Each seed draws other policies and rewards: an identity that holds on one set of worlds holds on all.
SEEDS = {"quick": (0,), "full": (0, 1, 2, 3, 4)}

# Coefficients are identified to a residual of 1e-9; ten times that leaves room for the worlds' conditioning.
COEFFICIENT_TOLERANCE = 1e-8

# Below this the expected gradient is the target: float64 gives about 1e-14, every bias here is above 1e-3.
UNBIASED = 1e-9
