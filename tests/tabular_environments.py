"""Small environments with rewards, and policies that depend on time as tables of an environment unrolled in time."""

import numpy as np

from kltest.environments import END, Environment, Instance, bandit, mdp, ngram, ragged, sequence


def paid(make, *arguments, **options):
    shape = make(*arguments, **options).reward.shape
    return make(*arguments, **options, reward=np.random.default_rng(9).standard_normal(shape))


TREES = {
    "bandit": paid(bandit, 4),
    "bandits": paid(bandit, 3, prompts=np.array([0.3, 0.7])),
    "sequence": paid(sequence, 3, 3),
    "sequences": paid(sequence, 2, 3, prompts=np.array([0.25, 0.75])),
    "ragged": paid(ragged, 3, 4),
}
SHARED = {"mdp": mdp(4, 2, 3, seed=2), "ngram": paid(ngram, 2, 4, 2), "ngram-ragged": paid(ngram, 3, 3, 2, end_token=1)}


def unrolled(environment):
    """The same environment with a context of its own for every time step: context t·C + c."""
    steps, contexts = environment.horizon, environment.n_contexts
    successors = [
        np.where(environment.successors == END, END, environment.successors + (step + 1) * contexts)
        for step in range(steps)
    ]
    successors[-1] = np.full_like(environment.successors, END)
    surely = np.broadcast_to(np.eye(1, environment.branches), environment.probabilities.shape)
    probabilities = [environment.probabilities] * (steps - 1) + [surely]
    return Environment(
        name="unrolled",
        horizon=steps,
        start=environment.start,
        prompts=environment.prompts,
        successors=np.concatenate(successors),
        probabilities=np.concatenate(probabilities),
        reward=np.tile(environment.reward, (steps, 1)),
        tree=True,
    )


def reference_of(environment):
    return np.random.default_rng(4).standard_normal(environment.reward.shape)


def placed(environment, policy, reference):
    """An instance in which a policy that depends on time is a table."""
    if policy.ndim == 2:
        return Instance.of(environment, policy, reference)
    steps = environment.horizon
    return Instance.of(unrolled(environment), policy.reshape(-1, policy.shape[-1]), np.tile(reference, (steps, 1)))
