"""Every output format says what the report says, to people and machines, whatever is written in it."""

import html
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import xmlschema
from doors import SCHEMA
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from pages import Strict

from kltest.render import FORMATS, Terminal, render
from kltest.report import CheckResult, GradientRow, Reach, Report, ValueRow

JUNIT = Path(__file__).parents[1] / "junit.xsd"
NASTY = "a<b>&\"'`|\n\r%:,\x1b[31m\x00\ud800\u2028\u202e]]>--*_[x](http://y)@me-->é∇\ufffe"


def row(environment="bandit", sampler="current", agrees=True, **changes):
    row = GradientRow(
        environment=environment,
        sampler=sampler,
        identified={"reverse_kl": 1.0},
        relative_bias=2.2e-16,
        cosine=1.0,
        residual=1e-16,
        relative_variance=3.14159,
        method="exact",
        instances=4,
        rollouts=27,
        expected={"reverse_kl": 1.0},
        agrees=agrees,
    )
    return replace(row, **changes)


CONFIRMED = Report(
    target="k2-loss-sequence",
    expect="reverse_kl",
    placement="loss",
    seed=0,
    versions={"kltest": "0"},
    verdict="confirmed",
    reduction="per-row",
    dtype="float64",
    gradients=[row(), row("sequence")],
    checks=[CheckResult("KL101", "zero-gradient", "pass"), CheckResult("KL301", "x", "skip", "no sampler")],
)
REFUTED = replace(
    CONFIRMED,
    target="loss.py:grpo",
    verdict="refuted",
    gradients=[
        row(agrees=False, identified={"forward_kl": 1.0}, relative_bias=0.51234, cosine=0.99996),
        row("ragged", agrees=False, identified=None, residual=0.31, cosine=None),
    ],
    value=[ValueRow("bandit", "current", "kl", 1e-16, 0.5)],
    checks=[
        CheckResult("KL102", "forward-kl-gradient", "fail", "follows the other KL", "use k1 in the reward"),
        CheckResult("KL802", "inefficient", "fail", "noisier than need be", "centre it", level="warning"),
    ],
    notes=["lifted out of loss.py"],
)
INCONCLUSIVE = replace(CONFIRMED, verdict="inconclusive", gradients=[row(agrees=None, note="rows are coupled")])
ERROR = replace(CONFIRMED, verdict="error", gradients=[], checks=[], error="the loss raised ValueError: no")
HOSTILE = replace(
    REFUTED,
    target=NASTY,
    notes=[NASTY],
    error=NASTY,
    gradients=[row(agrees=False, note=NASTY), *REFUTED.gradients],
    checks=[CheckResult("KL102", NASTY, "fail", NASTY, NASTY), CheckResult("KL103", NASTY, "skip", NASTY)],
)
WARNED = replace(CONFIRMED, checks=[CheckResult("KL802", "inefficient", "fail", "noisy", "centre it", level="warning")])
CODE = "def fixed(logp, ref_logp):\n    u = logp - ref_logp\n\n    return u.sum(-1) ** 2 / 2"
FIXED = replace(REFUTED, checks=[CheckResult("KL102", "forward-kl-gradient", "fail", "wrong", f"square it\n\n{CODE}")])
EXPECTED_FAILURE = replace(
    CONFIRMED,
    gradients=[row(), row("sequence", agrees=False, identified={"local_reverse_kl": 1.0}, excused=("KL201",))],
    checks=[CheckResult("KL201", "partial-gradient", "fail", "only the partial", "sum it", "on <purpose>")],
)
UNEXPLAINED = replace(CONFIRMED, verdict="refuted")
UNEXPECTED_PASS = replace(
    CONFIRMED,
    verdict="refuted",
    checks=[
        CheckResult(
            "KL201", "partial-gradient", "pass", "KL201 is expected to fail, but it passes", excused="on purpose"
        )
    ],
)
HYGIENE = replace(
    CONFIRMED, verdict="refuted", checks=[CheckResult("KL501", "padding-leak", "fail", "padding leaks", "mask it")]
)
ALL = {
    "confirmed": CONFIRMED,
    "refuted": REFUTED,
    "inconclusive": INCONCLUSIVE,
    "error": ERROR,
    "hostile": HOSTILE,
    "warned": WARNED,
    "fixed": FIXED,
    "expected failure": EXPECTED_FAILURE,
    "unexpected pass": UNEXPECTED_PASS,
    "hygiene": HYGIENE,
    "unexplained": UNEXPLAINED,
}
every_report = pytest.mark.parametrize("report", ALL.values(), ids=ALL)


def whole(report, width=100):
    """Everything that a terminal shows with --verbose."""
    return render("text", [report], Terminal(width=width, verbose=True))


@every_report
@pytest.mark.parametrize("name", FORMATS)
def test_renders_the_same_clean_bytes_every_time(name, report):
    text = render(name, [report, CONFIRMED])
    assert text == render(name, [report, CONFIRMED])
    text.encode("utf-8")
    assert text.endswith("\n")
    assert not set(text) & set("\x00\x1b\r")


@every_report
def test_json_is_valid_against_the_schema_alone_and_in_an_array(report):
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    alone, several = json.loads(render("json", [report])), json.loads(render("json", [report, CONFIRMED]))
    validator.validate(alone)
    validator.validate(several)
    assert several[0] == alone
    assert alone["verdict"] == report.verdict


@every_report
def test_sarif_has_a_result_a_finding_and_a_rule_a_code(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (run,) = json.loads(render("sarif", [replace(report, source=(str(tmp_path / "loss.py"), 7))]))["runs"]
    codes = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    found = {(result["ruleId"], result["level"]) for result in run["results"]}
    assert sorted({code for code, _ in found}) == codes
    wanted = {(check.code, "warning" if check.warns else "error") for check in report.failed}
    wanted |= {(check.code, "error") for check in report.unexpected_passes}
    wanted |= {(check.code, "note") for check in report.expected_failures}
    assert wanted <= found
    refutes = {"inconclusive": "warning", "error": "error", "refuted": "error"}
    if report.verdict != "confirmed":
        assert refutes[report.verdict] in {level for _, level in found}
    for result in run["results"]:
        assert codes[result["ruleIndex"]] == result["ruleId"]
        (place,) = result["locations"]
        assert place["physicalLocation"]["artifactLocation"] == {"uri": "loss.py", "uriBaseId": "%SRCROOT%"}
        assert place["physicalLocation"]["region"] == {"startLine": 7, "endLine": 7}
        assert report.verdict == "confirmed" or result["message"]["text"]


def test_a_finding_is_the_same_for_code_scanning_when_its_lines_move_and_where_the_checkout_lies(tmp_path, monkeypatch):
    prints = []
    for folder, line in (("one", 3), ("other", 30)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        path = str(tmp_path / folder / "loss.py")
        moved = replace(HYGIENE, source=(path, line), target=f"{path}:k3")
        (run,) = json.loads(render("sarif", [moved]))["runs"]
        prints.append([result["partialFingerprints"] for result in run["results"]])
    assert prints[0] == prints[1] != []


def test_the_schema_refuses_what_is_not_a_report():
    good = json.loads(render("json", [REFUTED]))
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for key in SCHEMA["$defs"]["report"]["required"]:
        assert not validator.is_valid({name: value for name, value in good.items() if name != key}), key
    for key in SCHEMA["$defs"]["gradient"]["required"]:
        lacking = {name: value for name, value in good["gradients"][0].items() if name != key}
        assert not validator.is_valid({**good, "gradients": [lacking]}), key
    assert not validator.is_valid({**good, "verdict": "unbiased"})
    assert not validator.is_valid({**good, "gradients": [{**good["gradients"][0], "identified": {}}]})
    assert validator.is_valid({**good, "one_more_key": 1})


def test_numbers_that_are_not_finite_are_null_in_json_and_a_sign_in_text():
    report = replace(CONFIRMED, gradients=[row(relative_bias=float("inf"), relative_variance=float("nan"))])
    gradient = json.loads(render("json", [report]))["gradients"][0]
    assert gradient["relative_bias"] is None
    assert gradient["relative_variance"] is None
    assert "∞" in whole(report)
    assert "nan" not in whole(report)


def test_text_keeps_the_numbers():
    text = whole(REFUTED)
    # A cosine that is not 1 is not rounded to it.
    said = ("0.512", "0.99996", "Fix: use k1 in the reward", "warning KL802", "lifted out of loss.py")
    assert all(each in text for each in said)


def test_text_is_coloured_only_where_the_terminal_is():
    assert "\x1b[" not in render("text", [REFUTED])
    coloured = render("text", [REFUTED], Terminal(width=100, colour=True))
    assert re.sub(r"\x1b\[\d+m", "", coloured) == render("text", [REFUTED], Terminal(width=100))
    assert coloured.startswith("\x1b[31mREFUTED\x1b[0m")


@pytest.mark.parametrize("width", [1, 40, 72, 200])
def test_text_wraps_prose_to_the_width_but_never_breaks_a_word(width):
    long = "word " * 60 + "/a/very/long/path/" + "x" * 90
    report = replace(CONFIRMED, notes=[long])
    text = whole(report, width)
    prose = [line for line in text.splitlines() if "word" in line]
    assert max(map(len, prose)) <= max(width, 40)
    assert "/a/very/long/path/" + "x" * 90 in text


def test_several_targets_end_with_a_summary_in_text():
    summary = render("text", [CONFIRMED, REFUTED]).split("2 targets")[1].split("\n\n")[0].splitlines()
    assert summary[1:] == ["confirmed  k2-loss-sequence", "refuted    loss.py:grpo  KL102, KL802"]


def junit(*reports):
    return ET.fromstring(render("junit", reports).encode("utf-8"))


@every_report
def test_junit_is_valid_counts_its_cases_and_is_red_exactly_when_the_verdict_is_not_confirmed(report):
    text = render("junit", [report, CONFIRMED])
    xmlschema.XMLSchema(JUNIT).validate(text)
    root = ET.fromstring(text.encode("utf-8"))
    for element in (root, *root):
        assert int(element.get("tests")) == len(list(element.iter("testcase"))) > 0
        for attribute, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(element.get(attribute, len(list(element.iter(kind))))) == len(list(element.iter(kind)))
    assert all(len(case) <= 1 for case in root.iter("testcase"))
    red = int(root[0].get("failures")) + int(root[0].get("errors"))
    assert (red > 0) == (report.verdict != "confirmed")


def test_junit_keeps_the_lines_of_a_fix():
    failure = next(junit(FIXED)[0].iterfind(".//failure[@type='KL102']"))
    assert failure.text == f"square it\n\n{CODE}"
    assert failure.get("message") == "wrong"


def test_junit_tells_batches_apart():
    names = [case.get("name") for case in junit(replace(CONFIRMED, gradients=[row(), row(batch=4)]))[0]]
    assert names[:2] == ["gradient[bandit-current]", "gradient[bandit-current-batches-of-4]"]


@every_report
def test_github_lines_are_commands(report):
    lines = render("github", [report]).splitlines()
    command = r"::(error|warning|notice) (?:(?:file|title)=[^:,]*(?:,title=[^:,]*)?)::.*"
    assert all(re.fullmatch(command, line) for line in lines)
    assert any(line.startswith("::error") for line in lines) == (report.verdict != "confirmed")


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (
            replace(REFUTED, checks=[CheckResult("KL102", "a:b,c", "fail", "50%\nof it")]),
            "::error file=loss.py,title=KL102 a%3Ab%2Cc::loss.py:grpo: 50%25 of it",
        ),
        (replace(ERROR, error="50%\nof it"), "::error title=kltest error::k2-loss-sequence: 50%25%0Aof it"),
        (
            FIXED,
            "::error file=loss.py,title=KL102 forward-kl-gradient::loss.py:grpo: wrong Fix: square it%0A%0A"
            + re.sub("(?m)^(?=.)", "    ", CODE).replace("\n", "%0A"),
        ),
        (
            replace(EXPECTED_FAILURE, verdict="refuted"),
            "::notice title=KL201 partial-gradient::k2-loss-sequence: "
            "expected failure: KL201 partial-gradient: on <purpose>",
        ),
        (
            UNEXPECTED_PASS,
            "::error title=KL201 partial-gradient::k2-loss-sequence: KL201 is expected to fail, but it passes",
        ),
    ],
)
def test_github_escapes_as_its_runner_decodes(report, line):
    assert render("github", [report]).splitlines()[0] == line


def test_text_shows_code_as_it_stands_however_narrow():
    text = whole(FIXED, 40)
    for line in CODE.splitlines():
        assert f"      {line}".rstrip() in text.splitlines()


LOCAL = "E_π[Σ_t ∇KL_t(π‖ref)]"


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (CONFIRMED, "follows ∇KL(π‖ref), as declared"),
        (EXPECTED_FAILURE, f"follows {LOCAL}; ∇KL(π‖ref) was declared; KL201 failed as expected"),
        (REFUTED, "follows ∇KL(ref‖π) (bandit); no named gradient (ragged); ∇KL(π‖ref) was declared; KL102 failed"),
        (HYGIENE, "follows ∇KL(π‖ref), as declared; KL501 failed"),
        (UNEXPECTED_PASS, "follows ∇KL(π‖ref), as declared; KL201, expected to fail, passed"),
        (INCONCLUSIVE, "could not be compared with ∇KL(π‖ref)"),
    ],
)
def test_one_line_says_what_was_found_and_no_more(report, said):
    (line,) = render("text", [report], Terminal(quiet=True)).splitlines()
    verdict, rest = line.split("  ", 1)
    assert verdict == report.verdict.upper() + " with expected failures" * (report is EXPECTED_FAILURE)
    assert rest.startswith(f"{report.target}: {said}")
    assert rest.removeprefix(f"{report.target}: {said}") in ("", "; warnings KL802")


def first_screen(report):
    """The texts of the first screen by their labels, lines joined."""
    found, label = {}, ""
    first, *lines = render("text", [report]).split("\n\n")[0].splitlines()
    for line in lines:
        label = line[:10].strip() or label
        found[label] = f"{found.get(label, '')} {line[10:].strip()}".strip()
    return {"verdict": first, **found}


@pytest.mark.parametrize("report", [CONFIRMED, REFUTED, WARNED, HYGIENE, EXPECTED_FAILURE, UNEXPECTED_PASS])
def test_the_first_screen_says_four_things_in_their_order(report):
    said = first_screen(report)
    labels = [label for label in said if label != "expected"]
    assert labels[:5] == ["verdict", "follows", "declared", "errors", "warnings"]
    assert said["verdict"].startswith(report.verdict.upper())
    assert said["declared"].startswith("∇KL(π‖ref): the reverse KL over whole rollouts")
    for check in report.checks:
        shown = "errors" if check.refutes else "warnings" if check.status == "fail" and check.warns else ""
        assert shown == "" or check.code in said[shown]
    if not report.errors and not report.unexpected_passes:
        assert said["errors"] == "none"
    assert (said["warnings"] == "none") == (not report.warnings)


def test_an_expected_failure_is_never_called_the_declared_gradient():
    said = first_screen(EXPECTED_FAILURE)
    first = f"CONFIRMED with an expected failure: follows {LOCAL}"
    assert said["verdict"] == f"{first}  k2-loss-sequence"
    assert said["follows"].startswith(LOCAL)
    for name in ("markdown", "html"):
        assert f"with an expected failure: follows {LOCAL}" in render(name, [EXPECTED_FAILURE]).replace("\\", "")
    twice = replace(EXPECTED_FAILURE, checks=EXPECTED_FAILURE.checks * 2)
    assert first_screen(twice)["verdict"].startswith("CONFIRMED with expected failures: follows")


def test_a_row_of_one_token_is_left_out_where_longer_rollouts_say_more():
    one, longer = row(), row("sequence", identified={"local_reverse_kl": 1.0})
    assert first_screen(replace(REFUTED, gradients=[one, longer]))["follows"].startswith(f"{LOCAL}: the reverse KL of")
    scaled = replace(longer, identified={"local_reverse_kl": 1 / 3})
    words = first_screen(replace(REFUTED, gradients=[one, scaled]))["follows"]
    assert words.startswith(f"∇KL(π‖ref) (bandit) 0.3333·{LOCAL} (sequence)")


def test_samplers_are_named_where_they_differ():
    rows = [row(), row("sequence"), *(row(name, "stale", False, identified=None) for name in ("bandit", "sequence"))]
    words = first_screen(replace(REFUTED, gradients=rows))["follows"]
    assert words.startswith("∇KL(π‖ref) (bandit, sequence) no named gradient (bandit, sequence: stale) off by")


def test_an_environment_has_one_name_a_line_with_its_batch_size_where_names_differ_by_it():
    half = {"identified": {"reverse_kl": 0.5}, "agrees": False, "batch": 2}
    rows = [row(), row("sequence"), row("ragged"), row("sequence", **half), row("ragged", **half)]
    lines = [line.strip() for line in render("text", [replace(REFUTED, gradients=rows)]).splitlines()[1:5]]
    assert lines[0].split(maxsplit=1)[1] == "∇KL(π‖ref) (bandit; sequence, ragged: batches of 1)"
    assert lines[1] == "0.5·∇KL(π‖ref) (sequence, ragged: batches of 2)"
    assert lines[2].startswith("off by up to")
    assert lines[3].startswith("declared")
    alike = [row("ragged", identified=None, agrees=False, batch=batch) for batch in (1, 2)]
    assert "batches" not in first_screen(replace(REFUTED, gradients=[row(), *alike]))["follows"]


def test_what_is_followed_and_declared_is_one_line_where_it_is_the_same():
    same = replace(CONFIRMED, gradients=[row(scale=1.0), row("sequence", scale=1.0)])
    said = first_screen(same)
    assert "declared" not in said
    assert said["follows"].startswith("∇KL(π‖ref), as declared: the reverse KL over whole rollouts")
    assert "shaped-reward" in first_screen(replace(same, placement="shaped-reward"))["follows"]
    for other in (row("sequence", scale=2.0), row("sequence", agrees=False), row("sequence", identified=None)):
        assert "declared" in first_screen(replace(same, gradients=[row(scale=1.0), other]))


def test_agreement_up_to_scale_names_the_scale_and_the_true_gradient():
    report = replace(CONFIRMED, gradients=[row(identified={"reverse_kl": 0.04}, scale=0.04)])
    said = first_screen(report)["follows"]
    assert said.startswith("0.04·∇KL(π‖ref): ")
    assert said.endswith("the declared gradient up to the scale 0.04")
    assert "the declared gradient up to scale" in render("text", [report], Terminal(quiet=True))


def test_what_keeps_a_verdict_open_is_told():
    assert first_screen(INCONCLUSIVE)["open"] == "bandit (current): rows are coupled"
    checks = [CheckResult(f"KL20{n}", "x", "inconclusive", "too many batches") for n in range(1, 6)]
    unsure = replace(CONFIRMED, verdict="inconclusive", checks=checks)
    assert first_screen(unsure)["open"] == "KL201 and 4 other checks: too many batches"
    assert "open" not in first_screen(replace(CONFIRMED, checks=[replace(checks[0], level="warning")]))


def test_the_first_screen_claims_what_was_looked_at_and_no_more():
    assert "looked at" not in first_screen(CONFIRMED)
    far, near = (replace(CONFIRMED, reach=Reach(*found)) for found in ((64, 32, 19.96, 0.0), (1, 1, 1.5, 0.5)))
    for width in (80, 100):
        lines = render("text", [far], Terminal(width=width)).splitlines()
        (said,) = (line for line in lines if line.startswith("looked at"))
        assert said == "looked at up to 64 tokens, 32 rows, log-ratio 20 to reference, policy as sampler"
        assert not lines[lines.index(said) + 1]
    assert first_screen(near)["looked at"] == "up to 1 token, 1 row, log-ratio 1.5 to reference, 0.5 to sampler"
    said = " ".join(whole(far).split())
    assert (
        "rollouts of up to 64 tokens, batches of up to 32 rows, log-ratios of a token of up to 20 to the refer" in said
    )
    assert "with the sampler equal to the policy" in said
    said = " ".join(whole(near).split())
    assert "rollouts of one token, each by itself, log-ratios of a token of up to 1.5 to the reference" in said
    assert "and 0.5 to the sampler" in said


def test_the_symbols_that_occur_are_explained_once():
    text = render("text", [REFUTED, EXPECTED_FAILURE])
    assert text.count("notation  ") == text.count("Σ_t a sum over tokens") == text.count("--verbose shows") == 1
    assert "μ" not in text
    assert "Σ_t" not in render("text", [CONFIRMED])


def test_many_findings_stay_on_one_screen():
    checks = [CheckResult(f"KL5{n:02}", f"name-{n}", "fail", f"{'title ' * 13}here. And more") for n in range(40)]
    rows = [row(f"e{n}", identified={"reverse_kl": float(n)}, agrees=False) for n in range(12)]
    text = render("text", [replace(REFUTED, checks=checks, gradients=rows, reach=Reach(64, 32, 20.0, 20.0))])
    assert len(text.splitlines()) <= 25
    assert "and 34 more (--verbose)" in text
    assert "9 others" in text


def test_an_expected_failure_is_shown_as_such_everywhere():
    text = whole(EXPECTED_FAILURE)
    assert re.search(r"^sequence .* expected KL201$", text, flags=re.MULTILINE)
    assert re.search("^expected +KL201 partial-gradient: on <purpose>$", text, flags=re.MULTILINE)
    markdown = render("markdown", [EXPECTED_FAILURE])
    assert "| expected KL201 |" in markdown
    assert r"- **expected** KL201 partial-gradient: on \<purpose\>" in markdown
    cases = {case.get("name"): case for case in junit(EXPECTED_FAILURE)[0]}
    for name in ("gradient[sequence-current]", "KL201 partial-gradient"):
        assert cases[name].find("skipped").get("message").startswith("expected failure: ")
    assert json.loads(render("json", [EXPECTED_FAILURE]))["gradients"][1]["excused"] == ["KL201"]


def test_an_unexpected_pass_is_a_failure_everywhere():
    for name in ("text", "markdown", "github", "junit"):
        assert "KL201 is expected to fail, but it passes" in render(name, [UNEXPECTED_PASS])
    assert junit(UNEXPECTED_PASS)[0].get("failures") == "1"
    assert "passed: KL201" not in whole(UNEXPECTED_PASS)


@every_report
def test_html_is_one_well_formed_page_that_loads_nothing(report):
    assert Strict(render("html", [report, CONFIRMED])).counted["section"] == 2
    Strict(report._repr_html_())
    assert 'name="viewport"' in render("html", [report])
    assert "prefers-color-scheme: dark" in render("html", [report])


FRAME = "loss.py:grpo raised ValueError:\n  loss.py:3, in grpo\n    raise ValueError(`x`)\n  ValueError: <x>\n    y"


def test_the_lines_of_a_failure_stay_lines():
    """A frame with its source is read by its indentation."""
    report = replace(ERROR, error=FRAME)
    lines = FRAME.splitlines()
    blocks = re.findall(r"<pre>(.*?)</pre>", render("html", [report]), re.DOTALL)
    assert html.unescape(blocks[0]).splitlines() == lines[1:]
    markdown = render("markdown", [report]).splitlines()
    start = markdown.index("- **loss.py:grpo raised ValueError:**")
    assert markdown[start + 1 : start + 8] == ["", "  ```", *(f"  {line}" for line in lines[1:]), "  ```"]


def tokens(text):
    """The blocks that a Markdown reader sees, tables included."""
    return MarkdownIt("commonmark").enable("table").parse(text)


@every_report
def test_markdown_is_read_as_it_is_meant(report):
    found = tokens(render("markdown", [report, CONFIRMED]))
    kinds = [token.type for token in found]
    inline = [child.type for token in found for child in token.children or ()]
    assert kinds.count("heading_open") == 2
    assert kinds.count("table_open") == bool(report.gradients) + 1
    assert not {"html_block", "html_inline", "link_open", "em_open"} & {*kinds, *inline}
    assert "code_block" not in kinds, "four blanks too many make code of words"
    rows = kinds.count("tr_open")
    assert kinds.count("td_open") + kinds.count("th_open") == 7 * rows
    assert rows == len(report.gradients) + len(CONFIRMED.gradients) + kinds.count("table_open")


@pytest.mark.parametrize("code", [CODE, 'text = """\n```\n````\n"""', "- not a list\n# no heading"])
def test_markdown_shows_code_as_code_within_its_item(code):
    check = CheckResult("KL102", "x", "fail", "wrong", f"do so\n\n{code}")
    found = tokens(render("markdown", [replace(REFUTED, checks=[check, check])]))
    fences = [token for token in found if token.type == "fence"]
    assert [(fence.info, fence.content, fence.level) for fence in fences] == [("python", code + "\n", 2)] * 2
    assert [token.type for token in found].count("bullet_list_open") == 2, "the first lines, and the checks"


@settings(deadline=None)
@given(st.text(max_size=40), st.sampled_from(FORMATS))
def test_any_text_anywhere_keeps_every_format_readable(text, name):
    check = CheckResult("KL102", text, "fail", text, text)
    report = replace(REFUTED, target=text, notes=[text], error=text, checks=[check])
    rendered = render(name, [report])
    rendered.encode("utf-8")
    if name == "json":
        json.loads(rendered)
    elif name == "junit":
        ET.fromstring(rendered.encode("utf-8"))
    elif name == "github":
        assert all(line.startswith("::") for line in rendered.splitlines())
    elif name == "html":
        Strict(rendered)


def test_a_report_shows_itself_in_one_line_as_text_and_in_a_notebook():
    assert repr(REFUTED) == "<Report 'loss.py:grpo': refuted, declared reverse_kl, failed: KL102 KL802>"
    assert repr(CONFIRMED) == "<Report 'k2-loss-sequence': confirmed, declared reverse_kl>"
    assert f"{REFUTED}\n" == render("text", [REFUTED])
    cell = REFUTED._repr_html_()
    page = Strict(cell)
    assert not {"body", "html"} & page.counted.keys()
    for said in ("refuted", "loss.py:grpo", "KL102", "Fix:", "use k1 in the reward", "0.512", "lifted out of loss.py"):
        assert said in "".join(page.words)


def test_a_frame_has_a_row_per_gradient_with_names_and_numbers():
    frame = REFUTED.to_frame()
    assert list(frame.environment) == ["bandit", "ragged"]
    assert frame.identified[0] == "forward_kl"
    assert frame.coefficients[0] == {"forward_kl": 1.0}
    assert list(frame.identified.isna()) == list(frame.coefficients.isna()) == [False, True]
    assert list(frame.expected) == ["reverse_kl", "reverse_kl"]
    assert list(frame.relative_bias) == [0.51234, 2.2e-16]
    assert set(frame.target) == {"loss.py:grpo"}
    assert set(frame.verdict) == {"refuted"}
    assert {*GradientRow.__dataclass_fields__, "target", "verdict", "coefficients"} == set(frame.columns)
    empty = ERROR.to_frame()
    assert len(empty) == 0
    assert list(empty.columns) == list(frame.columns)


def test_a_slow_grading_says_where_its_time_went():
    slow = replace(CONFIRMED, seconds=214.2, calling=150.4, calls=3021)
    words = "time: 214 s: 150 s in 3021 calls of the loss and their backward passes, 64 s in kltest"
    assert words in " ".join(slow.to_text(verbose=True).split())
    for other in (slow.to_text(), replace(slow, seconds=59.0).to_text(verbose=True), slow.to_json()):
        assert "150" not in other
