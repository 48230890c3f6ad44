"""The main job itself, as a user runs it: every claim agrees, and a wrong result would be seen."""

import copy
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import processes
import pytest
import typst
from legible import faults, text_width
from PIL import Image
from trial import irrefutable

from kltest.estimators import registry
from kltest.identify.instances import instances
from kltest.loss.resolve import resolve
from kltest.moments import exact
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.frames import frame
from kltest.reproduce.typesetting import CITATION, cited, drawn, sources, staged, uncovered, written
from kltest.truth import gradient

ROOT = Path(__file__).parents[2]
PAPER = written(Checkout(ROOT))


# All of it is made by the workflow's job `reproduce` on every push, whose folder KLTEST_RESULTS names (what is there is
# not computed again), and weekly.
of_all = pytest.mark.scheduled


@pytest.fixture(scope="module")
def ran():
    return tuple(Checkout(ROOT).experiments())


@pytest.fixture(scope="module")
def results(ran, tmp_path_factory):
    there = os.environ.get("KLTEST_RESULTS")
    output = Path(there) if there else tmp_path_factory.mktemp("results")
    code = "from kltest.cli import main; main()"
    job = [sys.executable, "-c", code, "reproduce", "--output", output]
    done = processes.ran(*job, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    (output / "printed.txt").write_text(done.stdout, encoding="utf-8")
    return output


SAID = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from kltest.files import as_json, as_markdown
from kltest.reproduce.checkout import Checkout
from kltest.reproduce.frames import frame, records
checkout, results, names = Checkout(Path.cwd()), Path(sys.argv[1]), sys.argv[2:]
for name in names:
    analysis = checkout.load("experiments", name, "claims")
    rows = frame(json.loads((results / name / f"{name}.json").read_text()))
    files = {"claims.json": as_json([asdict(claim) for claim in analysis.claims(rows)])}
    tables = analysis.tables(rows) if hasattr(analysis, "tables") else {}
    files |= {f"{title}.md": as_markdown(lines) for title, lines in tables.items()}
    numbers = records(analysis.numbers(rows)) if hasattr(analysis, "numbers") else []
    print(json.dumps([name, numbers, files]))
"""


@of_all
def test_what_is_said_of_results_does_not_depend_on_how_words_are_hashed(ran, results):
    """The main job said it with one seed; another process says it of the same rows with another."""
    other = {"cwd": ROOT, "env": {**os.environ, "PYTHONHASHSEED": "2"}, "check": True}
    again = processes.ran(sys.executable, "-c", SAID, results, *ran, **other)
    said = [json.loads(line) for line in again.stdout.splitlines()]
    assert [name for name, *_ in said] == list(ran)
    for name, numbers, files in said:
        assert numbers == json.loads((results / name / "numbers.json").read_text())[:-1], "all but the score"
        for file, text in files.items():
            assert text == (results / name / file).read_text(encoding="utf-8"), (name, file)


@pytest.fixture(scope="module")
def rows(results):
    return json.loads((results / "atlas" / "atlas.json").read_text())


@pytest.fixture(scope="module")
def analysis():
    return Checkout(ROOT).load("experiments", "atlas", "claims")


@of_all
def test_every_estimator_environment_and_sampler_is_there(rows):
    cells = {(row["estimator"], row["environment"], row["sampler"]) for row in rows}
    environments = ("bandit", "sequence", "ragged", "mdp", "transformer")
    assert cells == {
        (name, environment, who) for name in registry() for environment in environments for who in ("current", "stale")
    }


@of_all
def test_every_claim_agrees(ran, results):
    claims = json.loads((results / "summary.json").read_text())
    judged = [claim for claim in claims if claim["experiment"] in ran]
    assert {claim["agrees"] for claim in judged} == {True}
    assert {claim["experiment"] for claim in judged} == set(ran)
    assert {claim["experiment"] for claim in claims} == set(Checkout(ROOT).experiments())
    printed = (results / "printed.txt").read_text(encoding="utf-8")
    assert f"{len(judged)} of {len(claims)} claims agree, 0 disagree, 0 not run" in printed


@of_all
def test_every_claim_is_disagreed_with_by_a_planted_result(ran, results):
    """A claim that no change of a measured column can refute says nothing."""
    for name in ran:
        analysis = Checkout(ROOT).load("experiments", name, "claims")
        rows, settings = (json.loads((results / name / f"{file}.json").read_text()) for file in (name, "settings"))
        assert irrefutable(analysis, frame(rows), settings) == []


@of_all
def test_every_figure_whose_results_are_there_is_drawn(ran, results):
    checkout = Checkout(ROOT)
    wanted = {name for name in checkout.figures() if set(sources(checkout, name)) <= set(ran)}
    for kind in ("pdf", "svg", "png"):
        assert {path.stem for path in (results / "figures").glob(f"*.{kind}")} == wanted
    assert (results / "paper" / "paper.pdf").is_file()


@of_all
def test_every_figure_can_be_read_as_it_is_printed(ran, results):
    """At the width of the paper's text; printed at nine tenths of it, the same words are too small."""
    checkout = Checkout(ROOT)
    width = text_width(PAPER)
    for name in checkout.figures():
        if set(sources(checkout, name)) <= set(ran):
            with checkout.load("figures", "style").styled():
                figure = drawn(checkout, name, results)
                assert (name, figure.get_figwidth()) == (name, pytest.approx(width))
                assert (name, faults(figure, width)) == (name, [])
                assert "6.3 pt" in " ".join(faults(figure, 0.9 * width))


@of_all
def test_what_the_papers_say_of_the_best_known_estimators(rows):
    """Tang & Munos 2025 (k3 in the loss, partial gradients), Liu et al. 2025 (k2 in the loss), Shah et al. 2025."""
    found = {(row["estimator"], row["environment"], row["sampler"]): row["identified"] for row in rows}
    for name, environment, expected in (
        ("k1-loss", "bandit", {"zero": 1.0}),
        ("k3-loss", "bandit", {"forward_kl": 1.0}),
        ("k3-loss", "sequence", {"local_forward_kl": 1.0}),
        ("k2-loss", "bandit", {"reverse_kl": 1.0}),
        ("k2-loss", "sequence", {"local_reverse_kl": 1.0}),
        ("k1-reward", "mdp", {"reverse_kl": 1.0}),
        ("k3-reward", "bandit", {"reverse_kl": 1.0, "forward_kl": -1.0}),
    ):
        assert found[name, environment, "current"] == pytest.approx(expected, abs=1e-9)


@of_all
@pytest.mark.parametrize(
    "identified",
    [{"forward_kl": 1.0}, {"reverse_kl": -1.0}, {"reverse_kl": 1.0 + 1e-6}, {"reverse_kl": 1.0, "zero": 1.0}, None],
)
def test_one_wrong_cell_is_a_disagreeing_claim(analysis, rows, identified):
    planted = copy.deepcopy(rows)
    cell = next(row for row in planted if (row["estimator"], row["environment"]) == ("k1-reward", "ragged"))
    assert cell["identified"] == pytest.approx({"reverse_kl": 1.0})
    cell["identified"] = identified
    wrong = [claim for claim in analysis.claims(analysis.tidy(planted)) if claim.agrees is not True]
    assert len(wrong) == 1
    assert "otherwise: k1-reward, ragged, current: " in wrong[0].found


@of_all
def test_a_missing_environment_is_not_agreement(analysis, rows):
    kept = [row for row in rows if (row["estimator"], row["environment"]) != ("k2-loss", "mdp")]
    claim, *_ = analysis.claims(kept)
    assert (claim.agrees, "cells missing: 2;" in claim.found) == (False, True)
    assert analysis.claims([])[0].agrees is None


@of_all
@pytest.mark.parametrize(
    ("words", "planted"),
    [("keeps the name", {"identified": {"local_forward_kl": 0.9}}), ("removes no bias", {"relative_bias": 1e-3})],
)
def test_a_wrong_name_or_bias_at_shared_weights_is_a_disagreeing_claim(analysis, rows, words, planted):
    wrong = [
        {**row, **planted} if (row["estimator"], row["environment"]) == ("k3-loss", "transformer") else row
        for row in rows
    ]
    verdicts = {claim.claim: claim.agrees for claim in analysis.claims(analysis.tidy(wrong))}
    assert {claim for claim, agrees in verdicts.items() if agrees is not True} == {c for c in verdicts if words in c}


@of_all
def test_the_bias_at_the_logits_of_a_transformer_is_that_of_its_loss_there(rows):
    """By the loss's own gradients over all rollouts, not by the name that was found."""
    cell = ("k3-loss", "transformer", "stale")
    (row,) = (row for row in rows if (row["estimator"], row["environment"], row["sampler"]) == cell)
    biases = []
    for instance in instances("transformer", 0):
        truth = gradient("reverse_kl", instance)
        found = exact(resolve("k3-loss"), instance, "stale").gradient
        biases.append(np.linalg.norm(found - truth) / np.linalg.norm(truth))
    assert row["bias_at_logits"] == pytest.approx(max(biases), rel=1e-10)


def test_every_estimator_is_defined_by_its_own_line_of_code(analysis):
    defined = {row["estimator"]: row["file, line: code"] for row in analysis.tables([])["definitions"]}
    assert defined.keys() == registry().keys()
    for code in defined.values():
        file, line = re.match(r"(\w+\.py), (\d+): ", code).groups()
        lines = (ROOT / "kltest" / "estimators" / file).read_text(encoding="utf-8").splitlines()
        assert lines[int(line) - 1].strip().startswith("return "), code
    assert defined["k3-loss"].endswith(": (-u).exp() - 1 + u")


@of_all
def test_unbiased_is_a_matter_of_the_gradient_alone(analysis, rows):
    for row in rows:
        if row["batch"] == 1:
            named = row["identified"] is not None and analysis.same(row["identified"], {"reverse_kl": 1.0})
            unbiased = row["relative_bias"] is not None and row["relative_bias"] < analysis.UNBIASED
            assert unbiased == named, row


def plain(quantity):
    """Extremes come in twos, of which one may be cited alone."""
    return quantity.removeprefix("smallest ").removeprefix("largest ")


@of_all
def test_the_papers_numbers_are_all_in_the_results_and_no_others(ran, results):
    assert len(cited(PAPER)) > 10
    missing = uncovered(PAPER, results)
    assert [number for number in missing if number.partition(":")[0] in ran] == []
    for name in ran:
        known = json.loads((results / name / "numbers.json").read_text(encoding="utf-8"))
        asked = {plain(dict(key)["quantity"]) for experiment, key in cited(PAPER) if experiment == name}
        assert {plain(one["quantity"]) for one in known} - asked == {"score"}, name


# Sections of the body, by their files; all else is the appendix.
BODY = ("introduction", "training", "setting", "missed", "language-model", "libraries", "recommendations", "related")


def test_the_text_of_the_body_has_few_numbers():
    """At most 120 that results give, tables aside, and five a paragraph at most."""
    sections = [(ROOT / "paper" / "sections" / f"{name}.typ").read_text(encoding="utf-8") for name in BODY]
    assert len(CITATION.findall("".join(sections))) <= 120
    for paragraph in "\n\n".join(sections).split("\n\n"):
        assert len(CITATION.findall(paragraph)) <= 5, paragraph[:80]


@of_all
def test_the_paper_has_ten_pages_and_fourteen_of_appendix(results):
    with staged(Checkout(ROOT), results) as root:
        ends = [
            int(
                typst.query(
                    str(root / "paper.typ"),
                    f"<{end}>",
                    root=str(root),
                    field="value",
                    ignore_system_fonts=True,
                    one=True,
                )
            )
            for end in ("last-page-of-body", "last-page-of-references", "last-page")
        ]
    body, references, last = ends
    assert body <= 10
    assert last - references <= 14


def test_no_number_of_a_result_is_typed_by_hand():
    """What is left of the text without markup, mathematics and citations has no digits but in k1, k2, k3."""
    for path in [ROOT / "paper" / "paper.typ", *(ROOT / "paper" / "sections").glob("*.typ")]:
        text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        if "*Abstract.*" in text:
            text = text.split("*Abstract.*")[1].split("#bibliography")[0]
        text = CITATION.sub("", text)
        text = re.sub(r"#(table|figure)\(.*?^\) <[\w-]+>", "", text, flags=re.DOTALL | re.MULTILINE)
        text = re.sub(r'\$[^$]*\$|`[^`]*`|DeepSeek-V3\.2|@[\w-]+|#set [^\n]*|(digits|figures): -?\d+|"[^"]*"', "", text)
        found = [line for line in re.findall(r".{0,40}\d.*", text) if re.search(r"(?<!\bk)(?<!\bKL)\d", line)]
        assert found == [], path.name


def in_colours_of(palette, file):
    """The picture in 64 colours: a quarter of the bytes, and no difference that a reader sees."""
    return Image.open(file).convert("RGB").quantize(palette=palette, dither=Image.Dither.NONE)


@of_all
def test_the_readmes_picture_is_the_figure(results):
    """Pixels, since another processor may round a bias, and so a shade, differently in the last place."""
    shown = Image.open(ROOT / "docs" / "atlas.png")
    drawn = in_colours_of(shown, results / "figures" / "atlas.png")
    again = "save results/figures/atlas.png, in its own 64 colours and then in those of that, as docs/atlas.png"
    assert shown.size == drawn.size, again
    shown, drawn = (np.asarray(picture.convert("RGB")) / 255 for picture in (shown, drawn))
    assert np.abs(shown - drawn).mean() < 1e-4, again


@of_all
def test_the_order_of_the_atlas_does_not_depend_on_rounding(rows):
    """Estimators that follow the same gradient are equally biased, whatever is left of it in the last places."""
    signs = np.random.default_rng(0).choice([-1, 1], size=(2, len(rows)))
    orders = [names_from_the_top([shifted(*each) for each in zip(rows, sign, strict=True)]) for sign in signs]
    assert len(orders[0]) == len(registry())
    assert orders == [names_from_the_top(rows)] * 2


def shifted(row, sign):
    bias = row["relative_bias"]
    return {**row, "relative_bias": None if bias is None else bias * (1 + 4 * sign * np.finfo(float).eps)}


def names_from_the_top(rows):
    (axes,) = Checkout(ROOT).load("figures", "atlas").draw(frame(rows)).axes
    known = [text for text in axes.texts if text.get_text() in registry()]
    return [text.get_text() for text in sorted(known, key=lambda text: text.get_position()[1])]
