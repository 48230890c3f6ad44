"""Classes of settings: every row has exactly one, and its sentence is true of the gradients themselves."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kltest.environments import Instance, bandit, ragged, sequence
from kltest.scoreboard import recorded
from kltest.scoreboard.classes import class_of, finite_class, limit_class, off_policy
from kltest.truth import gradient_again

# Four tokens: two more than a support has.
ENVIRONMENTS = {
    name: build(4, *size, reward=np.random.default_rng(1).standard_normal((contexts, 4)))
    for name, build, size, contexts in (
        ("bandit", bandit, (), 1),
        ("sequence", sequence, (2,), 5),
        ("ragged", ragged, (3,), 13),
    )
}
ROWS = recorded.read()
OF_LENGTHS = ("inverse_length", "inverse_length_of2")


@cache
def vector(name, environment):
    """A named gradient by automatic differentiation of its definition."""
    return gradient_again(name, Instance.draw(ENVIRONMENTS[environment], 3)).ravel()


def found(row, sampler):
    """Pairs of an environment and a gradient, None for one without a name."""
    for each in row["gradients"]:
        if each["sampler"] == sampler:
            terms = each["identified"]
            yield (
                each["environment"],
                terms and sum(c * vector(name, each["environment"]) for name, c in terms.items()),
            )


def along(gradient, name, environment):
    """Is it a positive multiple of a named gradient?"""
    wanted = vector(name, environment)
    factor = float(gradient @ wanted / (wanted @ wanted))
    return factor > 0 and np.linalg.norm(gradient - factor * wanted) < 1e-4 * np.linalg.norm(gradient)


def equals(gradient, name, environment):
    wanted = vector(name, environment)
    return np.linalg.norm(gradient - wanted) < 2e-3 * np.linalg.norm(wanted)


def truths(row):
    """The classes whose sentences are true, each judged by vectors alone."""
    every = list(found(row, "current"))
    lengths_matter = any(environment == "ragged" and gradient is None for environment, gradient in every)
    # If some batches of rollouts of several lengths leave no name, the class is that of one length alone.
    counted = [found for found in every if not (lengths_matter and found[0] == "ragged")]
    named = [(environment, gradient) for environment, gradient in counted if gradient is not None]
    if all(environment == "bandit" for environment, _ in every):
        return {"open"}
    unnamed = [environment for environment, gradient in every if gradient is None]
    fixed = [gradient for environment, gradient in every if environment == "sequence"]
    excused = bool(fixed) and all(gradient is not None for gradient in fixed)
    if any(environment != "ragged" or not excused for environment in unnamed):
        return {"unnamed"}
    stale = list(found(row, "stale"))
    right = all(equals(gradient, "reverse_kl", environment) for environment, gradient in named)
    off = bool(stale) and all(g is not None and equals(g, "reverse_kl", environment) for environment, g in stale)
    several = [(environment, gradient) for environment, gradient in named if environment != "bandit"]
    whole = all(along(gradient, "reverse_kl", environment) for environment, gradient in named)
    part = all(along(gradient, "local_reverse_kl", environment) for environment, gradient in named)
    judged = {
        "whole": right and off and not lengths_matter,
        "on-policy": right and not off and not lengths_matter,
        "scaled": whole and (not right or lengths_matter),
        "part": part and not whole,
        "other": all(along(g, "forward_kl", e) or along(g, "local_forward_kl", e) for e, g in named),
        "none": all(np.linalg.norm(gradient) < 1e-9 for _, gradient in named),
        "length": all(
            any(along(gradient, name, e) for name in OF_LENGTHS) if e == "ragged" else np.linalg.norm(gradient) < 1e-9
            for e, gradient in named
        )
        and any(e == "ragged" for e, _ in named),
    }
    true = {name for name, holds in judged.items() if holds and several}
    return true or {"mixed" if any(mixed(row)) else "another"}


def mixed(row):
    """Does a gradient without what it holds of ∇KL(π‖ref), or of its part, leave something else?"""
    for each in row["gradients"]:
        terms = each["identified"] or {}
        if each["sampler"] == "current":
            for name in ("reverse_kl", "local_reverse_kl"):
                rest = sum(c * vector(n, each["environment"]) for n, c in terms.items() if n != name)
                yield terms.get(name, 0) > 0 and bool(np.linalg.norm(rest) > 1e-9)


def test_no_recorded_row_contradicts_its_class():
    """Of the small batches that were enumerated; where batches grow, the class is that or the limit's."""
    for row in ROWS:
        assert truths(row) == {finite_class(row)}, (row["library"], row["setting"])
        assert class_of(row) in (finite_class(row), limit_class(row)), (row["library"], row["setting"])
        assert class_of(row) != "open" or row["error"], (row["library"], row["setting"])


NAMED = (
    *({name: c} for name in ("reverse_kl", "forward_kl") for c in (1.0, 0.5, -1.0)),
    *({name: c} for name in ("local_reverse_kl", "local_forward_kl") for c in (1.0, 1 / 3, -1.0)),
    *({"zero": 1.0}, {"total_variation": 2.0}, {"chi_square": 1.0, "forward_kl": 1.0}),
    *({"reverse_kl": 1.0, "forward_kl": -1.0}, {"reverse_kl": 1 / 3, "local_forward_kl": 2 / 3}),
    {"squared_log_ratio_sum": 1.0, "local_reverse_kl": -1.0},
    {"inverse_length": 1.0},
    {"inverse_length": -1.0},
)
PLACES = list(product(ENVIRONMENTS, ("current", "stale"), (1, 2)))


@st.composite
def rows(draw):
    """Rows in which most gradients are alike, as they are in real ones."""
    usual = draw(st.sampled_from(NAMED))
    others = st.one_of(st.just(usual), st.just(usual), st.none(), st.sampled_from(NAMED))
    places = draw(st.lists(st.sampled_from(PLACES), unique=True))
    on_a_bandit = {"local_reverse_kl": "reverse_kl", "local_forward_kl": "forward_kl"}
    gradients = []
    for environment, sampler, batch in places:
        terms = draw(others)
        if terms and environment == "bandit":
            # Names of one gradient are added up, as grading does.
            spelt = {}
            for name, c in terms.items():
                spelt[on_a_bandit.get(name, name)] = spelt.get(on_a_bandit.get(name, name), 0) + c
            terms = spelt
        if terms and environment != "ragged" and "inverse_length" in terms:
            terms = {"zero": 1.0}  # where all lengths are equal
        gradients.append({"environment": environment, "sampler": sampler, "batch": batch, "identified": terms})
    return {"dtype": draw(st.sampled_from(("float64", "float32"))), "gradients": gradients, "reads_sampler": True}


@given(rows())
def test_no_row_contradicts_its_class(row):
    assert truths(row) == {class_of(row)}
    assert off_policy(row)


def a_row(current, stale=None, dtype="float64"):
    kinds = {"current": current, "stale": stale or {}}
    gradients = [
        {"environment": environment, "sampler": sampler, "batch": 1, "identified": terms}
        for sampler, there in kinds.items()
        for environment, terms in there.items()
    ]
    return {"dtype": dtype, "gradients": gradients, "reads_sampler": True}


ALL = {environment: {"reverse_kl": 1.0} for environment in ENVIRONMENTS}
NOTHING = {environment: {"zero": 1.0} for environment in ENVIRONMENTS}


@pytest.mark.parametrize(
    ("row", "wanted", "stale"),
    [
        (a_row(ALL, ALL), "whole", "∇KL(π‖ref) too"),
        (a_row(ALL, dict.fromkeys(ENVIRONMENTS)), "on-policy", "unnamed"),
        (a_row(ALL), "on-policy", "not graded"),
        (a_row({**ALL, "sequence": {"reverse_kl": 1.001}}, ALL), "scaled", "∇KL(π‖ref) too"),
        (a_row({**ALL, "sequence": {"reverse_kl": 1.00001}}, ALL, "float32"), "whole", "∇KL(π‖ref) too"),
        (a_row({**ALL, "sequence": {"local_reverse_kl": 1 / 3}, "ragged": None}), "part", "not graded"),
        (a_row({**NOTHING, "ragged": {"inverse_length": 1.0}}), "length", "not graded"),
        (a_row({**NOTHING, "ragged": {"inverse_length": -1.0}}), "another", "not graded"),
        (a_row({**NOTHING, "ragged": None}), "none", "not graded"),
        (a_row(ALL, {**ALL, "sequence": {"local_reverse_kl@sampler": 1.0}}), "on-policy", "ratios of single tokens"),
        (a_row(ALL, {**ALL, "sequence": {"reverse_kl@rollouts": 1.0}}), "on-policy", "no ratio"),
    ],
)
def test_classes_of_known_rows(row, wanted, stale):
    assert class_of(row) == wanted
    assert off_policy(row) == stale
