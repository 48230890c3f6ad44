"""Every loss of the corpus is graded as its label says: kltest's verdicts against truth by brute force."""

from typing import Any

import pytest

from benchmarks.corpus import cases, graded

pytestmark = pytest.mark.scheduled
# Losses that are not graded as labelled yet, by name, with the reason. One that comes out as labelled fails here.
NOT_YET: dict[str, str] = {}


def parameters() -> list[Any]:
    strict = {name: [pytest.mark.xfail(reason=reason, strict=True)] for name, reason in NOT_YET.items()}
    return [pytest.param(case, id=case.name, marks=strict.get(case.name, [])) for case in cases()]


@pytest.mark.parametrize("case", parameters())
def test_a_loss_is_graded_as_labelled(case: Any) -> None:
    result = graded(case)
    assert not result.why_not, str(result)


def test_only_losses_of_the_corpus_are_expected_to_fail() -> None:
    assert {case.name for case in cases()} >= NOT_YET.keys()
