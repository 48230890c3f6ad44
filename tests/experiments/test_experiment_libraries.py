"""The libraries experiment: the record as the paper shows it, and each claim able to fail."""

import pytest
from trial import CHECKOUT, Trial, look_up, row_of

from kltest.reproduce.experiment import Experiment, Request

TRIAL = Trial("libraries")
(analysis,) = TRIAL.modules("claims")


@pytest.fixture(scope="module")
def rows():
    found = Experiment(CHECKOUT, "libraries").configurations(Request())
    return TRIAL.tidied([one] for one in found)


def test_every_penalty_is_of_one_class(rows):
    numbers = analysis.numbers(rows)
    classes = [look_up(numbers, "defaults", purpose="penalty", kind=kind) for kind in analysis.CLASSES]
    assert sum(classes) == look_up(numbers, "defaults", purpose="penalty")


def test_a_row_of_the_table_is_what_the_source_of_the_library_says(rows):
    """TRL divides by the length k3 times its token's ratio, a local gradient; its RLOO has k1 in the reward."""
    table = analysis.tables(rows)["table"]
    grpo, rloo = (row_of(table, library="trl", setting=f"{name}/defaults") for name in ("grpo", "rloo"))
    assert (grpo["follows"], grpo["unset"], grpo["off-policy"]) == ("local ∇KL(π‖ref), × 1/T*", "off", "no ratio")
    assert (rloo["follows"], rloo["unset"], rloo["bias"], rloo["best"]) == ("∇KL(π‖ref)", "on, 0.05", "0", "0")
    # Of three tokens: ‖∇/3 − ∇‖ = 2/3 for AReaL, which divides by the length, and nothing is left at the best β.
    areal = row_of(table, library="areal", setting="kl_in_reward/defaults")
    assert (areal["follows"], areal["bias"], areal["best"]) == ("∇KL(π‖ref), × 1/T*", "0.67", "0")


def test_combinations_are_written_with_their_factors():
    assert analysis._gradient({"reverse_kl": "−0.17", "local_reverse_kl": ""}) == "−0.17·∇KL(π‖ref) + local ∇KL(π‖ref)"
    assert analysis._gradient({"local_reverse_kl": "", "reverse_kl": "−1/T"}) == "local ∇KL(π‖ref) − 1/T·∇KL(π‖ref)"
    halves = dict.fromkeys(("local_jensen_shannon", "local_reverse_kl"), "0.5")
    assert analysis._gradient(halves) == "local jensen shannon + local ∇KL(π‖ref), × 0.5"


def test_claims_agree_and_each_can_fail(rows):
    TRIAL.may_lack_parts(rows)
    TRIAL.claims_can_fail(rows)
