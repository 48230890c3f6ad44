"""Combinations of named gradients: text, words and numbers say the same."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kltest.environments import Instance, ragged
from kltest.errors import UsageError
from kltest.truth import ATLAS, combine, gradient, parse, plain, render

SAID = {
    "reverse_kl": {"reverse_kl": 1.0},
    "reverse_kl-0.5*forward_kl": {"reverse_kl": 1.0, "forward_kl": -0.5},
    "2*entropy": {"entropy": 2.0},
    "-entropy": {"entropy": -1.0},
    "+ reverse_kl - 1e-3 * entropy ": {"reverse_kl": 1.0, "entropy": -1e-3},
    ".5*reverse_kl+2.*local_forward_kl@sampler": {"reverse_kl": 0.5, "local_forward_kl@sampler": 2.0},
    "reverse_kl − forward_kl": {"reverse_kl": 1.0, "forward_kl": -1.0},
    "entropy+reverse_kl+entropy": {"reverse_kl": 1.0, "entropy": 2.0},
    "reverse_kl-reverse_kl": {"zero": 1.0},
    "zero": {"zero": 1.0},
    "3*zero+entropy": {"entropy": 1.0},
    "0*entropy": {"zero": 1.0},
}


@pytest.mark.parametrize("text", SAID)
def test_text_is_read_in_the_order_of_the_atlas(text):
    assert parse(text) == SAID[text]
    assert list(parse(text)) == [name for name in ATLAS if name in SAID[text]]


NONSENSE = {
    "": "reverse_kl-0.5",
    "  ": "reverse_kl-0.5",
    "reverse_kl--": "'--'",
    "reverse_kl-": "'-'",
    "--reverse_kl": "combination",
    "reverse_kl entropy": "'entropy'",
    "2reverse_kl": "combination",
    "2*": "combination",
    "*entropy": "combination",
    "reverse_kl*2": r"'\*2'",
    "2*2*entropy": "combination",
    "nan*entropy": "not finite",
    "inf*entropy": "not finite",
    "1e999*entropy": "not finite",
    "nan*x": "'x'",
    "0x10*entropy": "combination",
    "1": "combination",
    "reverse_kl,entropy": "','|',entropy'",
    "revers_kl": "did you mean reverse_kl",
    "Reverse-KL": "did you mean",
    "forward_kl@sampler": "did you mean local_forward_kl@sampler",
    "reverse_kl+qwertz": "qwertz",
    "entropy\nzero": "combination",
}


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_a_usage_error_that_says_where(text):
    with pytest.raises(UsageError, match=NONSENSE[text]):
        parse(text)


coefficients = st.integers(-9999, 9999).filter(bool).map(lambda number: number / 1000)
combinations = st.dictionaries(st.sampled_from([name for name in ATLAS if name != "zero"]), coefficients, min_size=1)


@given(combinations)
def test_plain_text_is_read_back(combination):
    assert parse(plain(combination)) == pytest.approx(combination, rel=5e-4)


@given(st.text(alphabet="reverse_kl*+-. 0123456789e@n", max_size=30))
def test_whatever_is_typed_is_read_or_refused(text):
    # Nothing but a UsageError may come out of it, and what is read is a combination of known names.
    with contextlib.suppress(UsageError):
        read = parse(text)
        assert read
        assert set(read) <= set(ATLAS)


WORDS = {
    "reverse_kl-forward_kl": "∇KL(π‖ref) − ∇KL(ref‖π)",
    "-forward_kl": "−∇KL(ref‖π)",
    "0.66666666*local_forward_kl+0.33333333*reverse_kl": "0.3333·∇KL(π‖ref) + 0.6667·E_π[Σ_t ∇KL_t(ref‖π)]",
    "-2*entropy": "−2·∇H(π)",
    "zero": "0",
    "1.0000000001*entropy": "∇H(π)",
}


@pytest.mark.parametrize("text", WORDS)
def test_mathematical_words(text):
    assert render(parse(text)) == WORDS[text]


def test_rendering_refuses_what_it_does_not_know():
    with pytest.raises(UsageError, match="nothing"):
        render({"nothing": 1.0})
    with pytest.raises(UsageError, match="not finite"):
        plain({"entropy": float("nan")})


def test_combination_is_linear():
    instance = Instance.draw(ragged(), 0)
    expected = gradient("reverse_kl", instance) - 0.5 * gradient("forward_kl", instance)
    np.testing.assert_array_equal(combine(parse("reverse_kl-0.5*forward_kl"), instance), expected)
    assert not combine(parse("zero"), instance).any()
