"""The finetune experiment: its tasks and runs are as they say, its claims can fail, its recorded runs are whole."""

import ast
import math
from itertools import groupby, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from trial import CHECKOUT, Trial

from kltest.errors import UsageError
from kltest.finetune.tasks import Problem, task_named
from kltest.reproduce.experiment import Experiment, Request, compute_all
from kltest.reproduce.frames import Missing

pytest.importorskip("transformers")

TRIAL = Trial("finetune")
ANALYSIS, RUNS, SETTINGS, TASK = TRIAL.modules("claims", "experiment", "settings", "task")
SPREAD = CHECKOUT.load("experiments", "spread")
lines = CHECKOUT.load("experiments", "records").lines
AUDITED, AUDITS, MATCHED, SWEEP = TRIAL.modules("audited", "audits", "matched", "sweep")
ABOUT_AUDITS = {sentence for sentence, *_ in AUDITED.claims.questions}
# A reference of one update, and runs of a few: what they find means nothing.
SMALL = ("updates=16", "prompts=2", "group_size=2", "eval_prompts=8", "reference_steps=1", "part=run")


pytestmark = pytest.mark.usefixtures("models_folder")


@pytest.fixture(scope="module")
def task():
    return TASK.Lines()


# KL at the end of each term at β = 0.1, and how it falls with β. At free length a term of tokens lets lines grow.
ENDS = {"leave-one-out": 2.0, "k2-loss": 4.0, "k3-loss": 4.0, "none": 30.0, "k1-loss": 35.0}


def end_of(task, variant, beta, seed):
    """What a run ends with in a world in which everything is as predicted, seeds a little apart."""
    stale = (*SETTINGS.STALE, SETTINGS.JOINT)
    wobble = 1 + 0.02 * (seed - 1.5) + 0.003 * stale.index(variant) if variant in stale else 1.0
    found = {"kl_low": 0.0, "kl_high": 99.0, "entropy": 1.0, "length_held_out": 8.0, "gold_held_out": 0.1}
    if variant == "none":
        return found | {"kl": 30.0 * wobble, "reward_held_out": 2.0, "gold_held_out": 0.0 if task == "free" else 0.1}
    if variant in stale:
        kl = {SETTINGS.STALE[0]: 2.0, SETTINGS.JOINT: 1.0}.get(variant, 4.0)
        return found | {"kl": kl, "reward_held_out": 0.5 * wobble}
    kl = (
        35.0
        if variant == "k1-loss"
        else ENDS[variant] * (0.1 / beta) ** 0.5 * (1 + 0.01 * math.sin(7 * seed + 50 * beta))
    )
    reward, gold = 0.3 + 0.1 * math.log(kl) + 0.001 * seed, 0.2 - 0.02 * math.log(kl)
    if task == "free":
        local = variant in SETTINGS.LOCAL
        length = 6 + 2 * local * math.log(kl) + 2 * local + 0.1 * math.sin(11 * seed + 90 * beta)
        gold = 0.9 - 0.05 * length + 0.001 * math.sin(5 * seed + 70 * beta)
        found |= {"length_held_out": length}
        reward -= 0.1 * local
    return found | {"kl": kl, "reward_held_out": reward, "gold_held_out": gold}


def lacking_of(seeds):
    """What final policies of k2 lack in such a world."""
    for seed, task, beta in product(range(seeds), SETTINGS.TASKS, SETTINGS.BETAS):
        variance = (5.0 if task == "free" else 0.5) * (1 + 0.01 * math.sin(3 * seed + 70 * beta))
        found = {"kl": 2.0, "kl_variance": variance, "reward_variance": 0.5, "covariance": 0.1}
        missed = {"missed": 1.0 if task == "free" else 0.3 + 0.01 * seed} if beta == SETTINGS.BETA else {}
        yield {"seed": seed, "task": task, "beta": beta}, found | missed


def synthetic(part="committed", seeds=4):
    found = []
    for one in SETTINGS.SETTINGS.configurations(SETTINGS.SETTINGS.grid("full", ["part=run"], seeds)):
        last = end_of(*(one[name] for name in ("task", "variant", "beta", "seed")))
        first = {**dict.fromkeys(last, 0.0), "gold_held_out": 0.3}
        found += [{**one, "part": part, "update": update, **row} for update, row in ((0, first), (32, last))]
    if part == "committed":
        found += [{**one, "part": "lacking", **row} for one, row in lacking_of(seeds)]
    return found


def test_the_gold_score_is_that_of_the_librarys_lines(task):
    """Each of its own completions has it, and no line that is no Python or that names what nobody uses."""
    for prompt, completion in TASK.lines()[::500]:
        ast.parse(f"def _():\n {prompt}{completion}")
        assert task.gold(Problem(prompt, completion, ""), completion) == 1
    for completion in ("None)", "(", "no_such_name_in_it", "x", "'\\"):
        assert task.gold(Problem("self.data = ", "", ""), completion) == 0
    # Of two names the library uses one.
    assert task.gold(Problem("self.data = ", "", ""), "no_such_name_in_it(self)") == 0.5
    drawn = [{one.prompt for one in task.draw(split, 200, np.random.default_rng(0))} for split in ("train", "held-out")]
    assert not drawn[0] & drawn[1]
    with pytest.raises(UsageError, match="no problems out of distribution"):
        task.draw("out-of-distribution", 1, np.random.default_rng(0))
    assert task_named(f"{TASK.__file__}:Lines").name == task.name


def test_the_lines_are_those_that_are_shipped(task, monkeypatch):
    """No file of the interpreter is read; their digest, with which references are kept, is that of recorded runs."""
    monkeypatch.setattr("sysconfig.get_paths", lambda: pytest.fail("the interpreter's library was looked for"))
    TASK.lines.cache_clear()
    assert len(TASK.lines()) == 10_591
    assert task.name == "lines:d5264fb4"
    for beginning, rest in TASK.lines():
        assert len(beginning) <= TASK.LONGEST_PROMPT
        assert 2 <= len(rest) <= TASK.LONGEST
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (Path(TASK.__file__).parent / "LICENCE-lines.txt").read_text()


def test_of_fixed_length_the_same_line_has_the_same_scores(task):
    """Each completion has as many characters; reward and gold score are those of the task of free length."""
    ends = TASK.Ends()
    assert ends.fixed_length
    for problem in ends.problems[::400]:
        assert len(problem.completion) == ends.max_tokens == 8
        beginning, rest = TASK.halves(problem.prompt + problem.completion)
        whole = Problem(beginning, rest, "")
        assert whole in task.problems
        assert ends.reward(problem, problem.completion) == task.reward(whole, rest)
        assert ends.gold(problem, problem.completion) == task.gold(whole, rest) == 1
        assert ends.gold(problem, "(" * 8) == 0


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
            margin = sign * TASK.SCALE * task.reward(Problem("return ", "", ""), text)
            slope -= sign * TASK._grams(text)["s"] / (1 + math.exp(margin))
    assert slope + 2 * TASK.RIDGE * weights["s"] == pytest.approx(0, abs=0.05)
    fresh = [TASK._babbled(follows, generator) for _ in range(600)]
    scores = np.array([task.reward(Problem("return ", "", ""), text) for text in fresh])
    good = np.array([TASK.valid("x = ", text) for text in fresh])
    assert 0.6 < stats.mannwhitneyu(scores[good], scores[~good]).statistic / (good.sum() * (~good).sum()) < 0.85
    assert TASK.SCALE * task.reward(Problem("return ", "", ""), "~") == pytest.approx(
        intercept + sum(weights.get(gram, 0.0) for gram in ("\x02", "~", "\x03", "\x02~", "~\x03", "\x02~\x03"))
    )


@pytest.mark.scheduled
def test_a_run_is_as_its_settings_say():
    """At the start the policy is the reference; a row an evaluation, to the last update; at fixed length no line is
    shorter."""
    found = TRIAL.computed(*SMALL, "variant=none,k2-loss", "beta=0,0.1")
    assert {(row["task"], row["variant"]) for row in found} == set(product(("free", "fixed"), ("none", "k2-loss")))
    for _, own in groupby(found, key=lambda row: (row["task"], row["variant"])):
        rows = list(own)
        assert [row["update"] for row in rows] == [0, 8, 16]
        assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)  # rounding of float32
        assert rows[-1]["kl"] > 0
        assert {row["length_held_out"] for row in rows if row["task"] == "fixed"} <= {8.0}


def test_as_many_updates_with_a_stale_sampler_are_fewer_rounds_and_the_reward_has_one_ratio():
    """The reward's part of the gradient is the same whatever the KL term is."""
    from kltest.finetune.objective import Fields, Objective

    one = Experiment(CHECKOUT, "finetune").configurations(Request(changes=SMALL))[0]
    logp = torch.log(torch.tensor([[0.5, 0.2], [0.3, 0.4], [0.9, 0.6], [0.1, 0.8]]))
    fields = Fields(
        logp,
        logp - 0.1,
        logp.flip(0),
        torch.ones(4, 2).bool(),
        torch.zeros(4, 2).long(),
        torch.arange(4.0),
        torch.zeros(4),
    )
    ratio = (logp - logp.flip(0)).sum(1, keepdim=True).exp()
    others = torch.tensor([[-2.0], [-2 / 3], [2 / 3], [2.0]])  # R less the mean of the three others
    for variant in ("k3-loss", *SETTINGS.STALE):
        settings = RUNS.settings_for({**one, "variant": variant, "beta": 0.1})
        rounds = 16 // (SETTINGS.STALE_EPOCHS if variant in SETTINGS.STALE else 1)
        assert (settings.steps, settings.steps * settings.inner_epochs) == (rounds, 16)
        torch.testing.assert_close(Objective(settings)._ascent(fields), (others * ratio).expand(4, 2))


@pytest.mark.scheduled
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


def test_the_recorded_runs_are_whole():
    """All evaluations of every run of each seed that counts."""
    found = RUNS.committed()
    seeds = sorted({row["seed"] for row in found})
    assert seeds == list(range(len(seeds)))
    full = SETTINGS.SETTINGS.configurations(SETTINGS.SETTINGS.grid("full", ["part=run"], max(len(seeds), 1)))
    wanted = {tuple(one[name] for name in ANALYSIS.KEY) for one in full if one["seed"] in seeds}
    updates = range(0, SETTINGS.SAME["updates"] + 1, SETTINGS.SAME["updates"] // SETTINGS.EVALUATIONS)
    assert sorted((*(row[name] for name in ANALYSIS.KEY), row["update"]) for row in found) == sorted(
        (*one, update) for one in wanted for update in updates
    )
    assert all(row["kl_low"] <= row["kl"] <= row["kl_high"] and row["seconds"] > 0 for row in found)


def test_the_recorded_runs_show_the_predictions_that_are_claims_and_no_others():
    """One that they come to show, with more seeds, is to be moved to the claims; without rows nothing was run."""
    parts = compute_all(CHECKOUT, "finetune", [{"part": part, "_content": ""} for part in ("committed", "lacking")])
    frame = ANALYSIS.tidy([row for rows in parts for row in rows])
    assert {claim.agrees for claim in ANALYSIS.findings(frame)} == {True}
    assert {claim.agrees for claim in ANALYSIS.not_shown(frame)} == {False}
    shown = [row["shown"] for row in ANALYSIS.tables(frame)["predictions"]]
    assert shown == ["yes"] * len(ANALYSIS.findings.questions) + ["no"] * len(ANALYSIS.not_shown.questions)
    assert set(TRIAL.verdicts([]).values()) == {None}
    assert ANALYSIS.tables([]) == {}
    assert ANALYSIS.numbers([]).empty


def test_few_seeds_are_not_judged():
    """Intervals of so few are no evidence, neither for a claim nor against it."""
    few = synthetic(seeds=SETTINGS.FEWEST - 1)
    assert set(TRIAL.verdicts(few).values()) == {None}
    assert {row["shown"] for row in ANALYSIS.tables(ANALYSIS.tidy(few))["predictions"]} == {"not run"}


def test_all_that_was_predicted_holds_where_it_is_true():
    rows = ANALYSIS.tidy(synthetic())
    assert {claim.agrees for claim in (*ANALYSIS.findings(rows), *ANALYSIS.not_shown(rows))} == {True}
    assert len({claim.claim for claim in (*ANALYSIS.findings(rows), *ANALYSIS.not_shown(rows))}) == 16


def test_without_transformers_only_committed_rows_are_there(monkeypatch):
    monkeypatch.setattr(RUNS, "find_spec", lambda name: None)
    found = Experiment(CHECKOUT, "finetune").configurations(Request())
    assert [one["part"] for one in found] == ["committed", *RUNS.TABLES]


def test_a_sweep_goes_on_from_its_file(tmp_path, monkeypatch):
    """A torn line is made again; what is there is not; what is written is what was computed."""
    path, small = tmp_path / "sweep.csv", {"updates": 4, "prompts": 2, "group_size": 2, "eval_prompts": 8}
    small |= {"reference_steps": 1}
    all_of = SETTINGS.SETTINGS.configurations(SETTINGS.SETTINGS.grid("full", ["part=run"], 1))
    few = [one for one in all_of if one["variant"] == "k2-loss" and one["beta"] == 0.1]
    monkeypatch.setattr(
        SWEEP, "SETTINGS", SimpleNamespace(grid=lambda *_: None, configurations=lambda _: map(dict, few))
    )
    SWEEP.sweep(path, 1, **small)
    text = path.read_text()
    header, first, second = text.splitlines(keepends=True)
    path.write_text(header + first + second[:-9])
    SWEEP.sweep(path, 1, **small)
    without_seconds = [{**line, "seconds": 0} for line in lines(path)]
    path.write_text(text)
    assert without_seconds == [{**line, "seconds": 0} for line in lines(path)]
    for line, one in zip(without_seconds, few, strict=True):
        rows = RUNS.compute({**one, **small})
        assert line["kl"] == [row["kl"] for row in rows]
        assert line["task"] == one["task"]


def test_terms_are_compared_at_equal_kl_and_given_length():
    """By hand: curves that differ by a constant at equal KL; a gap that is the length's alone."""
    kl = [1.0, 2.0, 4.0, 8.0]
    rows = [
        {"seed": 0, "variant": variant, "kl": scale * one, "gold": math.log(scale * one) + shift, "length": length}
        for variant, scale, shift in (("leave-one-out", 1.0, 0.0), ("k2-loss", 3.0, 0.25), ("k3-loss", 0.5, -1.0))
        for one, length in zip(kl, (5.0, 7.0, 12.0, 13.0), strict=True)
    ]
    ends = pd.DataFrame(rows)
    assert MATCHED.at_kl(ends, "gold", "k2-loss")[0] == pytest.approx(0.25)
    assert MATCHED.at_kl(ends, "gold", "k3-loss")[0] == pytest.approx(-1.0)
    ends["length"] += ends["variant"].map({"leave-one-out": 0.0, "k2-loss": 3.0, "k3-loss": 1.0})
    ends["gold"] = 1.0 - 0.1 * ends["length"] + 0.004 * ends["length"] ** 2
    assert MATCHED.given(ends, "gold", ["kl"]).abs().max(axis=None) > 0.05
    assert MATCHED.given(ends, "gold", ["length"]).abs().max(axis=None) == pytest.approx(0, abs=1e-12)
    with pytest.raises(Missing):
        MATCHED.at_kl(
            ends.assign(kl=ends["kl"].where(ends["variant"] == "k2-loss", ends["kl"] / 100)), "gold", "k2-loss"
        )


@pytest.fixture(scope="module")
def audits():
    """Those that are committed."""
    (rows,) = compute_all(CHECKOUT, "finetune", [{"part": "audits", "_content": ""}])
    return rows


def test_the_committed_audits_are_whole_and_as_the_atlas_says(audits):
    assert [row["estimator"] for row in audits] == list(SETTINGS.AUDITS["estimators"])
    verdicts = TRIAL.verdicts(audits)
    assert {verdicts[claim] for claim in ABOUT_AUDITS} == {True}


@pytest.mark.scheduled
def test_an_audit_is_written_as_it_is_read(tmp_path, monkeypatch):
    """Of an untrained model, after two updates: what it finds means nothing."""
    from kltest.files import as_csv

    few = {"updates": 16, "prompts": 2, "group_size": 2, "eval_prompts": 8, "reference_steps": 1}
    settings = RUNS.settings_for({**SETTINGS.SAME, **SETTINGS.AUDITS["policy"], **few})
    (row,) = AUDITS.audits(settings, ("k3-loss",), 8)
    assert row["units"] == 8
    assert row["distance_low"] <= row["distance"]
    (tmp_path / "audits.csv").write_text(as_csv([row]), encoding="utf-8")
    monkeypatch.setitem(RUNS.TABLES, "audits", tmp_path / "audits.csv")
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


def made_again():
    return [{**row, "part": "run"} for row in synthetic(seeds=1) if row.get("variant") == "k2-loss"]


@pytest.mark.scheduled
def test_each_claim_can_fail():
    TRIAL.claims_can_fail([*synthetic(), *made_again()])


def test_runs_made_again_are_held_to_the_recorded_ones():
    again = made_again()
    sentence = next(iter(ANALYSIS.of_now.questions))[0]
    assert TRIAL.verdicts([*synthetic(), *again])[sentence] is True
    far = [{**row, "kl": 2 * row["kl"]} for row in again]
    assert TRIAL.verdicts([*synthetic(), *far])[sentence] is False
    other = [{**row, "updates": 64} for row in far]
    assert TRIAL.verdicts([*synthetic(), *other])[sentence] is None


def test_each_claim_about_audits_can_fail(audits):
    TRIAL.claims_can_fail(audits, "audited")


@pytest.mark.scheduled
def test_what_final_policies_lack_is_measured_as_it_is_read(tmp_path, monkeypatch):
    """After a few updates of hardly trained models; the reward is that of the task, and K sums to the KL."""
    from kltest.files import as_csv

    lacking = TRIAL.modules("lacking")[0]
    monkeypatch.setitem(lacking.LACKING, "prompts", 16)
    monkeypatch.setitem(lacking.LACKING, "units", 16)
    monkeypatch.setattr(lacking, "BETAS", (SETTINGS.BETA,))
    few = {"updates": 16, "prompts": 2, "group_size": 2, "eval_prompts": 8, "reference_steps": 1}
    rows = list(lacking.lacking(0, **few))
    assert [(row["task"], row["beta"]) for row in rows] == [(name, SETTINGS.BETA) for name in SETTINGS.TASKS]
    assert all(row["kl"] > 0 and row["kl_variance"] > 0 for row in rows)
    assert all(row["covariance"] ** 2 <= row["kl_variance"] * row["reward_variance"] for row in rows)
    (tmp_path / "lacking.csv").write_text(as_csv(rows), encoding="utf-8")
    monkeypatch.setitem(RUNS.TABLES, "lacking", tmp_path / "lacking.csv")
    ((read, *_),) = compute_all(CHECKOUT, "finetune", [{"part": "lacking", "_content": ""}])
    assert read == {"part": "lacking", **rows[0]}


def test_second_moments_are_those_within_a_prompt():
    """A difference among prompts counts for nothing; by numpy, prompt by prompt."""
    (lacking,) = TRIAL.modules("lacking")
    generator = np.random.default_rng(0)
    summed, reward = generator.standard_normal((2, 6, 4)) + 10 * np.arange(6)[:, None]
    found = lacking.second_moments(torch.tensor(summed).reshape(-1), torch.tensor(reward).reshape(-1), 4)
    each = np.stack([np.cov(*pair) for pair in zip(summed, reward, strict=True)]).mean(axis=0)
    assert found["kl_variance"] == pytest.approx(each[0, 0])
    assert found["reward_variance"] == pytest.approx(each[1, 1])
    assert found["covariance"] == pytest.approx(each[0, 1])


def test_policies_that_were_measured_are_those_of_the_recorded_runs():
    """KL and reward where runs made again end are the recorded ones, to what other rollouts and a processor change."""
    recorded = {
        (row["seed"], row["task"], row["beta"]): row for row in lines(RUNS.COMMITTED) if row["variant"] == "k2-loss"
    }
    measured = lines(RUNS.TABLES["lacking"])
    assert len(measured) == len(recorded) == 2 * len(SETTINGS.BETAS) * SETTINGS.SEEDS
    for row in measured:
        before = recorded[row["seed"], row["task"], row["beta"]]
        assert 0.7 < row["kl"] / before["kl"][-1] < 1.43
        assert abs(row["reward"] - before["reward_held_out"][-1]) < 0.15
