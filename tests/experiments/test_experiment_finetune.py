"""The finetune experiment: its task and its runs are as they say, its claims can fail, its committed sweep is whole."""

import ast
import math

import numpy as np
import pytest
from scipy import stats
from trial import CHECKOUT, Trial

from kltest.errors import UsageError
from kltest.finetune.tasks import Problem, task_named
from kltest.reproduce.experiment import Experiment, Request, compute_all

pytest.importorskip("transformers")

TRIAL = Trial("finetune")
ANALYSIS, RUNS, SETTINGS, TASK = TRIAL.modules("claims", "experiment", "settings", "task")
SPREAD = CHECKOUT.load("experiments", "spread")
AUDITED, AUDITS = TRIAL.modules("audited", "audits")
ABOUT_AUDITS = {sentence for sentence, *_ in AUDITED.claims.questions}
# A reference of one update, and runs of a few: what they find means nothing.
SMALL = ("updates=16", "prompts=2", "group_size=2", "eval_prompts=8", "reference_steps=1", "part=run")
AT_END = {"kl": 2.0, "reward_held_out": 0.6, "gold_held_out": 0.5, "length_held_out": 9.0, "entropy": 1.0}


pytestmark = pytest.mark.usefixtures("models_folder")


@pytest.fixture(scope="module")
def task():
    return TASK.Lines()


def synthetic(part="committed"):
    """A sweep in which everything is as claimed, with seeds a little apart."""
    ends = {
        "none": {"kl": 30.0, "reward_held_out": 2.0, "gold_held_out": 0.0},
        "k1-loss": {"kl": 35.0, "reward_held_out": 1.5, "gold_held_out": 0.0},
        "k2-loss": {"kl": 4.0, "gold_held_out": 0.2},
        "k3-loss": {"kl": 4.0, "gold_held_out": 0.2},
        "leave-one-out": {"kl": 1.0},
        "stale:k1-reward-sequence-ratio": {"kl": 5.0},
        "stale:k2-loss": {"kl": 4.0},
        "stale:k3-ratio": {"kl": 4.0},
    }
    found = []
    for variant in SETTINGS.VARIANTS:
        for beta in (0.0, *SETTINGS.BETAS):
            one = {"part": part, "variant": variant, "beta": beta, **SETTINGS.SAME}
            if not SETTINGS.applies(one):
                continue
            for seed in range(4):
                wobble = 1 + 0.02 * (seed - 1.5)
                last = {name: value * wobble for name, value in {**AT_END, **ends.get(variant, {})}.items()}
                last |= {"kl_low": 0.9 * last["kl"], "kl_high": 1.1 * last["kl"]}
                first = {name: 0.0 for name in last} | {"gold_held_out": 0.3}
                found += [{**one, "seed": seed, "update": update, **row} for update, row in ((0, first), (96, last))]
    return found


def test_the_gold_score_is_that_of_the_librarys_lines(task):
    """Each of its own completions has it, and no line that is no Python or that names what nobody uses."""
    for prompt, completion in TASK.lines()[::500]:
        ast.parse(f"def _():\n {prompt}{completion}")
        assert task.gold(Problem(prompt, completion, ""), completion) == 1
    for completion in ("None)", "(", "no_such_name_in_it", "x", "'\\"):
        assert task.gold(Problem("self.data = ", "", ""), completion) == 0
    drawn = [{one.prompt for one in task.draw(split, 200, np.random.default_rng(0))} for split in ("train", "held-out")]
    assert not drawn[0] & drawn[1]
    with pytest.raises(UsageError, match="no problems out of distribution"):
        task.draw("out-of-distribution", 1, np.random.default_rng(0))
    assert task_named(f"{TASK.__file__}:Lines").name == task.name


def test_the_reward_model_is_a_fitted_logistic_regression(task):
    """Its gradient vanishes on its own examples, made again here; it tells others better than a coin, and no better."""
    weights, intercept = task.model
    generator = np.random.default_rng(0)
    follows = TASK._followers([completion for _, completion in TASK.lines()])
    examples = {True: [], False: []}
    lines = TASK.lines()
    while min(map(len, examples.values())) < 200:
        text = TASK._babbled(follows, generator)
        examples[TASK.valid(lines[generator.integers(len(lines))][0], text)].append(text)
    slope = 0.0
    for label, sign in ((True, 1.0), (False, -1.0)):
        for text in examples[label][:200]:
            margin = sign * TASK.SCALE * task.reward(Problem("", "", ""), text)
            slope -= sign * TASK._grams(text)["s"] / (1 + math.exp(margin))
    assert slope + 2 * TASK.RIDGE * weights["s"] == pytest.approx(0, abs=0.05)
    fresh = [TASK._babbled(follows, generator) for _ in range(600)]
    scores = np.array([task.reward(Problem("", "", ""), text) for text in fresh])
    good = np.array([TASK.valid("x = ", text) for text in fresh])
    assert 0.6 < stats.mannwhitneyu(scores[good], scores[~good]).statistic / (good.sum() * (~good).sum()) < 0.85
    assert TASK.SCALE * task.reward(Problem("", "", ""), "~") == pytest.approx(
        intercept + sum(weights.get(gram, 0.0) for gram in ("\x02", "~", "\x03", "\x02~", "~\x03", "\x02~\x03"))
    )


def test_a_run_is_as_its_settings_say():
    """At the start the policy is the reference; a row an evaluation, to the last update."""
    found = TRIAL.computed(*SMALL, "variant=none,k2-loss", "beta=0,0.1")
    assert {row["variant"] for row in found} == {"none", "k2-loss"}
    for variant in ("none", "k2-loss"):
        own = [row for row in found if row["variant"] == variant]
        assert [row["update"] for row in own] == list(range(0, 17, 2))
        assert own[0]["kl"] == pytest.approx(0, abs=1e-6)  # rounding of float32
        assert own[-1]["kl"] > 0


def test_as_many_updates_with_a_stale_sampler_are_fewer_rounds():
    one = Experiment(CHECKOUT, "finetune").configurations(Request(changes=SMALL))[0]
    for variant, rounds in (("k3-loss", 16), ("stale:k3-ratio", 4)):
        settings = RUNS.settings_for({**one, "variant": variant, "beta": 0.1})
        assert (settings.steps, settings.steps * settings.inner_epochs) == (rounds, 16)


def test_with_a_current_sampler_the_ratio_turns_k3_into_k2():
    """ρ·k3 has the weight ρ·u, and ρ is 1: each sample pulls as k2 in the loss does."""
    from kltest.finetune.run import run
    from kltest.finetune.settings import settings_of

    same = {"model": "tiny:30k", "task": "addition:1", "reference_reward": 0.02, "steps": 4, "checkpoint_every": 0}
    same |= {"prompts": 32, "beta": 1.0, "eval_prompts": 8, "gradient_every": 0, "learning_rate": 1e-2}
    found = {kl: run(settings_of({**same, "kl": kl}), quiet=True) for kl in ("k2-loss", "k3-ratio", "k3-loss")}
    lines = list(zip(*found.values(), strict=True))
    for k2, ratio, _ in lines[:-1]:
        # Float32 weights, after updates whose gradients were rounded differently.
        assert ratio["gradient_norm"] == pytest.approx(k2["gradient_norm"], rel=1e-3)
    assert any(abs(k3["gradient_norm"] - k2["gradient_norm"]) > 1e-2 * k2["gradient_norm"] for k2, _, k3 in lines[:-1])


def test_the_committed_sweep_is_whole():
    """All evaluations of every run of the full scale."""
    full = Experiment(CHECKOUT, "finetune").configurations(Request(scale="full", changes=("part=run",)))
    found = RUNS.committed()
    wanted = {(one["variant"], one["beta"], one["seed"]) for one in full}
    updates = range(0, SETTINGS.SAME["updates"] + 1, SETTINGS.SAME["updates"] // SETTINGS.EVALUATIONS)
    assert sorted((row["variant"], row["beta"], row["seed"], row["update"]) for row in found) == sorted(
        (*one, update) for one in wanted for update in updates
    )
    assert all(row["kl_low"] <= row["kl"] <= row["kl_high"] for row in found)


def test_findings_hold_of_the_committed_sweep_and_without_rows_nothing_was_run():
    (rows,) = compute_all(CHECKOUT, "finetune", [{"part": "committed", "_content": ""}])
    found = {
        claim: agrees for claim, agrees in TRIAL.verdicts(ANALYSIS.tidy(rows)).items() if "committed results" in claim
    }
    assert len(found) == len(ANALYSIS.findings.questions)
    assert set(found.values()) == {True}
    assert set(TRIAL.verdicts([]).values()) == {None}
    assert ANALYSIS.tables([]) == {}
    assert ANALYSIS.numbers([]).empty


def test_without_transformers_only_committed_rows_are_there(monkeypatch):
    monkeypatch.setattr(RUNS, "find_spec", lambda name: None)
    found = Experiment(CHECKOUT, "finetune").configurations(Request())
    assert [one["part"] for one in found] == ["committed", "audits"]


def test_a_sweep_made_again_is_asked_the_same_and_written_as_it_is_read(tmp_path, monkeypatch):
    from kltest.files import as_csv

    committed = RUNS.committed()
    again = [{**row, "part": "run"} for row in committed]
    found = TRIAL.verdicts(ANALYSIS.tidy([*committed, *again]))
    assert len(found) == 1 + 2 * len(ANALYSIS.findings.questions) + len(AUDITED.claims.questions)
    assert [claim for claim, agrees in found.items() if agrees is not (None if claim in ABOUT_AUDITS else True)] == []
    (tmp_path / "sweep.csv").write_text(as_csv(ANALYSIS.tables(again)["sweep"]), encoding="utf-8")
    monkeypatch.setattr(RUNS, "COMMITTED", tmp_path / "sweep.csv")
    key = lambda row: (row["variant"], row["beta"], row["seed"], row["update"])  # noqa: E731
    assert sorted(RUNS.committed(), key=key) == sorted(committed, key=key)


@pytest.fixture(scope="module")
def audits():
    """Those that are committed."""
    (rows,) = compute_all(CHECKOUT, "finetune", [{"part": "audits", "_content": ""}])
    return rows


def test_the_committed_audits_are_whole_and_as_the_atlas_says(audits):
    assert [row["estimator"] for row in audits] == list(SETTINGS.AUDITS["estimators"])
    verdicts = TRIAL.verdicts(audits)
    assert {verdicts[claim] for claim in ABOUT_AUDITS} == {True}
    # The policy is that of the sweep's run.
    (run,) = (row for row in RUNS.committed() if row["update"] == 96 and SETTINGS.AUDITED.items() <= row.items())
    assert {row["kl"] for row in audits} == {run["kl"]}


def test_an_audit_is_written_as_it_is_read(tmp_path, monkeypatch):
    """Of an untrained model, after two updates: what it finds means nothing."""
    from kltest.files import as_csv

    few = {"updates": 16, "prompts": 2, "group_size": 2, "eval_prompts": 8, "reference_steps": 1}
    settings = RUNS.settings_for({**SETTINGS.SAME, **SETTINGS.AUDITED, **few})
    (row,) = AUDITS.audits(settings, ("k3-loss",), 8)
    assert row["units"] == 8
    assert row["distance_low"] <= row["distance"]
    (tmp_path / "audits.csv").write_text(as_csv([row]), encoding="utf-8")
    monkeypatch.setattr(RUNS, "AUDITED", tmp_path / "audits.csv")
    ((read,),) = compute_all(CHECKOUT, "finetune", [{"part": "audits", "_content": ""}])
    assert read == {"part": "audits", **{name: value for name, value in row.items() if value is not None}}


def test_intervals_are_scipys():
    values = [1.0, 1.4, 0.7, 1.1, 2.0]
    plain = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = SPREAD.interval(values)
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), plain.low, plain.high), rel=1e-12)
    logs = stats.ttest_1samp(np.log(values), 0).confidence_interval(0.9)
    found = SPREAD.geometric(values, 0.9)
    assert (found.low, found.high) == pytest.approx((math.exp(logs.low), math.exp(logs.high)), rel=1e-12)


@pytest.mark.parametrize("part", ["committed", "run"])
def test_each_claim_about_runs_can_fail(part):
    TRIAL.claims_can_fail(synthetic(part))


def test_each_claim_about_audits_can_fail(audits):
    TRIAL.claims_can_fail(audits, "audited")
