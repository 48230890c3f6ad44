"""What is around a scan: declarations, excuses, baselines, changed lines, exit codes, SARIF and bad input.

Nothing is graded here: reports are those that a gradient is known to give.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

from kltest.cli.application import app
from kltest.render.tables import Terminal
from kltest.scanning.annotations import github
from kltest.scanning.annotations import sarif as sarif_of
from kltest.scanning.judge import Judge, filled
from kltest.scanning.report import FORMATS, text
from kltest.scanning.rows import Row, Scan
from kltest.scanning.search import Search
from kltest.scanning.sources import Source, contents, parsed
from kltest.scanning.store import Store

K2 = "def loss(logp, ref_logp):\n    return ((logp - ref_logp) ** 2 / 2).mean()\n"
HELPED = "from means import mean\n\n\ndef loss(logp, ref_logp):\n    return mean((logp - ref_logp) ** 2 / 2)\n"
MEAN = "def mean(values):\n    return values.mean()\n"
RIGHT, LOCAL, ZERO = {"reverse_kl": 1.0}, {"local_reverse_kl": 0.5}, {"zero": 1.0}


def report(identified, codes=(), verdict="refuted", warnings=()):
    rows = [{"environment": "ragged", "sampler": sampler, "identified": identified} for sampler in ("current", "stale")]
    levels = [(code, "error") for code in codes] + [(code, "warning") for code in warnings]
    checks = [{"code": code, "status": "fail", "level": level, "message": f"{code} fails."} for code, level in levels]
    return {"verdict": verdict, "gradients": rows, "checks": checks, "error": "it raised"}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder with one right term; `known` is the report of all terms."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLTEST_SCAN_CACHE", str(tmp_path / ".cache"))
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    (tmp_path / "code.py").write_text(K2)
    known = {"report": report(RIGHT)}

    def judged(self, rows):
        for row in rows:
            if row.why:
                row.state = "not run"
                yield row
            else:
                yield filled(row, known["report"])

    monkeypatch.setattr(Judge, "judged", judged)
    return known


def scan(*arguments):
    done = CliRunner().invoke(app, ["scan", *map(str, arguments)])
    return done.exit_code, done.output


def rows(*arguments):
    done = CliRunner().invoke(app, ["scan", "--output", "json", *map(str, arguments)])
    return json.loads(done.stdout)["terms"]


def git(*arguments, at="."):
    command = ["git", "-c", "user.name=x", "-c", "user.email=x", "-c", "init.defaultBranch=main", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=at).stdout


UNNAMED, NOT_RUN = (
    report(None, ["KL105"]),
    "def loss(logp, ref_logp, power):\n    return ((logp - ref_logp).abs() ** power).mean()\n",
)
EXITS = {
    "right": (K2, report(RIGHT), 0, 0),
    "a multiple": (K2, report({"reverse_kl": 3.0}, ["KL106"]), 0, 0),
    "a next-token part": (K2, report(LOCAL, ["KL201"]), 0, 0),
    "right, with a warning": (K2, report(RIGHT, warnings=["KL507"]), 0, 0),
    "the other sign": (K2, report({"reverse_kl": -1.0}), 1, 1),
    "another gradient": (K2, report({"forward_kl": 1.0}, ["KL102"]), 1, 1),
    "right, and an error": (K2, report(RIGHT, ["KL505"]), 1, 1),
    "zero": (K2, report(ZERO), 1, 1),
    "unnamed": (K2, UNNAMED, 4, 4),
    "failed": (K2, report(None, verdict="error"), 4, 4),
    "not run": (NOT_RUN, UNNAMED, 4, 4),
    "one of two not run": (f"{K2}\n\n{NOT_RUN.replace('loss', 'other')}", report(RIGHT), 0, 4),
    "the other sign beside one not run": (
        f"{K2}\n\n{NOT_RUN.replace('loss', 'other')}",
        report({"reverse_kl": -1.0}),
        1,
        1,
    ),
    "as declared": (f"{K2}  # kltest: expect=zero".replace("\n  #", "  #"), report(ZERO, verdict="confirmed"), 0, 0),
    "not as declared": (f"{K2}  # kltest: expect=zero".replace("\n  #", "  #"), report(RIGHT), 1, 1),
    "not decided": (
        f"{K2}  # kltest: expect=zero".replace("\n  #", "  #"),
        report(RIGHT, verdict="inconclusive"),
        4,
        4,
    ),
    "no term": ("x = 1\n", None, 5, 5),
}


@pytest.mark.parametrize("name", EXITS)
def test_the_exit_code_is_what_the_terms_follow(tree, name):
    text, tree["report"], code, strict = EXITS[name]
    Path("code.py").write_text(text)
    assert scan()[0] == code
    assert scan("--strict")[0] == strict
    assert scan("--allow-ungraded")[0] == (0 if code == 4 else code)
    assert scan("--allow-ungraded", "--strict")[0] == strict


def test_what_is_only_logged_is_listed_if_asked_for_and_held_to_its_value_alone(tree):
    Path("code.py").write_text(
        f"{K2}\n\ndef step(logp, ref_logp, stats):\n    stats['kl'] = (logp - ref_logp).mean().item()\n"
    )
    value, passed = [{"sampler": "current", "matches": "kl"}], [{"code": "KL601", "status": "pass", "level": "error"}]
    tree["report"] = {**report(ZERO, ["KL101", "KL509"]), "value": value}
    tree["report"]["checks"] += passed
    assert scan()[1].count("code.py:6") == 0
    code, text = scan("--logged")
    assert (code, "logs KL(π‖ref)" in text) == (1, True), "the other term is a finding"
    assert {row["place"]: (row["status"], row["errors"]) for row in rows("--logged")} == {
        "loss": ("finding", ["KL101", "KL509"]),
        "logged": ("passed", []),
    }
    tree["report"] = {**report(ZERO, ["KL101", "KL604"]), "value": [{"sampler": "current", "matches": None}]}
    assert rows("--logged")[1]["errors"] == ["KL604"]
    tree["report"] = {**report(ZERO), "value": []}  # nobody could compare it
    assert rows("--logged")[1]["status"] == "inconclusive"


def test_comments_on_a_term_or_above_it_declare_and_excuse(tree):
    tree["report"] = report(RIGHT, ["KL505", "KL204"])
    line = "    return ((logp - ref_logp) ** 2 / 2).mean()"
    Path("code.py").write_text(
        K2.replace(line, f"    # kltest: ignore[KL505] no padding\n{line}  # kltest: ignore[KL204] alone")
    )
    (row,) = rows()
    assert (row["errors"], row["ignored"]) == ([], {"KL505": "no padding", "KL204": "alone"})
    # A comment behind the statement before, and one in a text, are not on the term.
    Path("code.py").write_text(
        K2.replace(line, f"    a = 1  # kltest: ignore[KL505] b\n    c = '# kltest: ignore[KL204] d'\n{line}")
    )
    code, text = scan()
    assert (code, "code.py:2: # kltest: ignore[KL505] b stands on no KL term" in text) == (1, True), text
    Path("code.py").write_text(K2.replace(line, f"{line}  # kltest: ignore[KL505, KL506] why"))
    assert "code.py:2: KL506 is excused, and does not fail" in scan()[1]


TWO = """def kl(logp, ref_logp, kind):
    d = logp - ref_logp  # kltest: COMMENT
    if kind == "k2":
        return d ** 2 / 2
    return d.abs()
"""


@pytest.mark.parametrize(
    ("comment", "declared"),
    [
        ("expect=zero", ["zero", "zero"]),
        ("[k2] expect=zero", ["zero", None]),
        ("[kind='k2'] expect=zero", ["zero", None]),
        ("[helper, kind otherwise]expect=zero", [None, "zero"]),
        ("[k] expect=zero", [None, None]),
        ("[reward] expect=zero", [None, None]),
    ],
)
def test_a_comment_may_speak_of_one_configuration_of_a_term(tree, comment, declared):
    Path("code.py").write_text(TWO.replace("COMMENT", comment))
    assert [(row["variant"], row["declared"]) for row in rows()] == [
        ("kind='k2'", declared[0]),
        ("kind otherwise", declared[1]),
    ]
    told = f"code.py:2: # kltest: {comment} names no configuration" in scan()[1]
    assert told == (declared == [None, None])


def test_an_excuse_for_one_configuration_leaves_the_others(tree):
    tree["report"] = report(RIGHT, ["KL505"])
    Path("code.py").write_text(TWO.replace("COMMENT", "[k2] ignore[KL505] no padding"))
    assert [row["errors"] for row in rows()] == [[], ["KL505"]]
    Path("code.py").write_text(TWO.replace("COMMENT", "[k2] ignore[KL102] why"))
    assert "code.py:2: KL102 is excused, and does not fail" in scan()[1]


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("expect=forwrd_kl", "forward_kl"),
        ("expect=", "write expect=NAME"),
        ("ignore[KL999] why", "there is no check 'KL999'"),
        ("ignore[KL201]", "without a reason"),
        ("ignored[KL201] why", "ignore[CODE]"),
    ],
)
def test_a_comment_that_says_nothing_known_is_told_with_its_line(tree, comment, said):
    Path("code.py").write_text(f"{K2[:-1]}  # kltest: {comment}\n")
    code, text = scan()
    assert (code, text.count("\n")) == (2, 1), text
    assert text.startswith("kltest: code.py:2: ")
    assert said in text


def test_the_configuration_declares_excuses_and_leaves_out_by_file(tree):
    Path("pyproject.toml").write_text(
        '[tool.kltest.scan]\nexclude = ["tests/*"]\nbaseline = "known.json"\n'
        'expect = { "losses/*.py" = "zero" }\nignore = { "code.py" = { KL505 = "no padding" } }\n'
    )
    Path("known.json").write_text('{"terms": []}')
    for folder in ("tests", "losses"):
        Path(folder).mkdir()
        Path(folder, "more.py").write_text(K2)
    tree["report"] = report(RIGHT, ["KL505"])
    told = {row["file"]: (row["declared"], row["ignored"]) for row in rows()}
    assert told == {"code.py": (None, {"KL505": "no padding"}), "losses/more.py": ("zero", {})}
    os.chdir("losses")  # patterns and files are relative to the configuration, wherever it is asked
    assert rows()[0]["declared"] == "zero"


@pytest.mark.parametrize(
    ("table", "line", "said"),
    [
        ("expext = {}", 3, "did you mean expect?"),
        ('expect = { "*.py" = "forwrd_kl" }', 3, "forward_kl"),
        ('expect = "forward_kl"', 3, "give gradients by files"),
        ('exclude = []\nignore = { "*.py" = { KL999 = "x" } }', 4, "there is no check 'KL999'"),
        ('ignore = { "*.py" = { KL505 = "" } }', 3, "without a reason"),
        ('ignore = { KL505 = "x" }', 3, "give reasons by files and codes"),
        ('exclude = "tests"', 3, "give a list"),
        ("baseline = 1", 3, "give the path"),
    ],
)
def test_a_wrong_configuration_is_told_with_its_line(tree, table, line, said):
    Path("pyproject.toml").write_text(f"[project]\n[tool.kltest.scan]\n{table}\n")
    code, text = scan()
    assert (code, text.count("\n")) == (2, 1), text
    assert f"pyproject.toml, line {line}: " in text
    assert said in text


def test_a_baseline_is_made_used_renewed_and_told_when_it_is_stale(tree):
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    assert scan("--output", "json:known.json")[0] == 1
    Path("code.py").write_text("\n\n" + K2)  # lines move
    assert scan("--baseline", "known.json")[0] == 0
    assert scan("--baseline", "known.json", "--output", "json:known.json")[0] == 0  # renewed from itself
    tree["report"] = report({"forward_kl": 1.0}, ["KL102", "KL505"])
    assert scan("--baseline", "known.json")[0] == 1  # one more error is news
    Path("more.json").write_text(Path("known.json").read_text().replace('"KL102"', '"KL102",\n    "KL301"'))
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    code, text = scan("--baseline", "more.json")  # one error less is known, and the entry is stale
    assert (code, "baseline entry KL102,KL301 no longer occurs" in " ".join(text.split())) == (0, True)
    tree["report"] = report(RIGHT)
    code, text = scan("--baseline", "known.json")
    assert code == 0
    assert "note: code.py: loss (loss): baseline entry KL102 no longer occurs" in " ".join(text.split())
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])  # of another version, which wrote formulas otherwise
    Path("old.json").write_text(Path("more.json").read_text().replace('"formula": "', '"formula": "x'))
    assert scan("--baseline", "old.json")[0] == 0
    Path("old.json").write_text(Path("old.json").read_text().replace('"function": "', '"function": "x'))
    assert scan("--baseline", "old.json")[0] == 1
    Path("broken.json").write_text("[]")
    assert scan("--baseline", "broken.json")[0] == 2


FRESH, SAMPLED = "def kl_term(logp, ref_logp): pass", "def kl_term(logp, ref_logp, old_logp): pass"
ROLLOUTS = {
    "of a loss that reads nothing of the sampler": (FRESH, "loss", "KL301", "passed"),
    "of a helper": (FRESH, "helper", "KL303", "passed"),
    "of a loss with the sampler's log-probs": (SAMPLED, "loss", "KL301", "finding"),
    "of a reward": (FRESH, "reward", "KL301", "passed"),
    "of a reward from the rollouts' own log-probs": (SAMPLED, "reward", "KL305", "passed"),
    "of an advantage": (SAMPLED, "advantage", "KL301", "passed"),
    "of a reward with a clipped ratio": (SAMPLED, "reward", "KL306", "finding"),
}


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_missing_ratio_is_a_note_where_nothing_says_that_rollouts_are_stale(name):
    source, place, code, status = ROLLOUTS[name]
    given = report(RIGHT, [code])
    given["gradients"][1]["identified"] = {"reverse_kl@rollouts": 1.0}
    for declared in ("", "reverse_kl"):
        given["verdict"] = "refuted" if status == "finding" else "confirmed"
        found = filled(row(source, place=place, declared=declared), given)
        noted = [] if status == "finding" else [code]
        assert (found.status, found.codes, found.noted) == (status, [] if noted else [code], noted)
    document = json.loads(sarif_of(Scan([found])))["runs"][0]["results"]
    assert [(each["ruleId"], each["level"]) for each in document] == [(code, "note" if noted else "error")]
    excused = Scan([filled(row(source, place=place, ignored={code: "why"}), given)])
    assert (excused.rows[0].status, "stale" in text(excused)) == ("passed", False)
    assert json.loads(sarif_of(excused))["runs"][0]["results"] == []
    given["gradients"][0]["identified"] = {"forward_kl": 1.0}  # which is no matter of the sampler
    assert filled(row(source, place=place), given).status == "finding"


def test_a_helper_that_no_loss_calls_is_a_note():
    for called, place, status in ((True, "helper", "finding"), (False, "helper", "note"), (False, "loss", "finding")):
        found = filled(row(FRESH, place=place, called=called), report(ZERO, ["KL101"]))
        assert (found.status, Scan([found]).exit_code()) == (status, int(status == "finding"))
    note = filled(row(FRESH, place="helper", called=False), report(ZERO, ["KL101"]))
    assert "no loss calls it: term of a helper: no gradient (KL101)" in text(Scan([note]))
    assert json.loads(sarif_of(Scan([note])))["runs"][0]["results"][0]["level"] == "note"
    assert github(Scan([note])).startswith("::notice file=a.py,line=1,endLine=1,title=kltest KL101::")


def test_what_is_trained_with_stands_before_tests_and_benchmarks():
    files = ["benchmarks/a.py", "test/b.py", "test_c.py", "contest.py"]
    codes = (["KL101"], ["KL102"], ["KL103"], ["KL105"])
    pairs = zip(files, codes, strict=True)
    rows = [filled(row(FRESH, file=name, spot=name), report(ZERO, code)) for name, code in pairs]
    words = text(Scan(rows), Terminal(verbose=True))
    assert sorted(files, key=words.index) == ["contest.py", *files[:3]]


CHOSEN = """
def kl_of(logps, ref_logps, kind="k1"):
    d = logps - ref_logps
    if kind == "k2":
        return d**2 / 2
    return d

def compute_loss(logps, ref_logps, mask):
    return (kl_of(logps, ref_logps, config.kind) * mask).sum() / mask.sum()

def shape_rewards(rewards, old_logps, ref_logps, kind="k2"):
    rewards = rewards - 0.1 * kl_of(old_logps, ref_logps, kind)
    return rewards

class Config:
    kind: str = "k1"
"""


def test_the_default_variant_is_told_as_such_and_first(tree):
    """What an option keeps is said of that variant alone, wherever the option is defined; forms also in rewards."""
    Path("code.py").write_text(CHOSEN)
    found = sorted((one["place"], one["form"], one["variant"]) for one in rows())
    assert [(place, form) for place, form, _ in found] == [(p, k) for p in ("loss", "reward") for k in ("k1", "k2")]
    told = list(Search(list(contents([Path("code.py")], [])), Store(None)))
    uses = {(one.place, one.form): " ".join(one.uses) for one in told}
    assert "puts k1 into the loss, as kind is 'k1' by default, " in uses["loss", "k1"].replace("config.kind", "kind")
    assert "puts k2 into the reward, as kind is 'k2' by default, " in uses["reward", "k2"]
    assert "default" not in uses["loss", "k2"] + uses["reward", "k1"]
    graded = [filled(one, report(ZERO, ["KL101"])) for one in reversed(told) if one.place == "loss"]
    assert text(Scan(graded)).index("k1 in the loss") < text(Scan(graded)).index("k2 in the loss")


def test_what_has_a_name_on_policy_alone_says_so():
    stale = report(ZERO)
    stale["gradients"][1]["identified"] = None
    found = filled(row("def kl_term(logp, old_logp): pass"), stale)
    assert text(Scan([found])).startswith("term in the loss: no gradient; no named gradient with stale rollouts\n")


def test_a_bonus_for_length_is_called_that():
    bonus, penalty = (filled(row(FRESH), report({"inverse_length_of2": sign}, ["KL101"])) for sign in (1.0, -1.0))
    assert "term in the loss: no KL but a bonus for length, ∇E_π[1/(L_1+L_2)] (KL101)" in text(Scan([bonus]))
    assert "follows −∇E_π[1/(L_1+L_2)] (KL101)" in text(Scan([penalty]))


def test_a_finding_is_told_where_it_is_used(tree):
    used = ["GRPOTrainer.compute_loss, trl/x.py:3071", "PPO.step, ppo.py:7"]
    options = {used[0]: ["kind is 'k1' by default"]}
    found = filled(row(FRESH, place="helper", form="k1", used=used, defaults=options), report(ZERO, ["KL101"]))
    told = "GRPOTrainer.compute_loss puts k1 into the loss, as kind is 'k1' by default, trl/x.py:3071"
    for form in FORMATS.values():
        if form is not FORMATS["json"]:
            assert told in " ".join(form(Scan([found])).split())
    assert json.loads(FORMATS["json"](Scan([found])))["terms"][0]["used"] == used
    rewards = Scan([replace(found, place="reward")])
    told = "compute_loss puts k1 into the reward, as kind is 'k1' by default, trl/x.py:3071, and 1 more)"
    assert told in " ".join(text(rewards).split())
    assert "PPO.step puts k1 into the loss, ppo.py:7" in " ".join(text(Scan([found]), Terminal(verbose=True)).split())


def test_names_of_a_kl_in_which_nothing_was_recognised_are_listed_and_counted(tree, monkeypatch):
    names = [f"losses.py:{line} kl_{line}" for line in range(1, 40)]

    class Unread(Search):
        unread = property(lambda self: names, lambda self, value: None)

    monkeypatch.setattr("kltest.scanning.scan.Search", Unread)
    code, words = scan()
    assert (code, words.splitlines()[-1]) == (0, "1 of 1 variants graded; 39 named KL and not recognised")
    assert "named KL and not recognised: losses.py:1 kl_1, losses.py:2 kl_2," in words
    assert (words.count("\n") < 10, "losses.py:39 kl_39" in words) == (True, False)
    assert "losses.py:39 kl_39" in scan("--verbose")[1]
    assert "- named KL and not recognised: losses.py:39 kl_39\n" in scan("--output", "markdown")[1]
    assert json.loads(scan("--output", "json")[1])["unread"] == names
    Path("code.py").write_text("x = 1\n")
    code, words = scan()
    assert (code, words.splitlines()[-1]) == (5, "39 named KL and not recognised")
    names.clear()
    assert scan() == (5, "no KL term in 1 file (1 lines)\n")


def test_variables_named_kl_in_which_nothing_is_recognised_are_counted(tree):
    Path("code.py").write_text(
        "def train(policy, batch):\n"
        "    logprobs = policy(batch['ids'])\n"
        "    kl = logprobs.exp().sum()\n"
        "    approx_kl = (batch['old_logprobs'] - logprobs).mean()\n"
        "    mean_kl = kl.mean()\n"
        "    loss = (kl * batch['advantages']).mean()\n"
        "    return loss, {'kl': approx_kl, 'mean': mean_kl}\n"
    )
    code, words = scan()
    assert (code, words.splitlines()[-1]) == (5, "1 named KL and not recognised")
    assert "named KL and not recognised: code.py:3 train: kl" in words


# The first screen.

FORMULA = "(log π - log ref).clamp(-10, 10).exp()·mask / mask.sum(-1, keepdim=True).clamp(min=1.0) - (log π - log ref)"
PATH = "a_library/trainer/of_some_length/losses.py"


def ten():
    """Ten terms, of each kind of answer; no two of them are said in the same words."""
    fine, right = report({"local_reverse_kl": 1.0}, ["KL301"]), report(RIGHT, ["KL505"])
    answers = [
        ("loss", fine),
        ("loss", None),
        ("reward", report(ZERO, ["KL101"])),
        ("loss", report(ZERO, ["KL101"])),
        ("loss", report(None, ["KL105"])),
        ("reward", report(RIGHT)),
        ("loss", report({"local_forward_kl": 1.0}, ["KL102", "KL204"])),
        ("helper", report({"reverse_kl": -2.0})),
        ("advantage", right),
        ("loss", report({"chi_square": 0.5, "total_variation": 1.5}, ["KL105"])),
    ]
    places = [{"place": place, "spot": f"{PATH}:{line}", "file": PATH} for line, (place, _) in enumerate(answers, 1)]
    rows = [row(FRESH, **place, function="Trainer.compute_the_loss", variant="", formula=FORMULA) for place in places]
    rows[1].why, rows[1].state = "weigh(…) is not arithmetic that is known", "not run"
    rows[4] = replace(rows[4], form="k4")
    done = [filled(each, known) if known else each for each, (_, known) in zip(rows, answers, strict=True)]
    done[4].directions = {"reverse_kl": -0.5, "forward_kl": 0.25}
    return done


SAID = [
    "term in the loss: no gradient (KL101)",
    "term in the loss: follows the other direction, KL(ref‖π) (KL102, KL204)",
    "term in the loss: follows 0.5·∇½χ²(π‖ref) + 1.5·∇TV(π, ref) (KL105)",
    "term in the reward: no gradient (KL101)",
    "term of a helper: against 2 × ∇KL(π‖ref) (KL105)",
    "term in the advantage: follows ∇KL(π‖ref), but KL505: ",
    "k4 in the loss: no named gradient; against ∇KL(π‖ref), cosine down to -0.50",
    "term in the loss is fine: next-token part of ∇KL(π‖ref); KL301 once rollouts are stale",
    "term in the reward is fine: ∇KL(π‖ref)",
    "not run: weigh(…) is not arithmetic that is known",
]


@pytest.mark.parametrize(("width", "rest"), [(80, "1 unnamed, 2 passed"), (100, "2 passed")])
def test_the_first_screen_has_errors_in_losses_first_and_at_most_twenty_lines(width, rest):
    lines = text(Scan(ten()), Terminal(width=width)).splitlines()
    assert (len(lines) <= 20, max(map(len, lines)) <= width) == (True, True)
    assert (lines[0].startswith(SAID[0]), lines[-1]) == (True, "8 of 10 variants graded")
    told = " ".join(" ".join(lines).split())
    shown = [told.find(words) for words in SAID]
    left = sum(int(part.split()[0]) for part in rest.split(", "))
    *first, last = shown
    assert (first[-left:], [*first[:-left], last]) == ([-1] * left, sorted(shown)[left:])
    assert f"and {rest}: --verbose" in lines


def test_no_finding_and_no_reason_why_something_was_not_run_gives_way():
    several = ten()
    other = replace(several[1], spot=f"{PATH}:99", why="nothing says what gamma is")
    findings = [replace(each, spot=f"{PATH}:{number}") for number, each in enumerate(several[2:3] * 9, 40)]
    for number, each in enumerate(findings):
        each.gradients = {"current": f"{number + 2}*reverse_kl", "stale": ""}
        each.found = ["KL101"]
    lines = text(Scan([*several[:2], other, *findings]), Terminal(width=80)).splitlines()
    told = " ".join(" ".join(lines).split())
    assert [f"follows {number + 2} × ∇KL(π‖ref)" in told for number in range(9)] == [True] * 9
    assert ("not run: nothing says what gamma is" in told, f"not run: {several[1].why}" in told) == (True, True)


def test_the_last_lines_count_variants_findings_first():
    found = ten()
    assert text(Scan(found)).splitlines()[-2].endswith(": 6 findings, 1 unnamed, 2 passed, 1 not run")
    first, second = (replace(found[3], variant=name, spot=f"{PATH}:3") for name in "ab")
    assert text(Scan([found[1], first, second], 1, 9)).splitlines()[-2] == (
        "2 KL terms in 1 file (9 lines), 3 variants: 2 findings, 1 not run"
    )


def test_commands_are_quoted_for_a_shell(tree):
    finding = replace(ten()[3], file="sp ace/ü/pad.py", line=2)
    assert "`kltest scan 'sp ace/ü/pad.py:2' --fix`" in text(Scan([finding]))
    Path("of may.json").write_text("{}")
    code, words = scan("--baseline", "of may.json")
    assert (code, "`kltest scan --output 'json:of may.json'`" in words) == (2, True)


def test_lines_that_were_asked_for_are_named(tree):
    Path("code.py").write_text(f"import torch\n{K2}")
    assert scan("code.py:1") == (5, "no KL term on line 1 of code.py (3 lines)\n")
    assert "1 KL term on line 3 of code.py (3 lines): 1 passed" in scan("code.py:3")[1]


def test_terms_are_told_whatever_else_is_said():
    told = Scan(ten(), left_out=[f"{number}.py: no Python" for number in range(40)])
    lines = text(told).splitlines()
    assert lines[0].startswith(SAID[0])
    assert sum(line.startswith("not read: ") for line in lines) == 40
    many = [replace(each, variant=f"n={number}", spot=f"{PATH}:3") for number in range(60) for each in ten()[3:4]]
    lines = text(Scan(many)).splitlines()
    assert (lines[0].startswith(SAID[0]), "[n=59]" in " ".join(lines)) == (True, True)


@pytest.mark.parametrize("width", [80, 100])
def test_verbose_says_all_of_all_terms_with_formulas_whole(width):
    told = " ".join(text(Scan(ten()), Terminal(width=width, verbose=True)).split())
    places = [told.index(words) for words in SAID]
    assert places == sorted(places)
    assert told.count(FORMULA) == 10 + 6  # of each, and of the findings in front
    assert "ragged, current: E_π[Σ_t ∇KL_t(ref‖π)]" in told
    assert "on-policy local_reverse_kl, off-policy local_reverse_kl; " in told


def test_a_small_screen_shows_the_formulas_of_findings_and_where_others_stand():
    found = ten()
    lines = text(Scan([found[0], found[5], found[6]])).splitlines()
    assert lines[0] == SAID[1]
    assert FORMULA in " ".join(" ".join(lines[1:4]).split())
    assert "…" not in "".join(lines)
    line = found[6].line
    assert lines[-3] == f"Next: `kltest explain KL102`, `kltest scan {PATH}:{line} --fix`."
    assert "Next:" not in text(Scan([found[0]])) + text(Scan(found), Terminal(verbose=True))
    assert f"  {PATH}:1 Trainer.compute_the_loss" in lines
    crowded = [replace(found[1], why=f"why {number}", spot=f"{PATH}:3") for number in range(40)]
    assert text(Scan(crowded)).splitlines()[-3].startswith("Not run? Write it as a function")
    same = [replace(found[0], variant=kind) for kind in ("kind='k2'", "kind='full'")]
    assert text(Scan(same)).splitlines()[0] == SAID[7]
    assert text(Scan(same)).count("is fine") == 1


def test_what_a_term_was_declared_or_excused_to_follow_is_said():
    declared = filled(row(FRESH, declared="zero"), report(ZERO, verdict="confirmed"))
    assert "term in the loss, as declared: no gradient\n" in text(Scan([declared]))
    wrong = filled(row(FRESH, declared="zero"), report(RIGHT, ["KL106"]))
    assert "term in the loss: follows ∇KL(π‖ref), not zero as declared (KL106)" in text(Scan([wrong]))
    excused = filled(row(FRESH, ignored={"KL101": "logged only"}), report(ZERO, ["KL101"]))
    assert "term in the loss, excused: no gradient\n" in text(Scan([excused]))
    known = replace(wrong, known=True)
    assert "in the baseline: term in the loss: follows" in text(Scan([known]))


# Changed lines.


@pytest.fixture
def repository(tree):
    Path("code.py").write_text(HELPED)
    Path("means.py").write_text(MEAN)
    Path(".gitignore").write_text(".cache\nclone\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    return tree


def changed(reference="HEAD"):
    code, text = scan("--changed-since", reference)
    return code, int(next(line for line in text.splitlines() if " KL term" in line).replace("no KL", "0").split()[0])


def test_only_what_changed_is_graded(repository):
    assert changed() == (0, 0)
    Path("new file.py").write_text(K2)
    assert changed() == (1, 1), "a file that git does not know yet is new"
    Path("new file.py").unlink()
    Path("means.py").write_text(MEAN.replace("values.mean()", "values.sum()"))
    assert changed() == (1, 1), "a helper of the term is part of it"
    git("checkout", ".")
    git("mv", "code.py", "moved.py")
    assert changed() == (0, 0), "a file that is only renamed has not changed"
    Path("moved.py").write_text(HELPED.replace("** 2", "** 4"))
    assert changed() == (1, 1)
    Path("sub").mkdir()
    os.chdir("sub")
    assert scan("..", "--changed-since", "HEAD")[0] == 1


def test_what_others_changed_since_is_not_looked_at(repository):
    git("checkout", "-b", "own")
    Path("own.txt").write_text("x")
    git("add", ".")
    git("commit", "-m", "own")
    git("checkout", "main")
    Path("code.py").write_text(HELPED.replace("** 2", "** 4"))
    git("commit", "-am", "theirs")
    git("checkout", "own")
    assert changed("main") == (0, 0)


def test_git_that_knows_nothing_is_said_in_one_line(repository, tmp_path, monkeypatch):
    for reference in ("nowhere", "--output=x"):
        code, text = scan(f"--changed-since={reference}")
        assert (code, text.count("\n")) == (2, 1)
        assert f"git knows no commit {reference}" in text
    git("commit", "--allow-empty", "-m", "second")
    git("clone", "--depth", "1", f"file://{tmp_path}", "clone")
    os.chdir("clone")
    code, text = scan("--changed-since", "HEAD~1")
    assert (code, "the clone is shallow" in text) == (2, True)
    assert changed("HEAD") == (0, 0)
    os.chdir("..")
    with monkeypatch.context() as patched:
        patched.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
        outside = tmp_path / "clone" / ".git"  # a folder of git is no tree of files
        assert "is in no repository" in scan(outside, "--changed-since", "HEAD")[1]
        patched.setenv("PATH", "")
        assert "needs git" in scan("--changed-since", "HEAD")[1]


# SARIF and annotations.

SARIF = json.loads((Path(__file__).parent / "sarif.json").read_text(encoding="utf-8"))


def sarif():
    text = scan("--output", "sarif")[1]
    jsonschema.validate(json.loads(text), SARIF)
    (run,) = json.loads(text)["runs"]
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        region = result["locations"][0]["physicalLocation"]["region"]
        assert region["startLine"] <= region["endLine"]
    return run["results"]


def places(results):
    found = [each["locations"][0]["physicalLocation"] for each in results]
    return [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in found]


def test_sarif_is_what_code_scanning_reads(tree, monkeypatch):
    assert sarif() == []
    tree["report"] = report({"forward_kl": 1.0}, ["KL102", "KL204"], warnings=["KL507"])
    Path("a folder").mkdir()
    Path("code.py").rename("a folder/é.py")
    first = sarif()
    assert [(each["ruleId"], each["level"]) for each in first] == [
        ("KL102", "error"),
        ("KL204", "error"),
        ("KL507", "warning"),
    ]
    assert set(places(first)) == {("a%20folder/%C3%A9.py", 2)}
    Path("a folder/é.py").write_text("\n# moved\n\n" + K2)
    second = sarif()
    assert set(places(second)) == {("a%20folder/%C3%A9.py", 5)}
    fingerprints = [[each["partialFingerprints"] for each in results] for results in (first, second)]
    assert fingerprints[0] == fingerprints[1]
    assert len({json.dumps(each) for each in fingerprints[0]}) == 3
    monkeypatch.setenv("GITHUB_WORKSPACE", str(Path.cwd()))  # the root of the checkout, wherever kltest is called
    os.chdir("a folder")
    assert set(places(sarif())) == {("a%20folder/%C3%A9.py", 5)}
    assert "file=a folder/é.py,line=5,endLine=5," in scan("--output", "github")[1]


def test_annotations_say_what_fails_in_words(tree):
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    tree["report"]["checks"][0]["message"] = "It is the other direction. Found bandit: x."
    follows = "KL term in the loss, loss: follows forward_kl; under a stale sampler forward_kl."
    assert scan("--output", "github")[1].endswith(f"title=kltest KL102::{follows} KL102: It is the other direction.\n")
    assert sarif()[0]["message"]["text"] == f"It is the other direction. {follows} Found bandit: x."
    tree["report"] = UNNAMED  # which is held against nobody
    text = scan("--output", "github")[1]
    assert "::warning file=code.py,line=2,endLine=2,title=kltest unnamed::" in text
    assert "follows an unnamed gradient; under a stale sampler an unnamed gradient.\n" in text
    assert "KL105" not in scan()[1]


def test_no_more_results_than_are_read(tree, monkeypatch):
    monkeypatch.setattr("kltest.render.sarif.MOST_RESULTS", 2)
    tree["report"] = report({"forward_kl": 1.0}, ["KL102", "KL204"], warnings=["KL507"])
    assert [each["level"] for each in sarif()] == ["error", "error"]


def test_a_term_of_a_notebook_is_annotated_on_its_line_of_the_file(tree):
    Path("code.py").unlink()
    tree["report"] = report({"forward_kl": 1.0}, ["KL102"])
    lines = ["%%bash\n", "ls\n"], ["broken ("], ["%pip install x\n", *K2.splitlines(keepends=True)]
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": each} for each in lines]
    Path("a.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}, indent=1))
    line = next(
        n
        for n, text in enumerate(Path("a.ipynb").read_text().splitlines(), 1)
        if "ref_logp)" in text and "return" in text
    )
    assert places(sarif()) == [("a.ipynb", line)]
    assert f"file=a.ipynb,line={line},endLine={line}," in scan("--output", "github")[1]
    assert "a.ipynb:cell 3:3" in scan()[1]
    Path("a.ipynb").write_text(json.dumps({"cells": cells}))  # a file of one line
    assert places(sarif()) == [("a.ipynb", 1)]


def answering(monkeypatch, *answers):
    """Let the judge answer at once, in this order, without a child; returns the answers that are left."""
    left = list(answers)

    def grade(*_):
        return left.pop(0)
        yield

    monkeypatch.setattr("kltest.scanning.judge.grade", grade)
    return left


def row(source="x", **more):
    place = {"file": "a.py", "line": 1, "last": 1, "spot": "a.py:1", "function": "f", "place": "loss"}
    return Row(**{**place, "variant": "", "formula": "", "source": source, **more})


def test_a_term_that_stands_twice_is_graded_once_and_a_lasting_report_is_kept(tmp_path, monkeypatch):
    lasting, passing = ({**report(RIGHT), "lasts": lasts} for lasts in (True, False))
    left = answering(monkeypatch, lasting, passing)
    with Judge(1, 60.0, Store(tmp_path)) as judge:
        done = list(judge.judged([row(), row("y"), row("y"), row(why="no arithmetic")]))
    assert sorted(each.status for each in done) == ["not run", "passed", "passed", "passed"]
    assert (left, judge.asked, judge.done) == ([], 3, 3)
    assert len(list(tmp_path.glob("*.json"))) == 1
    left = answering(monkeypatch, passing)
    with Judge(1, 60.0, Store(tmp_path)) as judge:
        assert {each.status for each in judge.judged([row(), row("y")])} == {"passed"}
    assert left == []


def test_ctrl_c_shows_and_keeps_what_was_graded(tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLTEST_SCAN_CACHE", "kept")
    for name, power in (("a.py", 2), ("b.py", 4)):
        Path(name).write_text(K2.replace("** 2", f"** {power}"))
    answering(monkeypatch, *[{**report(RIGHT), "lasts": True}] * 2)
    with monkeypatch.context() as patched:
        patched.setattr("kltest.sweeps.progress.Progress.advance", interrupt)
        code, text = scan("--output", "json:scan.json")
    assert (code, "interrupted; 0 of 1 variants found so far not graded; the rest is kept" in text) == (130, True)
    assert [term["status"] for term in json.loads(Path("scan.json").read_text())["terms"]] == ["passed"]
    assert len(list(Path("kept").glob("*.json"))) == 1
    assert scan()[0] == 0
    assert len(list(Path("kept").glob("*.json"))) == 3  # the other one, and what was searched


def test_ctrl_c_while_files_are_read_shows_what_was_found(tmp_path, monkeypatch):
    def interrupt(self, what):
        read.append(what)
        if len(read) > 1:
            raise KeyboardInterrupt

    read: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLTEST_SCAN_CACHE", "kept")
    for name, power in (("a.py", 2), ("b.py", 4)):
        Path(name).write_text(K2.replace("** 2", f"** {power}"))
    monkeypatch.setattr("kltest.sweeps.progress.Progress.say", interrupt)
    code, text = scan("--output", "json:scan.json")
    assert (code, "interrupted; 1 of 1 variants found so far not graded" in text) == (130, True)
    assert [(term["file"], term["status"]) for term in json.loads(Path("scan.json").read_text())["terms"]] == [
        ("a.py", "not graded")
    ]
    assert read == ["reading a.py (1 of 2)", "reading b.py (2 of 2)"]
    assert not Path("kept").exists()


# Bad input.


def test_what_cannot_be_read_is_a_line_and_the_rest_goes_on(tree, tmp_path):
    good = K2.encode()
    files = {
        "syntax.py": b"def f(:\n",
        "latin.py": b"# \xe9t\xe9\n" + good,
        "utf16.py": K2.encode("utf-16"),
        "null.py": good + b"\x00",
        "coding.py": b"# coding: nonsense\n" + good,
        "deep.py": b"x = " + b"-" * 200_000 + b"1\n",
        "broken.ipynb": b'{"cells": [',
        "list.ipynb": b"[1]",
    }
    for name, content in files.items():
        Path(name).write_bytes(content)
    Path("declared.py").write_bytes(b"# coding: latin-1\n# \xe9t\xe9\n" + good)
    Path("marked.py").write_bytes(b"\xef\xbb\xbf" + good)
    Path("empty.ipynb").write_text("{}")
    Path("gone.py").symlink_to("nowhere.py")
    Path("loop.py").symlink_to("loop.py")
    Path("circle").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo("pipe.py")
    Path("large.py").write_bytes(b"#" * 5_000_001)
    code, text = scan("--output", "json")
    found = json.loads(text)
    assert code == 0
    assert {row["file"] for row in found["terms"]} == {"code.py", "declared.py", "marked.py"}
    wrong = {*files, "gone.py", "loop.py", "pipe.py", "large.py"}
    assert {line.partition(":")[0] for line in found["left_out"]} == wrong
    assert len(found["left_out"]) == len(wrong)
    assert all("\n" not in line for line in found["left_out"])
    told = scan()[1]
    assert sum(line.startswith("not read: ") for line in told.splitlines()) == len(wrong)


def test_a_file_that_is_no_python_and_one_that_is_missing(tree, tmp_path):
    Path("notes.txt").write_text("x")
    assert scan("notes.txt", "code.py")[0] == 0
    code, text = scan("notes.txt")
    assert (code, "not read: notes.txt: neither Python" in text) == (5, True)
    code, text = scan("code.py", "missing")
    assert (code, text) == (2, "kltest: there is no file or folder missing\n")


@pytest.mark.scheduled
def test_a_long_generated_file_is_read(tree):
    Path("code.py").write_text("".join(f"x_{n} = 1\n" for n in range(50_000)) + K2)
    (row,) = rows()
    assert row["line"] == 50_002


def test_a_report_that_cannot_be_written_is_told_before_the_work(tree, monkeypatch):
    monkeypatch.setattr("kltest.scanning.scan.scan", lambda *_, **__: pytest.fail("it began"))
    for wrong in ("xml", "json:", "json:missing/x.json", "json:."):
        code, text = scan("--output", wrong)
        assert (code, text.count("\n")) == (2, 1), text


def test_a_cache_that_cannot_be_written_saves_nothing(tree, monkeypatch):
    Path("file").write_text("")
    monkeypatch.setenv("KLTEST_SCAN_CACHE", "file/below")
    assert scan()[0] == 0


def test_a_line_of_a_notebook_past_its_end_is_its_last(tmp_path):
    source = Source(tmp_path, "", None, [(1, 1, 5)])
    assert (source.line(9), source.place(9)) == (5, f"{tmp_path}:cell 1:1")


def test_a_folder_without_permission_is_a_line(tree, monkeypatch):
    if os.getuid() == 0:
        refused = PermissionError(13, "Permission denied")
        monkeypatch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(refused))
    else:
        Path("code.py").chmod(0)
    left_out = []
    assert list(parsed(contents([Path()], left_out), left_out)) == []
    assert left_out == ["code.py: Permission denied"]
