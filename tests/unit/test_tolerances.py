"""The table of tolerances: above rounding, below the effects that are looked for, less where digits are more."""

from dataclasses import fields

import pytest

from kltest.moments.tolerances import LOWEST_FIRST, TOLERANCES, Tolerances

EXACT = ("float32", "float64")
# A loss that is off by a third of its gradient is wrong in any precision.
EFFECT = 0.25
BOUNDS = [field.name for field in fields(Tolerances) if field.name != "terms"]


def bounds(dtype, name):
    found = getattr(TOLERANCES[dtype], name)
    return [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("dtype", LOWEST_FIRST)
def test_a_tolerance_hides_no_effect(dtype, name):
    assert all(0 <= each <= EFFECT for each in bounds(dtype, name))


@pytest.mark.parametrize("name", [name for name in BOUNDS if name != "search"])
def test_more_digits_are_compared_more_closely(name):
    double, single = (max(bounds(dtype, name), default=0) for dtype in reversed(EXACT))
    halves = [max(there) for dtype in ("float16", "bfloat16") if (there := bounds(dtype, name))]
    assert all(double <= single <= half for half in halves)


@pytest.mark.parametrize("dtype", LOWEST_FIRST)
def test_what_is_none_or_zero_is_so_for_a_reason(dtype):
    there = TOLERANCES[dtype]
    exact = dtype in EXACT
    assert there.terms == (3 if exact else 1)
    assert (there.narrow is None) == (dtype not in ("float16", "bfloat16"))
    # A fit after a search counts where the search is better than the digits, a log-ratio is lost where it is not.
    assert (there.search > 0) == exact == (there.log_ratio == 0)
    assert all(each > 0 for name in BOUNDS if name not in ("search", "log_ratio") for each in bounds(dtype, name))
