"""Every label of a loss by others holds by enumeration, whatever kltest says."""

import dataclasses
import math
from importlib import import_module
from typing import Any

import pytest
import torch
from cases import brute_force
from cases.unseen import CASES


def function_of(case: Any) -> Any:
    file, _, name = case.target.partition(":")
    found: Any = import_module(f"cases.{file.removesuffix('.py')}")
    for part in name.split("."):
        found = getattr(found() if isinstance(found, type) else found, part)
    return found


# They change with the corpus alone: on every push the first right loss of a file and the first wrong one.
FIRST = {(case.target.partition(":")[0], case.right): case.name for case in reversed(CASES)}.values()
EVERY = [pytest.param(case, id=case.name, marks=[] if case.name in FIRST else pytest.mark.scheduled) for case in CASES]


@pytest.mark.parametrize("case", EVERY)
def test_label(case: Any) -> None:
    """The label holds, and that of a right loss does not hold of a wrong one."""
    torch.set_num_threads(1)
    evidence = brute_force.judge(function_of(case), case)
    # As a right loss it would have failed where its gradient is off in the ordinary environments.
    if case.level == "error" and max(evidence["near"].values()) < case.tolerance:
        with pytest.raises(AssertionError):
            brute_force.judge(function_of(case), dataclasses.replace(case, right=True))


def test_the_corpus_is_large_and_balanced() -> None:
    cases = CASES
    assert len({c.name for c in cases}) == len(cases) >= 96
    assert 0.35 < sum(c.right for c in cases) / len(cases) < 0.65
    assert all(c.right == (not c.defect) and (c.right or (c.level and c.codes)) for c in cases)
    assert all(math.isfinite(v) for c in cases for v in c.reach.values())
    assert all(not (c.codes & c.forbidden) for c in cases)
