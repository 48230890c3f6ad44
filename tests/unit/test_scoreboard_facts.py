"""What `kltest libraries --report` prints: the facts of a recorded row, neutral, and a program that needs no kltest."""

import re
from pathlib import Path

import numpy as np
import pytest
from weekly import spread

from kltest.adapters import NAMES, find
from kltest.adapters.standalone import environment
from kltest.cli.libraries import printed
from kltest.counterexample.environment import at_once
from kltest.errors import UsageError
from kltest.loss.resolve import resolve
from kltest.scoreboard import programs, recorded
from kltest.scoreboard.classes import class_of
from kltest.scoreboard.pages import facts
from kltest.truth import combine

ROOT = Path(__file__).resolve().parents[2]
OWN = frozenset({"graded", "logits", "ref", "old", "at", "y", "mask", "logp", "p", "q", "true", "expected", "call"})
ROWS = [row for row in recorded.read() if row["gradients"] and row["known"]]


def of_each_class():
    return {(row["library"], class_of(row), row["reads_sampler"]): row for row in ROWS}.values()


@pytest.mark.scheduled
def test_settings_of_every_class_and_library_have_their_facts_and_a_program():
    for row in of_each_class():
        text = facts(row)
        target = f"{row['library']}:{row['setting']}"
        assert not re.search(r"\b(bug|wrong|broken|incorrect|fail)", text.partition("```")[0]), target
        assert row["source"] in text
        assert row["note"] in text
        compile(re.search(r"```python\n(.*?)\n```", text, re.DOTALL)[1], target, "exec")


@pytest.mark.parametrize("name", spread(2, NAMES))
def test_every_setting_has_a_program_without_kltest_in_names_of_its_own(name):
    """What the program itself is called is no name of the lines that it takes over."""
    library = find(name)
    for setting in library.settings:
        for code in (library.standalone(setting), library.standalone(setting, batch=2)):
            names = re.findall(r"^(?:def|class) (\w+)|^(\w+) = ", code.partition("def graded(")[0], re.MULTILINE)
            assert not {one or other for one, other in names} & OWN, setting.name
            assert "kltest" not in code, setting.name
            compile(code, setting.name, "exec")


@pytest.mark.parametrize("target", ["verl:kl_penalty/low_var_kl", "tunix:compute_kl_divergence/low_var_kl"])
def test_examples_are_what_the_command_prints(target, capsys):
    """A function of torch and one of JAX; renewed by `kltest libraries --program TARGET`."""
    assert printed(target, reported=False) == 0
    file = ROOT / "examples" / "libraries" / f"{target.partition(':')[0]}.py"
    assert file.read_text(encoding="utf-8") == capsys.readouterr().out


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(("loss", "gradient"), [("k2_loss_sequence", "reverse_kl"), ("k3_loss", "local_forward_kl")])
def test_a_program_prints_the_true_gradient_and_the_one_that_the_loss_follows(loss, gradient, stale, tmp_path):
    """On-policy by name, and off-policy as the loss itself gives it; the library is a file made here."""
    from kltest.adapters import Setting
    from kltest.adapters.standalone import program as written

    (tmp_path / "made_up_losses.py").write_text(
        "def k2_loss_sequence(logp, ref_logp):\n    return (logp - ref_logp).sum(-1) ** 2 / 2\n"
        "def k3_loss(logp, ref_logp):\n    return ((ref_logp - logp).exp() - 1 - (ref_logp - logp)), 'logged'\n"
    )
    setting = Setting("made/up", f"made_up_losses:{loss}")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + written(setting, ("logp", "ref_logp"), stale=stale)
    found = programs._printed(code)
    instance = environment(stale=stale).instance()
    wanted, _ = at_once(resolve(loss.replace("_", "-")), instance, "stale" if stale else "current", summed=False)
    assert found == pytest.approx(wanted, abs=1e-12)
    assert stale or found == pytest.approx(combine({gradient: 1.0}, instance), abs=1e-12)


def test_the_environment_is_made_of_distributions_without_ties():
    """Of any number of actions: a support of likeliest tokens is the same in every arithmetic."""
    for actions in (2, 3, 4, 6):
        found = environment(stale=True, actions=actions)
        for table in (found.policy, found.reference, found.sampler):
            assert len(table) == len(found.reward) == 1 + actions + actions**2
            assert all(np.isclose(sum(row), 1.0) for row in table)
            assert actions == 2 or all(len(set(row)) == actions for row in table)
            assert actions == 2 or {int(np.argmax(row)) for row in table} == set(range(actions))


def test_of_what_is_not_recorded_there_is_nothing_to_report(monkeypatch):
    monkeypatch.setattr(recorded, "read", list)
    with pytest.raises(UsageError, match="nothing is recorded of trl:grpo/defaults"):
        printed("trl:grpo/defaults", reported=True)
