"""Follow the exact expected gradient of β·KL − E[R] for three KL terms on a sequence, and see where training ends.

The optimum is known: π* ∝ ref·exp(R/β). k1 in the reward reaches it; k3 in the loss ends somewhere else; k1 in the loss
has no gradient on fresh rollouts, so that nothing holds the policy.
"""

import numpy as np

from kltest.environments import Instance, sequence
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.truth import gradient, optimum, value

BETA, RATE, STEPS = 0.5, 8.0, 250
generator = np.random.default_rng(1)
environment = sequence(3, 2, reward=generator.uniform(size=(4, 3)))
reference = np.log(generator.dirichlet(np.full(3, 5.0), size=4))
best = optimum(environment, reference, BETA)


def distance(policy):
    """KL(π‖π*) over whole rollouts, in nats."""
    return value("kl", Instance.of(environment, policy, best.policy))


def end(name):
    """KL(π‖π*) after training with one estimator of the KL term."""
    loss, logits = resolve(name), reference
    for _ in range(STEPS):
        instance = Instance.of(environment, logits, reference)
        # Each of the three is a term of every rollout by itself: said, it need not be found out at every step.
        penalty = exact(loss, instance, known="per-row").gradient
        logits = logits + RATE * (gradient("expected_reward", instance) - BETA * penalty)
    return distance(logits)


ends = {name: end(name) for name in ("k1-reward", "k3-loss", "k1-loss")}
for name, nats in ends.items():
    print(f"{name:10} ends {nats:.2e} nats from the optimum")
assert ends["k1-reward"] < 1e-6 < ends["k3-loss"] < ends["k1-loss"]
