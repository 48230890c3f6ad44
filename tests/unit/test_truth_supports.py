"""Named gradients of next-token distributions: supports of every size, by two routes, and what they are at the ends."""

import numpy as np
import pytest
from weekly import spread

from kltest.environments import Instance, bandit, mdp, ragged, sequence
from kltest.errors import UsageError
from kltest.identify.identification import independent
from kltest.truth import (
    FURTHER,
    gradient,
    gradient_again,
    is_of_lengths,
    next_tokens,
    of_support,
    on_rollouts_of_the_sampler,
    parse,
    plain,
    render,
)
from kltest.truth.atlas import ATLAS, named

ENVIRONMENTS = {
    "bandit": bandit(7),
    "sequence": sequence(5, 2, prompts=np.array([0.3, 0.7])),
    "ragged": ragged(6, 3),
    "mdp": mdp(5, 6, 3, seed=3),
}
# Sums of at most a few hundred terms of size one.
EXACT = 1e-11
NAMES = [name for k in (1, 2, 3, 4, 9) for name in of_support(k, "ref_")] + [
    *("local_jensen_shannon", "local_jensen_shannon30", "local_skewed_forward_kl10", "local_skewed_reverse_kl35"),
    *("local_jensen_shannon50", "local_skewed_forward_kl99", "local_skewed_reverse_kl1"),
    *("jensen_shannon", "jensen_shannon30", "skewed_forward_kl10", "skewed_reverse_kl35"),
]


def instance(environment, seed=0):
    return Instance.draw(ENVIRONMENTS[environment], seed)


def relative(found, expected):
    size = np.linalg.norm(expected)
    return np.linalg.norm(found - expected) / (size if size > 1e-12 else 1.0)


@pytest.mark.parametrize(
    "name", spread(25, [*NAMES, *map(on_rollouts_of_the_sampler, [*FURTHER, "inverse_length_of3"])])
)
def test_two_routes_agree(name):
    for environment in ENVIRONMENTS:
        for seed in range(2):
            given = instance(environment, seed)
            assert relative(gradient(name, given), gradient_again(name, given)) < EXACT, environment


def _of_the_other_side(name, policy, reference):
    return next_tokens_support(name, reference, policy)


next_tokens_support = next_tokens._support
mixture = next_tokens._mixture
PLANTED = {
    "the support of the other side": ("_support", _of_the_other_side, "local_reverse_kl_own2"),
    "nothing outside": ("_mass", lambda chances, inside: 1 - 1e-9 + 0 * chances[:, :1], "local_forward_kl_top2_tail"),
    "the mass is not divided by": (
        "_mass",
        lambda chances, inside: 1 + 0 * chances[:, :1],
        "local_reverse_kl_top2_renormalised",
    ),
    "the reference for the mixture": ("_mixture", lambda one, other, weight: one, "local_jensen_shannon"),
    "the weights exchanged": (
        "_mixture",
        lambda one, other, weight: mixture(one, other, 1 - weight),
        "local_skewed_forward_kl10",
    ),
    "the weights of whole rollouts exchanged": (
        "_mixture",
        lambda one, other, weight: mixture(one, other, 1 - weight),
        "skewed_reverse_kl10",
    ),
    "half for every weight": (
        "_mixture",
        lambda one, other, weight: mixture(one, other, 0.5),
        "local_jensen_shannon30",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_breaks_the_agreement(bug, monkeypatch):
    function, wrong, name = PLANTED[bug]
    given = instance("ragged")
    monkeypatch.setattr(next_tokens, function, wrong)
    assert relative(gradient(name, given), gradient_again(name, given)) > 1e-3


@pytest.mark.parametrize("way", ["forward", "reverse"])
def test_a_tail_of_one_token_would_be_the_whole_divergence_and_a_support_of_one_token_renormalised_is_nothing(
    way, monkeypatch
):
    """So that two tokens at least are left out, but in a vocabulary of two."""
    given = Instance.draw(bandit(2), 0)
    assert relative(gradient(f"local_{way}_kl_top1_tail", given), gradient(f"{way}_kl", given)) < EXACT
    assert not gradient(f"local_{way}_kl_top1_renormalised", given).any()
    for environment in ENVIRONMENTS:
        tail = gradient(f"local_{way}_kl_top1_tail", instance(environment))
        assert relative(tail, gradient(f"local_{way}_kl", instance(environment))) > 1e-2


def test_a_truncated_sum_plus_the_gradient_of_its_mass_is_the_coarse_divergence_at_equal_policies():
    """At π = ref no divergence has a gradient; a truncated sum pushes mass out of the support, or into it."""
    given = instance("sequence")
    equal = Instance(given.environment, given.policy, given.policy, given.sampler)
    for name in of_support(2, "ref_"):
        size = np.linalg.norm(gradient(name, equal))
        assert (size > 1e-2) == (not name.endswith(("renormalised", "tail"))), name


def test_names_of_a_support_are_independent_of_each_other_and_of_the_rest():
    given = instance("ragged")
    names = [name for name, row in ATLAS.items() if not row.stale and name not in ("zero", "future_reverse_kl")]
    columns = {name: gradient(name, given).ravel() for name in [*names, *FURTHER]}
    assert set(FURTHER) <= set(independent(columns))


def test_names_of_any_size_are_read_and_written():
    text = "local_reverse_kl_own64_tail - 0.5*local_forward_kl_top8@sampler"
    assert plain(parse(text)) == "- 0.5*local_forward_kl_top8@sampler + local_reverse_kl_own64_tail".replace(
        "- ", "-", 1
    )
    assert "S the top 64 of π" in render(parse("local_reverse_kl_own64_tail"))
    assert named("local_forward_kl_top8@sampler").on_policy == {"local_forward_kl_top8": 1.0}


@pytest.mark.parametrize(
    "name",
    [
        *("local_forward_kl_top0", "local_forward_kl_top", "forward_kl_top2", "local_forward_kl_top2@rollouts"),
        *("local_jensen_shannon0", "local_jensen_shannon100", "local_skewed_kl10", "local_skewed_reverse_kl"),
        *("jensen_shannon0", "jensen_shannon@sampler", "skewed_forward_kl10@rollouts"),
        *("inverse_length_of1", "inverse_length_of0", "inverse_length_of2@sampler", "inverse_length_of"),
    ],
)
def test_other_spellings_are_unknown_names(name):
    with pytest.raises(UsageError, match="no named gradient"):
        named(name)


def test_what_is_listed_is_described():
    for name in FURTHER:
        row = named(name)
        assert row.name == name
        assert not row.stale
        assert "∇" in row.formula
        whole = is_of_lengths(name) or not name.startswith("local_")
        assert row.local == (not row.field) == row.meaning.endswith("held fixed") == (not whole)
    assert len({named(name).formula for name in FURTHER}) == len(FURTHER)
