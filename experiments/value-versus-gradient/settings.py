"""Schulman's Gaussians: how far apart, how wide, how many samples."""

from kltest.sweeps.settings import Settings

ESTIMATORS = ("k1-loss", "k2-loss", "k3-loss")
PLACEMENTS = ("loss", "reward", "both")

SETTINGS = Settings(
    title="The best value is not the best gradient",
    tags=("exact", "sampled", "value", "gradient", "variance"),
    values={
        "estimator": ESTIMATORS,
        # Schulman's two levels, one between them and one beyond.
        "kl": (0.005, 0.05, 0.5, 1.0),
        # Standard deviation of the policy, that of the reference being 1: Schulman's, narrower, wider.
        "width": (1.0, 0.8, 1.25),
        "samples": 2**18,
    },
    full={
        "kl": (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 0.75, 1.0),
        "width": (1.0, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0),
        "samples": 2**20,
    },
    seeds={"quick": 1, "full": 5},
    # Narrower than 0.8, and the integrals that the registered functions are put into want a longer line.
    allowed={"estimator": ESTIMATORS, "kl": (1e-4, 1.5), "width": (0.8, 2.0), "samples": (2**10, 2**24)},
)

# Sample sizes at which the error of the value is also measured.
SIZES = (1, 4, 16, 64, 256, 1024)

# How the policy may leave the reference: by its mean, or by its width alone.
DIRECTIONS = ("shifted", "narrower", "wider")
# Which is compared with which, and in what: the mean squared error of one sample, or the variance alone.
ORDERS = (("k2-loss", "k1-loss", "error"), ("k3-loss", "k1-loss", "error"), ("k2-loss", "k1-loss", "variance"))
