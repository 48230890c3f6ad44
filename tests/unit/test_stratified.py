"""Random numbers of copies: each copy's are as torch draws them, and over copies they are spread evenly."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch.utils.checkpoint import checkpoint

from kltest.moments.stratified import Stratified

COPIES, ENTRIES = 64, 500
SHAPE = (COPIES, ENTRIES)
LIKE = torch.zeros(SHAPE, dtype=torch.float64)
SHARES = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)

CONTINUOUS = {
    "rand": (lambda: torch.rand(SHAPE), stats.uniform()),
    "rand_like": (lambda: torch.rand_like(LIKE), stats.uniform()),
    "uniform_": (lambda: torch.empty(SHAPE).uniform_(-1, 3), stats.uniform(-1, 4)),
    "randn": (lambda: torch.randn(SHAPE, dtype=torch.float64), stats.norm()),
    "normal_": (lambda: torch.empty(SHAPE).normal_(2.0, 0.5), stats.norm(2.0, 0.5)),
    "normal": (lambda: torch.normal(LIKE + 1, 2.0), stats.norm(1.0, 2.0)),
    "exponential_": (lambda: torch.empty(SHAPE).exponential_(4.0), stats.expon(scale=0.25)),
    "gumbel": (lambda: -torch.log(-torch.log(torch.rand(SHAPE, dtype=torch.float64))), stats.gumbel_r()),
}
CHOICES = {
    "bernoulli": (lambda: torch.bernoulli(LIKE + 0.3), {0: 0.7, 1: 0.3}),
    "bernoulli_": (lambda: torch.empty(SHAPE).bernoulli_(0.3), {0: 0.7, 1: 0.3}),
    "dropout": (lambda: F.dropout(LIKE + 0.75, 0.25), {0: 0.25, 1: 0.75}),
    "randint": (lambda: torch.randint(2, 6, SHAPE), dict.fromkeys(range(2, 6), 0.25)),
    "multinomial": (
        lambda: torch.multinomial(SHARES.expand(COPIES * ENTRIES, 3), 1).reshape(SHAPE),
        {0: 0.1, 1: 0.2, 2: 0.7},
    ),
    "categorical": (
        lambda: torch.distributions.Categorical(probs=SHARES.expand(*SHAPE, 3)).sample(),
        {0: 0.1, 1: 0.2, 2: 0.7},
    ),
}


def drawn(draw, seed=0):
    torch.manual_seed(seed)
    with Stratified(COPIES):
        return draw().double().numpy()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_numbers_have_the_distribution_and_each_entry_one_in_each_share_of_it(name):
    draw, distribution = CONTINUOUS[name]
    found = drawn(draw)
    shares = np.sort(distribution.cdf(found), axis=0) * COPIES
    assert np.all(np.floor(shares + 1e-3 * (np.arange(COPIES)[:, None] + 0.5 - shares)) == np.arange(COPIES)[:, None])
    # Inside of its share too, and of one copy alone.
    assert stats.kstest(shares.ravel() % 1, "uniform").pvalue > 1e-4
    assert stats.kstest(distribution.cdf(found[3]), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("name", CHOICES)
def test_each_entry_has_every_choice_as_often_as_it_is_probable(name):
    draw, probable = CHOICES[name]
    found = drawn(draw)
    assert {*np.unique(found)} == {*probable}
    for choice, probability in probable.items():
        often = (found == choice).sum(axis=0)
        assert abs(often - COPIES * probability).max() < 2
        assert often.mean() / COPIES == pytest.approx(probability, abs=0.002)


def test_entries_of_a_copy_are_independent():
    """Of three copies and three entries: every combination of shares is as probable, so every function has its mean."""
    torch.manual_seed(0)
    counts = np.zeros((3, 3, 3))
    for _ in range(6000):
        with Stratified(3):
            first = (torch.rand(3, 3, dtype=torch.float64)[0] * 3).int().tolist()
        counts[tuple(first)] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-4


def test_a_mean_over_copies_has_less_noise_and_no_bias():
    """Of a sum over entries nearly none, of what two entries decide together as much as without."""
    means: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for stratified in means:
        torch.manual_seed(1)
        for _ in range(400):
            if stratified:
                with Stratified(COPIES):
                    numbers = torch.rand(COPIES, 2, dtype=torch.float64)
            else:
                numbers = torch.rand(COPIES, 2, dtype=torch.float64)
            added, together = numbers.sum(dim=1), ((numbers[:, 0] < 0.5) == (numbers[:, 1] < 0.5)).double()
            means[stratified].append((float(added.mean()), float(together.mean())))
    spread = {which: np.std(found, axis=0) for which, found in means.items()}
    assert spread[True][0] < 0.05 * spread[False][0]
    assert spread[True][1] == pytest.approx(spread[False][1], rel=0.25)
    assert np.abs(np.mean(means[True], axis=0) - (1.0, 0.5)).max() < 4 * spread[False].max() / math.sqrt(400)


def test_what_is_no_multiple_of_the_copies_and_what_is_not_known_is_left_alone():
    for draw in (lambda: torch.rand(COPIES + 1), lambda: torch.rand(()), lambda: torch.randperm(COPIES)):
        torch.manual_seed(0)
        plain = draw()
        torch.manual_seed(0)
        with Stratified(COPIES):
            assert torch.equal(draw(), plain)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_computed_again_on_the_way_back_draws_the_same(reentrant, power):
    x = torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)
    with Stratified(COPIES):
        inside = {1: lambda x: F.dropout(x, 0.5), 2: lambda x: F.dropout(x, 0.5) ** 2}[power]
        found = checkpoint(inside, x, use_reentrant=reentrant)
        found.sum().backward()
    assert torch.equal(x.grad, power * found.detach())


def test_numbers_in_single_precision_stay_below_one():
    with Stratified(2):
        assert float(torch.rand(2**20, dtype=torch.float32).max()) < 1.0
