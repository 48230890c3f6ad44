"""An independent, slow route to the moments of a loss: one rollout and one backward pass at a time, through a table."""

import inspect
import itertools
import math
from collections import Counter
from functools import lru_cache

import numpy as np
import torch

from kltest.environments import END, Instance, bandit, mdp, ngram, ragged, sequence
from kltest.rollout import Rollout

PROMPTS = np.array([0.3, 0.7])
ENVIRONMENTS = {
    "bandit": bandit(4),
    "bandit with prompts": bandit(3, prompts=PROMPTS),
    "sequence": sequence(3, 3),
    "sequence with prompts": sequence(2, 3, prompts=PROMPTS),
    "ragged": ragged(3, 3),
    "ragged with prompts": ragged(3, 2, prompts=PROMPTS),
    "mdp": mdp(4, 2, 3),
    "ngram": ngram(2, 4, 2),
    "ragged ngram": ngram(3, 3, 2, end_token=1),
    "large table ngram": ngram(3, 3, 3),
}


def drawn(label, seed=0):
    """A random instance whose rewards differ."""
    environment = ENVIRONMENTS[label] if isinstance(label, str) else label
    object.__setattr__(environment, "reward", np.random.default_rng(7).standard_normal(environment.reward.shape))
    return Instance.draw(environment, seed)


def by_hand(environment):
    """All rollouts, one at a time: (prompt, [(context, token)], chance of all that is not the policy's choice)."""

    def go_on(context, steps, chance, prompt):
        for token in range(environment.vocabulary):
            taken = [*steps, (context, token)]
            if len(taken) == environment.horizon:
                yield prompt, taken, chance
                continue
            following = environment.successors[context, token], environment.probabilities[context, token]
            for after, likely in zip(*following, strict=True):
                if likely > 0 and after == END:
                    yield prompt, taken, chance * likely
                elif likely > 0:
                    yield from go_on(int(after), taken, chance * likely, prompt)

    for prompt, (context, chance) in enumerate(zip(environment.start, environment.prompts, strict=True)):
        if chance > 0:
            yield from go_on(int(context), [], chance, prompt)


def objective(function, fields):
    """Return what is differentiated of a function of fields: its scalar, or the mean over rows of sums over tokens."""
    parameters = inspect.signature(function).parameters
    answer = function(
        **{key: fields[key] for key, one in parameters.items() if key in fields or one.default is one.empty}
    )
    answer = answer[0] if isinstance(answer, tuple) else answer
    if answer.dim() == 2:
        answer = torch.where(fields["mask"] != 0, answer, 0.0).sum(dim=1)
    return answer.mean()


@lru_cache(maxsize=4)
def _fields(instance, sampler, padding):
    """All fields of every rollout; a copy of its rows is made for each batch."""
    given = Rollout.of(instance, sampler=sampler, padding=padding)
    return {name: given.peek(name) for name in given.names() if name not in ("beta", "rollout")}


def plain_batch(function, instance, rows, sampler="current", padding=0):
    """(C, V) gradient of a batch of rows with respect to the table of logits, by autograd through its log-softmax."""
    paths, rows = instance.paths, list(rows)
    logits = torch.from_numpy(instance.policy.copy()).requires_grad_()
    log_probs = logits.log_softmax(dim=1)
    contexts, tokens = torch.from_numpy(paths.contexts[rows]), torch.from_numpy(paths.tokens[rows])
    live = torch.from_numpy(paths.mask[rows])
    read = {*inspect.signature(function).parameters, "mask", "logp", "logits"}
    every = _fields(instance, sampler, padding)
    fields = {name: every[name][torch.tensor(rows)] for name in read & every.keys()}
    fields["logp"] = torch.where(live, log_probs[contexts, tokens], fields["logp"].detach())
    fields["logits"] = torch.where(live[..., None], log_probs[contexts], fields["logits"].detach())
    total = objective(function, fields)
    if not total.requires_grad:
        return np.zeros(instance.policy.shape)
    return torch.autograd.grad(total, logits)[0].numpy()


def plain(function, instance, sampler="current", padding=0):
    """E[ĝ] and E‖ĝ‖² of a batch of one rollout."""
    weights = np.exp(
        instance.paths.log_weight
        + [
            sum(instance.behaviour(sampler)[c, t] for c, t, m in zip(*row, strict=True) if m)
            for row in zip(instance.paths.contexts, instance.paths.tokens, instance.paths.mask, strict=True)
        ]
    )
    assert abs(weights.sum() - 1) < 1e-12
    each = [plain_batch(function, instance, [row], sampler, padding) for row in range(len(weights))]
    expected = sum(w * g for w, g in zip(weights, each, strict=True))
    return expected, sum(w * (g**2).sum() for w, g in zip(weights, each, strict=True)), each, weights


def every_batch(instance, size, sampler="current"):
    """All ordered batches, with their probabilities."""
    weights = instance.rollout_weights(sampler)
    for rows in itertools.product(range(len(weights)), repeat=size):
        yield rows, math.prod(weights[list(rows)])


def every_group(instance, size, sampler="current"):
    """All ordered groups of one prompt, with their probabilities."""
    paths, weights, prompts = instance.paths, instance.rollout_weights(sampler), instance.environment.prompts
    for prompt, share in enumerate(prompts):
        for rows in itertools.product(np.flatnonzero(paths.prompt == prompt).tolist(), repeat=size):
            yield rows, share * math.prod(weights[row] / share for row in rows)


def every_multiset(instance, size, sampler="current"):
    """All groups, their order aside: n!/(n₁!·n₂!·…) tuples each."""
    paths, weights, prompts = instance.paths, instance.rollout_weights(sampler), instance.environment.prompts
    for prompt, share in enumerate(prompts):
        rows = np.flatnonzero(paths.prompt == prompt)
        for group in itertools.combinations_with_replacement(rows.tolist(), size):
            orders = math.factorial(size) / math.prod(map(math.factorial, Counter(group).values()))
            yield list(group), orders * share * math.prod(weights[row] / share for row in group)


one_batch = lru_cache(maxsize=10_000)(plain_batch)


def moments_by_hand(function, instance, size, sampler="current", every=every_group):
    """E[ĝ] and E‖ĝ‖² with one backward pass through the table of logits for each batch."""
    expected, second = np.zeros(instance.policy.shape), 0.0
    for rows, chance in every(instance, size, sampler):
        found = one_batch(function, instance, tuple(rows), sampler)
        expected += chance * found
        second += chance * float((found**2).sum())
    return expected, second
