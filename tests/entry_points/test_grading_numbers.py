"""`kltest grade FILE:NAME` of functions of plain numbers: one rollout at a time, entries told by their names."""

import json

import pytest
from typer.testing import CliRunner
from weekly import first

from kltest.cli import app

# As engines answer: [log-prob, id, text] of each token, those that are scored behind the first token.
ENTRIES = """def _of(entries):
    return {{{of}}}


def {name}(args, sample, payload):
    length = sample.response_length
    own = sample.metadata.get("opd_student_top_logprobs")[-length:]
    teacher = payload["teacher"]["meta_info"]["input_token_ids_logprobs"][1:][-length:]
    kls = []
    for mine, theirs in zip(map(_of, own), map(_of, teacher), strict=True):
        assert list(mine) == list(theirs)
        weights = mine if getattr(args, "weight", "student") == "student" else theirs
        kls.append(sum(2.718281828459045**weights[one] * ({kl}) for one in mine))
    return kls
"""
SAMPLED = """def _of(entries):
    return {{int(entry[1]): float(entry[0]) for entry in entries}}


def {name}(sample, payload):
    mine = [_of([one]) for one in sample.output_token_logprobs]
    theirs = [_of([one]) for one in payload["teacher"]["output_token_logprobs"]]
    return [{kl} for t, token in enumerate(sample.tokens)]
"""
IN_LISTS = "int(entry[1]): float(entry[0]) for entry in entries"
BY_ID = "token: float(one.logprob) for token, one in entries.items()"
DIFFERENCE, REVERSED = "mine[t][token] - theirs[t][token]", "theirs[t][token] - mine[t][token]"
ROWS = {
    "sampled_reversed": (SAMPLED, REVERSED, ("--placement", "reward"), "reverse_kl", -1),
    "sampled": (SAMPLED, DIFFERENCE, ("--placement", "reward"), "reverse_kl", 1),
    "of_a_token": (SAMPLED, DIFFERENCE, ("--placement", "reward", "--credit", "immediate"), "local_reverse_kl", 1),
    "as_advantage": (
        *(ENTRIES, "mine[one] - theirs[one]", ("--placement", "reward", "--credit", "immediate"), "zero", 1),
    ),
    "as_loss": (ENTRIES, "mine[one] - theirs[one]", (), "zero", 1),
}


def graded(folder, text: str, name: str, *options: str):
    (folder / "losses.py").write_text(text, encoding="utf-8")
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    return CliRunner().invoke(app, ["grade", f"losses.py:{name}", "--output", "json", *options])


@pytest.mark.parametrize("of", [IN_LISTS, pytest.param(BY_ID, marks=pytest.mark.scheduled)])
@pytest.mark.parametrize("row", first(1, ROWS))
def test_entries_of_objects_are_told_by_their_names(row, of, tmp_path, monkeypatch) -> None:
    text, kl, options, wanted, sign = ROWS[row]
    if text is SAMPLED and of is BY_ID:
        return
    monkeypatch.chdir(tmp_path)
    found = graded(
        tmp_path, text.format(name="term", kl=kl, of=of), "term", "--environment", "sequence,ragged", *options
    )
    report = json.loads(found.stdout)
    assert "one rollout at a time" in report["read"]
    for gradient in report["gradients"]:
        assert list(gradient["identified"]) == [wanted]
        assert gradient["identified"][wanted] * sign > 0


def test_what_no_name_says_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "def term(sample):\n    return [float(one) + sample.anything for one in sample.log_probs]\n"
    found = graded(tmp_path, text, "term")
    assert "one rollout of numbers at a time, and raised" in found.stdout + found.stderr


def test_what_is_only_to_be_read_is_not_called(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = graded(tmp_path, SAMPLED.format(name="term", kl=DIFFERENCE), "term", "--read")
    assert "one rollout" not in found.stdout
    assert "cannot be read" in found.stdout + found.stderr
