"""Audits of TRL's real trainers while they train: what they follow at each step is what the scoreboard has recorded."""

import json
from pathlib import Path

import pytest
from processes import ran

from kltest.adapters import find
from kltest.scoreboard import recorded
from kltest.scoreboard.installation import install
from kltest.scoreboard.releases import UnreachableError

PROGRAM = Path(__file__).parents[1] / "trl_audited.py"


@pytest.fixture(scope="module")
def trained():
    """What trl_audited.py prints, in an environment that has TRL; two minutes."""
    library = find("trl")
    try:
        there = install(library, library.version)
    except UnreachableError as error:
        pytest.skip(f"no package index can be reached, so TRL was not audited: {error}")
    done = ran(*there.command(str(PROGRAM)), env=there.environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def on_record(setting, environment, sampler):
    """The name and the coefficient that the scoreboard has of a setting."""
    (row,) = (row for row in recorded.read() if (row["library"], row["setting"]) == ("trl", setting))
    found = (one for one in row["gradients"] if (one["environment"], one["sampler"]) == (environment, sampler))
    ((name, coefficient),) = next(found)["identified"].items()
    return name, coefficient


def of(audit, name, kind="coefficient"):
    """Value and ends of the interval of a named gradient."""
    (row,) = (row for row in audit["named"] if row["name"] == name)
    return [row[kind][key] for key in ("value", "low", "high")]


@pytest.mark.real
@pytest.mark.scheduled
@pytest.mark.parametrize(
    ("setting", "other"),
    [
        ("grpo/loss_type=luspo", "local_forward_kl"),
        ("grpo/loss_type=luspo,use_bias_correction_kl=false", "local_reverse_kl"),
        ("grpo/loss_type=luspo,use_bias_correction_kl=true,num_iterations=2", None),
        ("grpo/defaults", "local_forward_kl"),
        ("rloo/defaults", None),
    ],
)
def test_each_step_follows_what_is_recorded(trained, setting, other):
    """The recorded coefficient lies in the interval of each step, and the direction of another gradient does not."""
    found = trained[setting]
    assert len(found["audits"]) == len(found["logged"]) in (2, 4)
    for step, (audit, logged) in enumerate(zip(found["audits"], found["logged"], strict=True)):
        if setting == "grpo/defaults":  # divided by the tokens of a batch: a third in `sequence`, of three tokens
            name, third = on_record(setting, "sequence", "current")
            assert third == pytest.approx(1 / 3, rel=1e-5)
            expected = audit["rollouts"] / audit["tokens"]
        else:
            stale = "num_iterations" in setting and step % 2
            name, expected = on_record(setting, "ragged", "stale" if stale else "current")
        value, low, high = of(audit, name)
        # Intervals may be as narrow as float32; the record has six digits.
        assert low - 1e-4 < expected < high + 1e-4
        assert high - low < 0.9 * value
        if other:
            assert of(audit, other, "cosine")[2] < 1
        assert logged["kl_audit/units"] == audit["units"]
        if f"kl_audit/coefficient_{name}" in logged:
            assert logged[f"kl_audit/coefficient_{name}"] == pytest.approx(value)


@pytest.mark.real
@pytest.mark.scheduled
def test_a_planted_k1_is_told_and_training_is_untouched(trained):
    """A GRPOTrainer with the log-ratio as its KL term; GRPO and RLOO with dropout, fresh and stale, to the last bit."""
    for audit in trained["planted k1"]["audits"]:
        assert audit["verdict"] == "refuted"
        _, low, high = of(audit, "reverse_kl")
        assert low - 1e-4 < 0 < high + 1e-4 < 0.5
    assert trained["untouched"] == [True] * 3
