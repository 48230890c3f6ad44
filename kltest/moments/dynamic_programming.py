"""Expected gradients by dynamic programming: exact even if rollouts are too many or too long to be enumerated.

This is for losses whose term for a token depends on that token's fields alone. Every (context, token) pair is a rollout
of length 1. One call of the loss on all pairs gives two tables: h(c, v), the derivative of the term at the token's
log-probs, and, for a term placed in the reward, the detached cost k(c, v). With the visits d_t of the policy that draws
the rollouts, E[A(c, v)]/π(v|c) is

    loss: Σ_t d_t·h    immediate: Σ_t d_t·k    to-go: Σ_t d_t·E[Σ_{s≥t} k_s]    return: to-go plus earlier costs.

Earlier costs vanish in the gradient if rollouts are drawn from the policy itself.
"""

from dataclasses import dataclass
from math import isqrt

import numpy as np

from kltest.environments import Instance, OfSome, Tree
from kltest.environments.paths import Level
from kltest.environments.policies import score_norms, softmax_gradient
from kltest.errors import InvalidEnvironmentError, KltestError, UsageError
from kltest.loss.calling import Loss
from kltest.moments.differentiate import RowGradients, differentiate
from kltest.moments.moments import Expectation, ExpectedGradient, Moments, Reduction
from kltest.moments.reduction import probe
from kltest.moments.tolerances import near
from kltest.rollout import Rollout
from kltest.truth.recursions import backwards, earlier, forward, future, start, total_visits

# Numbers in the largest field of one call, few enough to stay in the processor's cache.
CHUNK = 2**17
# Rollouts on which the table is compared with what the loss does to whole rollouts.
WITNESSES = 8
# Contexts of an environment in which rollouts may come back to one: the visits between all pairs are a table.
FEW_CONTEXTS = 200
# Bytes that the visits between all pairs of contexts may take.
MEMORY = 2**28


@dataclass(frozen=True, kw_only=True)
class Expected(ExpectedGradient):
    """Expected gradient of a batch of one rollout.

    Attributes:
        cost: (C, V) the returned value ℓ of a token in a context.
        value: E[Σ_t ℓ_t].
        second_moment: E‖ĝ‖², None if it was not requested.
    """

    cost: np.ndarray
    value: float
    second_moment: float | None = None

    @property
    def variance(self) -> float | None:
        """Trace of the covariance of the gradient of one rollout, None if it was not requested."""
        if self.second_moment is None:
            return None
        return max(self.second_moment - float((self.gradient**2).sum()), 0.0)


@dataclass(frozen=True)
class Pairs:
    """Tables (C, V) of a loss over contexts and tokens: gradients (`full`: at all next tokens) and cost."""

    sampled: np.ndarray
    full: np.ndarray | None
    cost: np.ndarray
    reduction: Reduction
    dtype: str
    leaves: frozenset[str]


def dynamic(
    loss: Loss, instance: Instance, sampler: str = "current", *, variance: bool = False, padding: int = 0, seed: int = 0
) -> Expected:
    """Exact E[ĝ] of a batch of one rollout, without enumerating rollouts.

    Args:
        loss: A loss that depends on each token's own fields only.
        instance: Environment with policy, reference and sampler, C contexts and V tokens.
        sampler: "current" draws rollouts from the policy, "stale" from the sampler.
        variance: True for E‖ĝ‖² as well. The loss must read log-probs of sampled tokens only, and be placed in the
            loss: a cost in the reward ties a token to other tokens.
        padding: Seed of what stands at padded positions.
        seed: Seed of the rollouts on which the loss is tried.

    Returns:
        The expected gradient with respect to logits (C, V), and the expected value in nats.

    Raises:
        UsageError: The loss was seen to depend on more than each token's own fields, couples or sums rows, or returns
            no number a token; or its variance cannot be computed in this way.
        TargetError: The loss fails, or its gradient is not finite.
        InvalidEnvironmentError: `variance` needs visits between too many contexts.
    """
    return _expected(
        loss,
        instance,
        sampler,
        total_visits(instance.environment, instance.behaviour(sampler)),
        variance,
        padding,
        seed,
    )


def _expected(
    loss: Loss, instance: Instance, sampler: str, total: np.ndarray, variance: bool, padding: int, seed: int
) -> Expected:
    """The same from the expected visits (C,) of each context."""
    pairs = call_on_pairs(loss, instance, sampler, padding, seed)
    compare(loss, instance, sampler, padding, seed)
    environment, behaviour = instance.environment, instance.behaviour(sampler)
    chances, visits = np.exp(behaviour), total[:, None]
    table = visits * chances * pairs.sampled
    if pairs.full is not None:
        table += visits * pairs.full
    if loss.placement != "loss":
        charged = visits * pairs.cost
        if loss.credit != "immediate":
            charged += future(environment, behaviour, pairs.cost)[0]
        if loss.credit == "return" and sampler != "current":
            charged += earlier(environment, behaviour, pairs.cost)
        table += chances * charged
    second = None
    if variance:
        if loss.placement != "loss" or pairs.full is not None:
            raise UsageError(f"dynamic programming cannot compute the variance of {loss.name}: enumerate rollouts")
        second = second_moment(instance, behaviour, visits, pairs.sampled)
    return Expected(
        gradient=softmax_gradient(table, instance.policy),
        reduction=pairs.reduction,
        dtype=pairs.dtype,
        leaves=pairs.leaves,
        cost=pairs.cost,
        value=float((visits * chances * pairs.cost).sum()),
        second_moment=second,
    )


def _pairs(instance: Instance, cells: np.ndarray) -> Tree:
    """Rollouts of length 1: token v in context c for each cell c·V + v."""
    level = Level(slice(0, 1), cells[:, None], 1, None)
    return Tree((level,), instance.environment.vocabulary, np.zeros(len(cells), dtype=np.int64), np.zeros(len(cells)))


def call_on_pairs(loss: Loss, instance: Instance, sampler: str, padding: int, seed: int) -> Pairs:
    """Call a loss on every pair of context and token; UsageError if it couples or sums the rows of a batch."""
    contexts, vocabulary = instance.policy.shape
    generator = np.random.default_rng([seed, contexts])
    cells = np.arange(contexts * vocabulary)
    some = _pairs(instance, generator.choice(cells, size=min(len(cells), 4), replace=False))
    caller = probe(loss, Rollout.of(instance, some, sampler=sampler, padding=padding), generator)
    if caller.reduction == "coupled":
        raise UsageError(f"{loss.name} couples the rows of a batch ({caller.coupling}): enumerate its batches instead")
    if caller.reduction == "sum":
        raise UsageError(
            f"{loss.name} sums over the rows of a batch, so that a token's value grows with their number: enumerate "
            "rollouts instead"
        )
    wide = caller.wide or "ref_logits" in loss.takes
    step = max(1, CHUNK // (vocabulary * (vocabulary if wide else 1)))
    sampled, cost = np.zeros((contexts, vocabulary)), np.zeros((contexts, vocabulary))
    full: np.ndarray | None = None
    dtype = "float64"
    leaves: frozenset[str] = frozenset()
    for first in range(0, contexts, step):
        here = slice(first, min(first + step, contexts))
        part = _pairs(instance, cells[here.start * vocabulary : here.stop * vocabulary])
        rollout = Rollout.of(instance, part, sampler=sampler, padding=padding)
        called = differentiate(loss, rollout, None, float(len(rollout)))
        dtype = called.dtype
        leaves |= called.leaves
        cost[here] = _values(loss, called, (-1, vocabulary))
        if called.logp is not None:
            sampled[here] = called.logp.reshape(-1, vocabulary)
        if called.logits is not None:
            full = np.zeros_like(sampled) if full is None else full
            each = called.logits.reshape(-1, vocabulary, vocabulary)
            full[here] = np.einsum("cy,cyv->cv", np.exp(instance.behaviour(sampler)[here]), each)
    if loss.placement != "loss":
        sampled -= cost
    return Pairs(sampled, full, cost, caller.reduction, dtype, leaves)


def second_moment(instance: Instance, behaviour: np.ndarray, visits: np.ndarray, moved: np.ndarray) -> float:
    """E‖Σ_t moved(c_t, v_t)·∇log π(v_t|c_t)‖² with respect to the policy's logits, exact.

    Two tokens have an inner product only in a shared context c. The expected gradient of the later one is the mean
    m(c) there, times the number of visits to c after the earlier one.

    Args:
        instance: Environment and policy.
        behaviour: (C, V) log-probs that rollouts are drawn from.
        visits: (C, 1) expected visits of each context.
        moved: (C, V) derivative of the loss at the log-prob of each token.

    Raises:
        InvalidEnvironmentError: The visits from every context to every other do not fit into MEMORY.
    """
    environment, policy, chances = instance.environment, instance.policy, np.exp(behaviour)
    own = float((visits * chances * moved**2 * score_norms(policy)).sum())
    if environment.tree:
        return own
    contexts, vocabulary = policy.shape
    if contexts**2 * 8 > MEMORY:
        raise InvalidEnvironmentError(
            f"environment {environment.name!r} has {contexts} contexts; the variance by dynamic programming needs "
            f"the visits between all pairs of them, and at most {isqrt(MEMORY // 8)} contexts fit. Use a smaller "
            "environment, or sampling"
        )
    from scipy import sparse  # slow to import, and most losses never come here

    mean = softmax_gradient(chances * moved, policy)
    inner = chances * moved * (mean - (np.exp(policy) * mean).sum(axis=1, keepdims=True))
    cell = np.arange(policy.size)
    step = sparse.csr_array((chances.ravel(), (cell // vocabulary, cell))) @ environment.transition
    entries = environment.transition.tocoo()
    before, after = entries.coords
    revisits, crossed = np.zeros((contexts, contexts)), 0.0
    states = backwards(lambda state: forward(environment, chances, state), start(environment), environment.horizon)
    for state in states:
        again = np.bincount(before, entries.data * revisits[after, before // vocabulary], policy.size)
        crossed += float(state[:, 0] @ (inner * again.reshape(policy.shape)).sum(axis=1))
        revisits = step @ revisits
        revisits[np.diag_indices(contexts)] += 1
    return own + 2 * crossed


def _values(loss: Loss, called: RowGradients, shape: tuple[int, int]) -> np.ndarray:
    """Values of rollouts of length 1; a watched loss may return one each, or their mean, which leaves zeros."""
    from kltest.loss.watched import is_watched  # few losses come here

    value = called.outcome.value
    if value is None and is_watched(loss):
        return np.zeros((1, 1))
    if value is None or (value.dim() != 2 and not is_watched(loss)):
        raise UsageError(
            f"{loss.name} must return one number a token, (B, T), for dynamic programming; it returned "
            f"{called.outcome.returned}"
        )
    return value.numpy().reshape(shape)


def compare(loss: Loss, instance: Instance, sampler: str, padding: int, seed: int) -> None:
    """Raise UsageError if whole rollouts, drawn at random, give other gradients than their tokens one by one."""
    generator = np.random.default_rng([seed, WITNESSES])
    paths = instance.environment.sample(instance.behaviour(sampler), WITNESSES, generator)
    mask = paths.mask
    tokens = _pairs(instance, paths.contexts[mask] * instance.environment.vocabulary + paths.tokens[mask])
    whole, single = (
        differentiate(
            loss,
            Rollout.of(instance, part, sampler=sampler, padding=padding),
            part.mask,
            float(len(part)),
        )
        for part in (paths, tokens)
    )
    value = whole.outcome.value
    agrees = whole.leaves == single.leaves and whole.outcome.returned == single.outcome.returned
    if agrees:
        cost = np.zeros(paths.shape)
        cost[mask] = _values(loss, single, (len(tokens), 1))[:, 0]
        if value is None:
            means = (called.outcome.objective.detach().numpy() for called in (whole, single))
            agrees = near(next(means), len(tokens) / len(paths) * next(means), whole.dtype)
        elif value.dim() == 1:
            agrees = near(value.numpy(), cost.sum(axis=1), whole.dtype)
        else:
            agrees = near(value.numpy()[mask], cost[mask], whole.dtype)
        if whole.logp is not None and single.logp is not None:
            expected = single.logp[:, 0]
            if loss.placement != "loss":
                expected = expected - cost[mask] + _charged(cost, loss.credit)[mask]
            agrees &= near(whole.logp[mask], expected, whole.dtype)
        if whole.logits is not None and single.logits is not None:
            agrees &= near(whole.logits[mask], single.logits[:, 0], whole.dtype)
    if not agrees:
        raise UsageError(
            f"{loss.name} depends on more than each token's own log-probs: on whole rollouts its gradient differs "
            "from that on their tokens one by one, so that dynamic programming does not apply. Enumerate the rollouts"
        )


def _charged(cost: np.ndarray, credit: str) -> np.ndarray:
    """(B, T) the costs that each token is credited with."""
    if credit == "immediate":
        return cost
    to_go = cost[:, ::-1].cumsum(axis=1)[:, ::-1]
    return to_go if credit == "to-go" else np.broadcast_to(to_go[:, :1], cost.shape)


def by_tokens(loss: Loss, instance: Instance, sampler: str, padding: int, seed: int) -> Moments | None:
    """E[ĝ] and E‖ĝ‖² of a batch of one rollout, over every rollout of an environment; arguments as for `exact`.

    Returns:
        None if the loss neither declares that it works token by token nor shows it in every call, if it is placed in
        the reward, if its tables are not small, or if not all rollouts are enumerated.

    Raises:
        UsageError: The loss declares it, and depends on more than each token's own fields.
    """
    few = instance.environment.tree or instance.environment.n_contexts <= FEW_CONTEXTS
    if loss.placement != "loss" or "logits" in loss.takes or not few or isinstance(instance, OfSome):
        return None
    if loss.spec is not None:
        return _from_tables(loss, instance, sampler, padding, seed) if loss.spec.per_token else None
    from kltest.loss.watched import watched  # few losses come here

    if (seen := watched(loss)) is None:
        return None
    try:
        # The least that may end the proof: one rollout.
        seen(Rollout.of(instance, instance.paths.take(slice(1)), sampler=sampler, padding=padding))
        return _from_tables(seen, instance, sampler, padding, seed)
    except KltestError:  # what is wrong with it, the calls of its rollouts say
        return None


def _from_tables(loss: Loss, instance: Instance, sampler: str, padding: int, seed: int) -> Moments:
    paths, weights = instance.paths, instance.rollout_weights(sampler)
    if instance.environment.tree:  # each rollout passes once through each of its contexts
        passing, each = np.zeros(instance.policy.shape), np.broadcast_to(weights[:, None], paths.shape)
        paths.collect(np.where(paths.mask, each, 0.0) if paths.padded else each, passing)
        visits = passing.sum(axis=1)
    else:
        visits = total_visits(instance.environment, instance.behaviour(sampler))
    found = _expected(loss, instance, sampler, visits, True, padding, seed)
    assert found.second_moment is not None
    return Moments(
        gradient=found.gradient,
        second_moment=found.second_moment,
        rollouts=len(paths),
        reduction=found.reduction,
        dtype=found.dtype,
        leaves=found.leaves,
        value=None if found.reduction == "mean" else Expectation.of(paths.along(found.cost), weights),
    )
