"""Proposals for parameters that nothing fills: the printed options and shims are followed, and the losses graded."""

import re
from pathlib import Path

import pytest
from called import WRITTEN
from weekly import first

import kltest
from kltest.errors import UsageError
from kltest.loss.outcome import Call
from kltest.loss.resolve import resolve

LOSSES = (WRITTEN / "unfillable.py").read_text(encoding="utf-8")


@pytest.fixture
def proposed(tmp_path, monkeypatch):
    """Return what the refusal of a loss of LOSSES proposes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(LOSSES)

    def refused(name):
        with pytest.raises(UsageError) as refusal:
            resolve(f"mine.py:{name}", Call())
        before = re.split("(?:Or g|G)ive (?:it|each) a value", str(refusal.value))[0]
        return before.partition(" cannot be filled. ")[2]

    return refused


@pytest.mark.parametrize(
    ("name", "options"),
    first(
        1,
        [
            ("nested", {"data.batch": "@rollout"}),
            ("attributes", {"batch": "@rollout", "cfg.algorithm": "@rollout"}),
            ("mixed", {"batch": "@rollout", "cfg.scale": "VALUE"}),
            (
                "both",
                {
                    "batch.logprobs": "@logp",
                    "batch.loss_mask": "@mask",
                    "batch.ref_logprobs": "@ref_logp",
                    "batch.weight": "VALUE",
                },
            ),
            (
                "of_engines",
                {
                    "inputs.loss_mask": "@mask",
                    "inputs.teacher_logprobs": "@ref_logp",
                    "inputs.trainer_logprobs": "@logp",
                },
            ),
        ],
    ),
)
def test_the_options_that_are_proposed_fill_the_parameters(name, options, proposed):
    said = dict(re.findall(r"--arg (\S+)=([@\w]+)", proposed(name)))
    assert said == options
    arguments = {key: 2.0 if value == "VALUE" else value for key, value in said.items()}
    arguments |= {"scale": 2.0} if name == "of_engines" else {}
    report = kltest.grade(f"mine.py:{name}", arguments=arguments, select="KL1,KL2")
    assert report.verdict == "confirmed", report.error


@pytest.mark.parametrize("name", ["packed", "two_models", "of_inputs", "with_labels", "Trainer.compute_loss"])
def test_what_no_argument_can_give_is_said_with_the_guide_that_has_a_shim(name, proposed):
    wanted = "sequences without padding" if name == "packed" else "a model"
    said = proposed(name)
    assert f"It wants {wanted}: put a shim" in said
    assert (Path(__file__).parents[2] / re.search(r"\((docs/.*?)\)", said)[1]).is_file()


@pytest.mark.parametrize("arguments", [{"data.batch": "@FIELD"}, {"data": "VALUE"}])
def test_a_proposal_is_not_copied_as_it_stands(arguments, proposed):
    with pytest.raises(UsageError, match="in place of the capitals"):
        resolve("mine.py:nested", Call(arguments=arguments))


def test_nothing_is_proposed_for_what_is_not_told(proposed):
    assert proposed("unknown") == ""
