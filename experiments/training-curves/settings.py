"""Training curves: the environments, the gradients that are trained with, and what is held constant."""

from kltest.sweeps.settings import Settings

# The gradient of the penalty that each estimator is an example of, and what the paper calls it.
GRADIENTS = {
    "none": "no penalty",
    "k1-loss": "naive: k1 differentiated",
    "k3-loss": "naive: k3 differentiated",
    "k1-reward-immediate": "partial: each token's own KL",
    "last-token": "last token",
    "k1-reward": "correct: whole rollouts",
}
CORRECT, PARTIAL = "k1-reward", "k1-reward-immediate"

# Logits of references and rewards are normal; returns have a standard deviation of about one.
VOCABULARY, LENGTH = 3, 4
ARMS = 6
STATES, ACTIONS, STEPS = 5, 3, 4
SPREAD = 1.0

SETTINGS = Settings(
    title="Training curves: naive, partial, last-token and correct gradients",
    tags=("exact", "sampled", "training"),
    values={
        "environment": ("bandit", "sequence", "mdp"),
        "estimator": tuple(GRADIENTS),
        "beta": 0.5,
        "learning_rate": 0.5,
        "batch_size": 16,
        # Updates, and how many lie between two measurements.
        "updates": 400,
        "every": 20,
        # Sampled runs of one draw of the environment.
        "runs": 16,
    },
    full={"runs": 64, "every": 10},
    seeds={"quick": 3, "full": 10},
    allowed={
        "beta": (0.001, 1000.0),
        "learning_rate": (1e-4, 10.0),
        "batch_size": (1, 4096),
        "updates": (1, 100_000),
        "every": (1, 10_000),
        "runs": (2, 10_000),
    },
)
