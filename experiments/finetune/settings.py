"""A language model under five KL terms: what is swept, what each run is, and which sweep is kept beside this file."""

from collections.abc import Mapping
from typing import Any

from kltest.sweeps.settings import Settings

# What each variant sets, under the names of `kltest finetune --set`. With four updates for the rollouts of one sampler,
# a quarter of the rounds gives as many updates.
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"kl": "none"},
    "k1-reward": {"kl": "k1-reward"},
    # An eighth of the learning rate below.
    "slow:k1-reward": {"kl": "k1-reward", "learning_rate": 5e-5},
    # A baseline on the penalty as well as on the reward.
    "leave-one-out": {"kl": "leave-one-out"},
    "k2-loss": {"kl": "k2-loss"},
    "k3-loss": {"kl": "k3-loss"},
    "k1-loss": {"kl": "k1-loss"},
    "stale:none": {"kl": "none", "inner_epochs": 4},
    "stale:k2-loss": {"kl": "k2-loss", "inner_epochs": 4},
    "stale:k3-ratio": {"kl": "k3-ratio", "inner_epochs": 4},
    # No run: π*, from the reference's chances of a reward.
    "optimum": {},
}
OPTIMUM = "optimum"
# With smaller coefficients π* depends on how rare the rarest rewards are, which no sample tells. What is
# noise shows where there is least to gain.
LEAST_BETA = {OPTIMUM: 0.3, "slow:k1-reward": 1.0, "leave-one-out": 1.0}
BETAS = (0.03, 0.1, 0.3, 1.0)
# The coefficient at which gradients are measured along the run; each measurement takes a good part of a run's time.
BETA_OF_GRADIENTS = 0.1

# What holds for every run beside the settings below; all else is the runner's default.
RUN: Mapping[str, Any] = {
    "max_norm": 1.0,
    "warmup": 5,
    "checkpoint_every": 0,
    "gradient_chunks": 8,
    "gradient_batches": 4,
    "threads": 1,
}

# Settings that are the same in all runs of a sweep: those of the committed one, which holds no column of them.
SAME: Mapping[str, Any] = {
    "model": "tiny:0.2M",
    "task": "addition:2",
    # Held-out reward at which the reference of a tiny model stops learning.
    "reference_reward": 0.3,
    "updates": 64,
    "prompts": 16,
    "group_size": 4,
    "learning_rate": 4e-4,
    "eval_prompts": 256,
    "device": "cpu",
    "dtype": "float32",
}
PARTS = {
    # Runs made now: a few at quick scale, all of them at full.
    "run": ("seed", "variant", "beta", *SAME),
    # What was found when all of them were made: sweep.csv.
    "committed": (),
}
# Of the committed sweep. To renew it: `kltest run finetune --scale full`, then copy results/finetune/sweep.csv here.
COMMITTED: Mapping[str, str] = {
    "date": "2026-11-21",
    "revision": "06df276",
    "torch": "2.13.0",
    "transformers": "5.23.0",
}


def applies(configuration: Mapping[str, Any]) -> bool:
    """Without a KL term there is no coefficient, and with one there is."""
    if configuration["part"] != "run":
        return True
    variant, beta = configuration["variant"], configuration["beta"]
    return variant.endswith("none") == (beta == 0) and beta >= LEAST_BETA.get(variant, 0.0)


SETTINGS = Settings(
    title="A language model fine-tuned under five KL terms",
    tags=("sampled", "training", "gradient", "off-policy", "language model"),
    parts=PARTS,
    values={
        "part": tuple(PARTS),
        "variant": ("none", "k1-reward", "k1-loss", "stale:k3-ratio", OPTIMUM),
        "beta": (0.0, 0.3),
        **SAME,
    },
    full={"variant": tuple(VARIANTS), "beta": (0.0, *BETAS)},
    seeds={"quick": 1, "full": 5},
    allowed={
        "variant": tuple(VARIANTS),
        "beta": (0.0, 100.0),
        "model": ("tiny:0.2M", "tiny:1M", "tiny:5M", "tiny:20M", "tiny:100M"),
        "task": ("addition:1", "addition:2", "addition:3", "addition:4", "countdown"),
        "reference_reward": (0.0, 1.0),
        "updates": (16, 1_000_000),
        "prompts": (1, 4096),
        "group_size": (2, 4096),
        "learning_rate": (0.0, 1.0),
        "eval_prompts": (2, 100_000),
        "device": ("auto", "cpu", "cuda"),
        "dtype": ("float32", "bfloat16"),
    },
    applies=applies,
    recorded=True,
)
