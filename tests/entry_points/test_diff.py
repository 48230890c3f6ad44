"""What a change did: compared with an earlier report, target by target; a wrong file is refused before any work."""

import json
from dataclasses import replace

import doors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weekly import examples

from kltest.checks import CHECKS
from kltest.errors import UsageError
from kltest.render import render_changes
from kltest.render.changes import Change, compare, read
from kltest.report import CheckResult, GradientRow, Report


def row(environment="bandit", bias=1e-16, variance=2.0, identified=None, **changes):
    names = {"reverse_kl": 1.0} if identified is None else identified
    return GradientRow(environment, "current", names, bias, 1.0, 0.0, variance, "exact", 4, 27, **changes)


def checks(**status):
    return [CheckResult(code, CHECKS[code].name, found) for code, found in status.items()]


OLD = Report(
    target="pkg.losses:kl",
    expect="reverse_kl",
    placement="loss",
    seed=0,
    versions={},
    verdict="confirmed",
    reduction="per-row",
    dtype="float64",
    gradients=[row(), row("sequence")],
    checks=checks(KL101="pass", KL102="pass", KL201="fail", KL301="skip"),
)
NEW = replace(
    OLD,
    verdict="refuted",
    gradients=[row(bias=0.5, variance=3.0, identified={"forward_kl": 1.0}), row("sequence", bias=2e-16)],
    checks=checks(KL101="pass", KL102="fail", KL201="pass", KL301="skip"),
)


def differences(old, new):
    (change,) = compare("old.json", [json.loads(old.to_json())], [new]).targets
    return {(one.what, one.was, one.now) for one in change.differences}


def test_everything_that_changed_and_nothing_that_did_not():
    assert differences(OLD, OLD) == set()
    assert differences(OLD, NEW) == {
        ("verdict", "confirmed", "refuted"),
        ("gradient, bandit (current)", "∇KL(π‖ref)", "∇KL(ref‖π)"),
        ("relative bias, bandit (current)", "1e-16", "0.5"),
        ("relative variance, bandit (current)", "2", "3"),
        ("KL102 forward-kl-gradient", "pass", "fail"),
        ("KL201 partial-gradient", "fail", "pass"),
    }
    assert {(what, now, was) for what, was, now in differences(NEW, OLD)} == differences(OLD, NEW)


SEQUENCE = row("sequence")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 1}, {("seed", "0", "1")}),
        ({"expect": "forward_kl"}, {("expect", "reverse_kl", "forward_kl")}),
        ({"credit": "return"}, {("credit", "none", "return")}),
        ({"gradients": [row()]}, {("gradient, sequence (current)", "∇KL(π‖ref)", "")}),
        ({"gradients": [row(identified={"reverse_kl": 1 + 1e-9}, variance=2 + 1e-9), SEQUENCE]}, set()),
        (
            {"gradients": [*OLD.gradients, row(batch=4)]},
            {("gradient, bandit (current, batches of 4)", "", "∇KL(π‖ref)")},
        ),
        ({"gradients": [row(bias=float("nan")), SEQUENCE]}, {("relative bias, bandit (current)", "1e-16", "–")}),
        (
            {"checks": [replace(check, excused="why") if check.status == "fail" else check for check in OLD.checks]},
            {("KL201 partial-gradient", "fail", "fail, excused")},
        ),
        ({"checks": [*OLD.checks, CheckResult("KL501", "leak", "pass")]}, set()),
        ({"checks": [*OLD.checks, CheckResult("KL501", "leak", "fail")]}, {("KL501 leak", "", "fail")}),
        (
            {"gradients": [replace(OLD.gradients[0], identified=None), OLD.gradients[1]]},
            {("gradient, bandit (current)", "∇KL(π‖ref)", "no named gradient")},
        ),
    ],
)
def test_each_kind_of_change(changes, expected):
    assert differences(OLD, replace(OLD, **changes)) == expected


def test_targets_are_matched_by_name_and_by_order_within_a_name():
    old = [json.loads(report.to_json()) for report in (OLD, replace(OLD, target="gone"), NEW)]
    changes = compare("old.json", old, [replace(OLD, target="fresh"), OLD, NEW])
    assert changes.targets == (
        Change("fresh", "new"),
        Change(OLD.target),
        Change(OLD.target),
        Change("gone", "not graded now"),
    )


CHANGES = compare("old.json", [json.loads(OLD.to_json()), json.loads(replace(OLD, target="same").to_json())], [NEW])


def test_changes_in_text_and_markdown():
    text = render_changes("text", CHANGES)
    assert text.startswith("changes since old.json\npkg.losses:kl\n")
    assert "  KL102 forward-kl-gradient            pass → fail\n" in text
    assert "same: not graded now\n" in text
    markdown = render_changes("markdown", CHANGES)
    assert markdown.startswith("### Changes since `old.json`\n")
    assert "| pkg.losses:kl | KL102 forward-kl-gradient | pass | fail |" in markdown
    bars = {line.count("|") for line in markdown.splitlines() if line.startswith("|")}
    assert bars == {5}
    unchanged = compare("old.json", [json.loads(OLD.to_json())], [OLD])
    assert render_changes("text", unchanged) == "changes since old.json\nas before: pkg.losses:kl\n"
    assert "As before: pkg.losses:kl." in render_changes("markdown", unchanged)
    assert render_changes("json", CHANGES) == render_changes("junit", CHANGES) == ""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses.py").write_text("def kl(logp, ref_logp):\n    return (logp - ref_logp).sum(-1).square() / 2\n")
    return tmp_path


def call(*arguments, **options):
    return doors.call("grade", "losses.py:kl", "--environment", "bandit", "--select", "KL1,KL2", *arguments, **options)


def test_the_command_shows_changes_beside_the_report_and_keeps_its_exit_code(folder):
    call("--output", "json:old.json", code=0)
    assert call("--diff", "old.json").stdout.endswith("changes since old.json\nas before: losses.py:kl\n")
    (folder / "losses.py").write_text("def kl(logp, ref_logp):\n    return (ref_logp - logp).exp() - ref_logp + logp\n")
    shown = " ".join(call("--diff", "old.json", code=1).stdout.split())
    assert "losses.py:kl verdict confirmed → refuted" in shown
    assert "gradient, bandit (current) ∇KL(π‖ref) → ∇KL(ref‖π)" in shown


@pytest.mark.scheduled
def test_changes_stand_where_reports_go_and_the_old_report_may_be_replaced(folder):
    call("--output", "json:old.json", code=0)
    (folder / "losses.py").write_text("def kl(logp, ref_logp):\n    return (ref_logp - logp).exp() - ref_logp + logp\n")
    # Where standard output is for a program, people read it on standard error.
    result = call("--diff", "old.json", "--output", "json")
    assert json.loads(result.stdout)["verdict"] == "refuted"
    assert "confirmed → refuted" in result.stderr
    # The old report is read before the new one takes its place.
    outputs = ("json:old.json", "markdown:now.md", "text", "junit:now.xml", "html:now.html")
    result = call("--diff", "old.json", *(part for output in outputs for part in ("--output", output)))
    assert result.stderr == ""
    assert result.stdout.startswith("REFUTED")
    for name in ("now.md", "now.xml", "now.html"):
        assert "KL102" in (folder / name).read_text()
    assert "| verdict | confirmed | refuted |" in (folder / "now.md").read_text()
    assert json.loads((folder / "old.json").read_text())["verdict"] == "refuted"


GOOD = json.loads(OLD.to_json())


@pytest.mark.parametrize(
    ("content", "saying"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "there is no report"),
        (b"3", "not an object"),
        (json.dumps({**GOOD, "schema": "kltest.grade/3"}).encode(), "kltest.grade/2"),
        (json.dumps([GOOD, {**GOOD, "verdict": None}]).encode(), "entry 2"),
        (json.dumps({**GOOD, "gradients": [{"environment": "bandit"}]}).encode(), "lacks"),
        (json.dumps({**GOOD, "gradients": [{**GOOD["gradients"][0], "identified": 3}]}).encode(), "identified as 3"),
    ],
)
def test_a_wrong_file_is_refused(folder, content, saying):
    if content is not None:
        (folder / "old.json").write_bytes(content)
    with pytest.raises(UsageError, match="--diff") as refused:
        read("old.json")
    assert saying in str(refused.value)


def test_it_is_refused_before_anything_is_graded_and_a_byte_order_mark_is_read(folder, monkeypatch):
    """Windows' shell puts one before what it redirects."""
    (folder / "old.json").write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert read("old.json") == [GOOD]
    monkeypatch.setattr(doors.GRADED, lambda *_, **__: pytest.fail("was graded"))
    for path in ("", ".", "a\0b", "x" * 5000):
        assert "--diff" in doors.refused("grade", "k3-loss", "--diff", path)


ANYTHING = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ROW = st.fixed_dictionaries(
    {"environment": st.text(), "sampler": st.text()}, optional={"identified": ANYTHING, "batch": ANYTHING}
)
CHECK = st.fixed_dictionaries({"code": st.text(), "status": ANYTHING}, optional={"name": ANYTHING, "excused": ANYTHING})


def damaged():
    """A report in which some values are other ones, or are missing."""
    parts = {"target": st.just(OLD.target) | ANYTHING, "gradients": st.lists(ROW, max_size=2) | ANYTHING}
    parts |= {"checks": st.lists(CHECK, max_size=2) | ANYTHING, "expect": ANYTHING}
    changes = st.fixed_dictionaries({}, optional=parts)
    return st.builds(
        lambda report, changed: {**json.loads(report.to_json()), **changed}, st.sampled_from([OLD, NEW]), changes
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(damaged() | ANYTHING, max_size=2))
def test_no_file_gives_anything_but_a_comparison_or_a_usage_error(tmp_path_factory, old):
    path = tmp_path_factory.getbasetemp() / "old.json"
    path.write_text(json.dumps(old))
    try:
        found = read(str(path))
    except UsageError:
        return
    changes = compare("old.json", found, [NEW])
    for name in ("text", "markdown"):
        text = render_changes(name, changes)
        text.encode("utf-8")
        assert text.endswith("\n")
        assert not set(text) & set("\x00\x1b\r")
