"""Dynamic programming equals enumeration, for every estimator that works token by token, in every environment."""

import functools
import inspect

import numpy as np
import pytest
from moments_plain import ENVIRONMENTS, drawn
from weekly import first, spread

from kltest.environments import END, Environment, Instance, mdp, ngram, ragged, sequence
from kltest.errors import UsageError
from kltest.estimators import find, registry
from kltest.loss.calling import bind
from kltest.loss.outcome import Call
from kltest.moments import dynamic, dynamic_programming, enumeration, exact
from kltest.truth import gradient, recursions

PER_TOKEN = [name for name, entry in registry().items() if entry.spec.per_token]
CREDITS = ["return", "to-go", "immediate"]


def estimator(name, **options):
    return bind(find(name).function, Call(**options), name, spec=find(name).spec)


def agrees(loss, instance, sampler, *, variance=False, known=None):
    """Moments by dynamic programming are those of every rollout, with `variance` the second moments as well.

    Returns the reduction, which may be given as `known` for another instance.
    """
    enumerated, computed = exact(loss, instance, sampler, known=known), dynamic(loss, instance, sampler)
    place = loss.name, instance.environment.name
    scale = max(np.sqrt(enumerated.second_moment), 1e-300)
    # Sums of the same terms in another order.
    assert np.abs(computed.gradient - enumerated.gradient).max() <= 1e-12 * scale, place
    assert computed.value == pytest.approx(enumerated.value.mean, rel=1e-12, abs=1e-14), place
    assert computed.reduction == enumerated.reduction, place
    if variance:
        assert computed.variance is None, place
        computed = dynamic(loss, instance, sampler, variance=True)
        assert computed.second_moment == pytest.approx(enumerated.second_moment, rel=1e-12), place
        assert computed.variance == pytest.approx(enumerated.variance, rel=1e-10, abs=1e-14), place
    return computed.reduction


@pytest.mark.parametrize("sampler", ["current", "stale"])
@pytest.mark.parametrize("name", spread(2, PER_TOKEN))
def test_dynamic_programming_equals_enumeration(name, sampler):
    known = None  # what the reduction is need not be found in every environment
    for environment in list(ENVIRONMENTS)[:: 1 if sampler == "stale" else 3]:
        known = agrees(estimator(name), drawn(environment, 0), sampler, variance=name in PLACED_IN_LOSS, known=known)


@pytest.mark.parametrize("credit", first(1, CREDITS))
@pytest.mark.parametrize("placement", ["reward", "both"])
def test_every_placement_and_credit(placement, credit):
    for environment in ("ragged with prompts", "mdp", "ragged ngram"):
        agrees(estimator("k3-ratio", placement=placement, credit=credit), drawn(environment), "stale")


PLACED_IN_LOSS = [
    name
    for name in PER_TOKEN
    if find(name).spec.placement == "loss" and "logits" not in inspect.signature(find(name).function).parameters
]


@pytest.mark.parametrize("name", spread(2, PLACED_IN_LOSS))
@pytest.mark.parametrize(
    "environment",
    [ragged(4, 5, prompts=np.array([0.3, 0.7])), sequence(3, 6), mdp(6, 3, 4, branches=2), ngram(3, 8, 3, end_token=0)],
    ids=lambda environment: environment.name,
)
def test_declared_estimators_are_not_called_on_every_rollout_and_come_out_the_same(environment, name, monkeypatch):
    instance = drawn(environment)
    entry, calls = find(name), []

    @functools.wraps(entry.function)
    def counted(**fields):
        calls.append(next(iter(fields.values())).numel())
        return entry.function(**fields)

    declared, other = bind(counted, name=name, spec=entry.spec), bind(entry.function, name=name)
    short = exact(declared, instance, "stale")
    monkeypatch.setattr(enumeration, "by_tokens", lambda *_: None)
    long = exact(other, instance, "stale")
    assert max(calls) < instance.paths.tokens.size
    assert np.abs(short.gradient - long.gradient).max() <= 1e-12 * np.sqrt(long.second_moment)
    assert short.second_moment == pytest.approx(long.second_moment, rel=1e-12)
    assert (short.reduction, short.leaves, short.dtype) == (long.reduction, long.leaves, long.dtype)
    assert np.abs(short.value.rows - long.value.rows).max() < 1e-12
    assert short.value.std == pytest.approx(long.value.std, rel=1e-12)


def test_a_false_declaration_is_noticed():
    loss = bind(lambda logp, mask: logp * (logp * mask).sum(dim=1, keepdim=True), spec=find("k3-loss").spec)
    with pytest.raises(UsageError, match="more than each token's own"):
        exact(loss, drawn(sequence(3, 6)))


@pytest.mark.parametrize(("name", "options"), [("k1-reward", {}), ("full-loss", {})])
def test_a_variance_that_needs_rollouts_is_refused(name, options):
    with pytest.raises(UsageError, match="enumerate rollouts"):
        dynamic(estimator(name, **options), drawn("ragged"), variance=True)


def test_a_variance_between_too_many_contexts_is_refused(monkeypatch):
    monkeypatch.setattr(dynamic_programming, "MEMORY", 8 * 9)
    with pytest.raises(UsageError, match=r"4 contexts.* at most 3 contexts fit"):
        dynamic(estimator("k3-loss"), drawn("mdp"), variance=True)


@pytest.mark.parametrize("name", ["k3-loss", "k1-reward", "k1-reward-to-go", "full-loss"])
def test_recomputed_visits_change_nothing(name, monkeypatch):
    """If visits do not fit into memory, every √T-th is kept; the result is the same to the last bits."""
    instance = Instance.draw(mdp(7, 3, 23, seed=2), 1, distance=20.0, staleness=20.0)
    kept = dynamic(estimator(name), instance, "stale").gradient
    monkeypatch.setattr(recursions, "MEMORY", 0)
    assert np.abs(dynamic(estimator(name), instance, "stale").gradient - kept).max() <= 1e-14 * np.abs(kept).max()


@pytest.mark.parametrize("pairs", [1, 7])
def test_calling_in_parts_changes_nothing(pairs, monkeypatch):
    instance = drawn("mdp")
    whole = dynamic(estimator("full-loss"), instance).gradient
    monkeypatch.setattr(dynamic_programming, "CHUNK", pairs * 4)
    assert np.abs(dynamic(estimator("full-loss"), instance).gradient - whole).max() < 1e-14


def test_long_horizons_equal_the_truth():
    """What no enumeration can reach: 3^2000 rollouts, against the atlas's own recursion."""
    instance = Instance.draw(ngram(3, 2000, 2, end_token=0), 0, distance=5.0)
    for name, target in (
        ("k3-loss", "local_forward_kl"),
        ("k1-reward-to-go", "reverse_kl"),
        ("k2-loss", "local_reverse_kl"),
    ):
        expected = gradient(target, instance)
        found = dynamic(estimator(name), instance).gradient
        assert np.abs(found - expected).max() <= 1e-10 * np.abs(expected).max()


REFUSED = {
    "a sequence's sum": lambda logp, ref_logp, mask: (
        (logp - ref_logp) * ((logp - ref_logp) * mask).sum(1, keepdim=True)
    ),
    "the token before": lambda logp: logp * logp.roll(1, dims=1).detach(),
    "the position": lambda logp, mask: logp * mask.cumsum(dim=1),
    "the length": lambda logp, mask: logp / mask.sum(dim=1, keepdim=True),
    "the last token": lambda logp, mask: logp * (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True)),
    "the same value, another gradient": lambda logp, mask: (
        logp.detach() + (logp - logp.detach()) * mask.sum(dim=1, keepdim=True)
    ),
    "logits of another token": lambda logits: logits.roll(1, dims=1).exp().square().sum(dim=-1),
}


@pytest.mark.parametrize("loss", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("environment", ["ragged", "mdp"])
def test_what_looks_beyond_the_token_is_refused(loss, environment):
    with pytest.raises(UsageError, match="depends on more than each token's own"):
        dynamic(bind(loss), drawn(environment))


def test_a_loss_that_takes_another_road_for_whole_rollouts_is_refused():
    """The values agree and every gradient that both have does: only on whole rollouts the logits have one at all."""

    def with_an_extra_road(logp, ref_logp, logits):
        unseen = (logits - logits.detach()).sum(dim=-1) if logp.shape[1] > 1 else 0.0
        return (logp - ref_logp) ** 2 + unseen

    with pytest.raises(UsageError, match="depends on more than each token's own"):
        dynamic(bind(with_an_extra_road), drawn("sequence"))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda logp: logp.sum(dim=1), "one number a token"),
        (lambda logp: (logp - logp.mean()) ** 2, "couples the rows"),
        (lambda logp, mask: (logp * mask).sum(), "sums over the rows"),
        (lambda logp: logp.mean(), "one number a token"),
    ],
)
def test_other_losses_are_refused_with_the_reason(loss, words):
    with pytest.raises(UsageError, match=words):
        dynamic(bind(loss), drawn("ragged"))


@pytest.mark.parametrize("environment", ["ragged ngram", "mdp", "bandit"])
def test_a_sum_over_rows_has_no_number_of_a_tokens_own(environment):
    with pytest.raises(UsageError, match="summed sums over the rows"):
        dynamic(bind(lambda logp, ref_logp: len(logp) * (logp - ref_logp) ** 2 / 2, name="summed"), drawn(environment))


def test_rollouts_may_all_end_before_the_horizon(monkeypatch):
    """If nothing is left to visit, fewer steps are kept for going backwards than the horizon asks for."""
    contexts, horizon = 3, 11
    successors = np.minimum(np.arange(contexts)[:, None, None] + 1, contexts).repeat(2, axis=1)
    successors[-1] = END
    chain = Environment(
        "chain that ends",
        horizon,
        np.array([0]),
        np.ones(1),
        successors,
        np.ones_like(successors, dtype=float),
        np.zeros((contexts, 2)),
        tree=True,
    )
    for memory in (0, 8 * 9, 2**28):
        monkeypatch.setattr(recursions, "MEMORY", memory)
        for name in ("k1-reward", "k2-loss", "k1-reward-to-go"):
            agrees(estimator(name), Instance.draw(chain, 0), "stale")
