"""The finetune experiment: its runs are as its settings say, its claims can fail, its committed sweep is whole."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from trial import CHECKOUT, Trial

from kltest.reproduce.experiment import Experiment, Request, compute_all

pytest.importorskip("transformers")

TRIAL = Trial("finetune")
ANALYSIS, RUNS, SPREAD, SETTINGS, OPTIMUM = TRIAL.modules("analysis", "experiment", "spread", "settings", "optimum")
# A reference that any reward contents, and runs of a few updates: what they find means nothing.
SMALL = ("updates=16", "prompts=2", "group_size=2", "eval_prompts=8", "reference_reward=0", "part=run")


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLTEST_MODELS", str(tmp_path_factory.mktemp("models")))
        yield


@pytest.fixture(scope="module")
def rows():
    return TRIAL.computed(*SMALL, "variant=none,k2-loss", "beta=0,0.1")


def applies(variant, beta):
    return SETTINGS.applies({"part": "run", "variant": variant, "beta": beta})


def around(name, value, reach):
    return {name: value, f"{name}_low": value - reach, f"{name}_high": value + reach}


def synthetic(part="committed"):
    """A sweep in which everything is as claimed, with five seeds a little apart."""
    cosines = {"k1-reward": 1.0, "k2-loss": 0.98, "k3-loss": 0.995, "stale:k2-loss": 0.9, "stale:k3-ratio": 0.995}
    found = []
    for variant in SETTINGS.VARIANTS:
        none = variant.endswith("none")
        for beta in (beta for beta in (0.0, *SETTINGS.BETAS) if applies(variant, beta)):
            for seed in range(5):
                wobble = 1 + 0.02 * (seed - 2)
                kl = 2.0 if none else 2.0 * (1 + 3 * beta) if variant == "k1-loss" else 1.0 / (1 + 3 * beta)
                one = {name: SETTINGS.SETTINGS.values[name] for name in SETTINGS.PARTS["run"][3:]}
                one = {"part": part, "seed": seed, "variant": variant, "beta": beta, **one}
                reward = 0.8 if variant == "optimum" else 0.5 * wobble
                if variant.startswith("slow"):
                    kl, reward = 0.02, 0.32
                ends = {"kl_low": 0.9 * kl * wobble, "kl_high": 1.1 * kl * wobble}
                found.append({**one, "update": 0, "reward_held_out": 0.3, "kl": 0.0, "kl_low": 0.0, "kl_high": 0.0})
                last = {**one, "update": 64, "reward_held_out": reward, "kl": kl * wobble, **ends}
                if variant != "optimum":
                    last["kl_out_of_distribution"] = 3 * kl * wobble
                if variant in cosines and beta == SETTINGS.BETA_OF_GRADIENTS:
                    cosine = cosines[variant] + 0.005 * (seed - 2)
                    for which in ("kl", "stale") if "stale" in variant else ("kl",):
                        last |= around(f"{which}_gradient_size", 1.0, 0.2)
                        last |= around(f"{which}_gradient_cosine", cosine, 0.1)
                    last["kl_gradient_noise"] = 3.0
                elif variant == "k1-loss" and beta == SETTINGS.BETA_OF_GRADIENTS:
                    last |= around("kl_gradient_size", 0.1, 0.1) | {"kl_gradient_noise": 3.0}
                found.append(last)
    return found


def test_a_run_is_as_its_settings_say(rows):
    """At the start the policy is the reference; rows are at the start, every quarter and at the end."""
    assert {row["variant"] for row in rows} == {"none", "k2-loss"}
    for own in ANALYSIS.runs(rows, "run").values():
        assert own[0]["update"] == 0
        assert own[0]["kl"] == pytest.approx(0, abs=1e-6)  # rounding of float32
        assert own[-1]["update"] == 16
        assert own[-1]["kl"] > 0
    measured = [row["update"] for row in rows if "kl_gradient_size" in row or "kl_gradient_noise" in row]
    assert set(measured) <= {4, 8, 12, 16}


def test_as_many_updates_with_a_stale_sampler_are_fewer_rounds():
    one = Experiment(CHECKOUT, "finetune").configurations(Request(changes=SMALL))[0]
    for variant, rounds in (("k3-loss", 16), ("stale:k3-ratio", 4)):
        settings = RUNS.settings_of({**one, "variant": variant, "beta": 0.1})
        assert (settings.steps, settings.steps * settings.inner_epochs) == (rounds, 16)
        assert settings.resolved.ratio == ("none" if rounds == 16 else "sequence")


def test_with_a_current_sampler_the_ratio_turns_k3_into_k2():
    """ρ·k3 has the weight ρ·u, and ρ is 1: each sample pulls as k2 in the loss does."""
    from kltest.finetune.run import run
    from kltest.finetune.settings import settings_of

    same = {**SETTINGS.RUN, "model": "tiny:30k", "task": "addition:1", "reference_reward": 0.02, "steps": 4}
    same |= {"prompts": 32, "beta": 1.0, "eval_prompts": 8, "gradient_every": 0, "learning_rate": 1e-2}
    found = {kl: run(settings_of({**same, "kl": kl}), quiet=True) for kl in ("k2-loss", "k3-ratio", "k3-loss")}
    lines = list(zip(*found.values(), strict=True))
    for k2, ratio, _ in lines[:-1]:
        # Float32 weights, after updates whose gradients were rounded differently.
        assert ratio["gradient_norm"] == pytest.approx(k2["gradient_norm"], rel=1e-3)
    assert any(abs(k3["gradient_norm"] - k2["gradient_norm"]) > 1e-2 * k2["gradient_norm"] for k2, _, k3 in lines[:-1])


def test_the_committed_sweep_is_whole():
    """A row at the start and at the end of every run of the full scale."""
    full = Experiment(CHECKOUT, "finetune").configurations(Request(scale="full", changes=("part=run",)))
    found = ANALYSIS.runs(RUNS.committed(), "committed")
    assert set(found) == {(one["variant"], one["beta"], one["seed"]) for one in full}
    for one in full:
        own = found[one["variant"], one["beta"], one["seed"]]
        assert (own[0]["update"], own[-1]["update"]) == (0, one["updates"])
        assert {name: own[-1][name] for name in SETTINGS.PARTS["run"]} == {
            name: one[name] for name in SETTINGS.PARTS["run"]
        }
        assert all(row["kl_low"] <= row["kl"] <= row["kl_high"] for row in own if "kl" in row)


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
    assert [one["part"] for one in found] == ["committed"]


def test_the_committed_sweep_made_again_is_the_committed_one():
    committed = RUNS.committed()
    found = TRIAL.verdicts(ANALYSIS.tidy([*committed, *({**row, "part": "run"} for row in committed)]))
    assert len(found) == 2 + 2 * len(ANALYSIS.findings.questions)
    assert set(found.values()) == {True}


def test_a_whole_sweep_made_now_is_asked_the_same_and_compared():
    rows = [*synthetic("run"), *synthetic()]
    found = TRIAL.verdicts(rows)
    assert set(found.values()) == {True}
    assert len(found) == 2 + 2 * len(ANALYSIS.findings.questions)


@pytest.mark.parametrize(
    ("words", "variants", "change"),
    [
        ("leaves its reference", ["none"], {"kl": 0.4}),
        ("rewards rise", ["k1-reward", "k2-loss", "k3-loss"], {"reward_held_out": 0.3}),
        ("hold the policy back at the largest", ["k3-loss"], {"kl": 2.5}),
        ("the more the larger", ["k2-loss"], {"kl": 0.5}),
        ("about the same KL", ["k3-loss"], {"kl": 1.5}),
        ("does not regularise", ["k1-loss"], {"kl": 1.0}),
        ("noise carries", ["k1-loss"], {"kl": 1.9}),
        ("not told from zero", ["k1-loss"], {"kl_gradient_size_low": 0.1, "kl_gradient_cosine": 0.5}),
        ("k1 in the reward follows", ["k1-reward"], {"kl_gradient_cosine": 0.9}),
        ("later tokens", ["k2-loss"], {"kl_gradient_cosine": 0.9}),
        ("follows another direction", ["k3-loss"], {"kl_gradient_cosine": 0.7}),
        ("same direction as k2", ["stale:k3-ratio"], {"kl_gradient_cosine": 0.9}),
        ("ratio holds", ["stale:k3-ratio"], {"kl": 2.5}),
        ("is not told from this direction", ["stale:k3-ratio"], {"stale_gradient_cosine": 0.95}),
        ("turns away there", ["stale:k2-loss"], {"stale_gradient_cosine": 1.0}),
        ("on longer numbers", ["k3-loss"], {"kl_out_of_distribution": 7.0}),
        ("hold it back there", ["k1-loss"], {"kl_out_of_distribution": 2.0}),
        ("no run does better", ["k2-loss"], {"reward_held_out": 1.0, "kl": 0.01}),
        ("than its reference has", ["k3-loss"], {"reward_held_out": 0.6}),
        ("with a baseline on the penalty", ["leave-one-out"], {"kl": 0.02}),
        ("an eighth of the learning rate", ["slow:k1-reward"], {"kl": 0.2}),
    ],
)
def test_a_planted_result_is_told(words, variants, change):
    def planted(row):
        wobble = 1 + 0.001 * (row["seed"] - 2)
        mine = row["variant"] in variants and row["update"] == 64
        return {**row, **{name: value * wobble for name, value in change.items()}} if mine else row

    rows = synthetic()
    TRIAL.tells(rows, words, [planted(row) for row in rows])


def test_runs_that_end_elsewhere_are_told():
    """Rounding may lead a run as far as another seed, and no farther; another task is not compared."""
    claim = "runs made now end where the committed runs of their settings did"
    committed, now = synthetic(), [row for row in synthetic("run") if row["variant"] == "none"]
    assert TRIAL.verdicts([*now, *committed])[claim] is True
    for factor, agrees in ((1.02, True), (1.5, False)):
        moved = [{**row, "kl": row["kl"] * factor} for row in now]
        assert TRIAL.verdicts([*moved, *committed])[claim] is agrees
    other = [{**row, "task": "countdown"} for row in now]
    assert TRIAL.verdicts([*other, *committed])[claim] is None


def test_tables_have_a_line_for_every_variant():
    """In that of gradients, for those that have one."""
    tables = ANALYSIS.tables(synthetic())
    assert [line["KL term"] for line in tables["ends"]] == list(SETTINGS.VARIANTS)
    assert [line["KL term"] for line in tables["gradients"]] == [
        "k1-reward", "k2-loss", "k3-loss", "k1-loss", "stale:k2-loss", "stale:k3-ratio"
    ]  # fmt: skip
    assert tables["gradients"][-1]["cosine, stale"].startswith("0.995 [")


@pytest.mark.parametrize("beta", [0.001, 0.1, 0.3, 1.0, 50.0])
def test_the_optimum_is_that_of_a_bandit_of_two(beta):
    """One prompt is a bandit whose variants are right and wrong; the objective is β·log Z, and nothing overflows."""
    from kltest.environments import Instance, bandit
    from kltest.truth import optimum, value

    chances = np.array([0.0, 0.02, 0.3, 0.97, 1.0])
    reward, kl = OPTIMUM.optimal(chances, beta)
    if beta > 0.01:  # beyond, Z has no place in a float
        normaliser = 1 - chances + chances * np.exp(1 / beta)
        assert reward - beta * kl == pytest.approx(beta * np.log(normaliser), rel=1e-9, abs=1e-12)
    for p, earned, far in zip(chances[1:4], reward[1:4], kl[1:4], strict=True):
        environment = replace(bandit(2), reward=np.array([[1.0, 0.0]]))
        reference = np.log([[p, 1 - p]])
        best = optimum(environment, reference, beta)
        assert earned == pytest.approx(np.exp(best.policy[0, 0]), rel=1e-9)
        assert far == pytest.approx(value("reverse_kl", Instance.of(environment, best.policy, reference)), rel=1e-6)
    assert (reward[0], kl[0], reward[4], kl[4]) == pytest.approx((0, 0, 1, 0), abs=1e-12)


def test_the_optimum_is_computed_from_the_reference_of_the_run():
    """Its first row is the reference: what a run earns before its first update, but for other prompts and rollouts."""
    rows = TRIAL.computed(*SMALL, "eval_prompts=64", "variant=none,optimum", "beta=0,1")
    found = ANALYSIS.runs(rows, "run")
    (none,), (best,) = (
        [own for (variant, *_), own in found.items() if variant == name] for name in ("none", "optimum")
    )
    assert [row["update"] for row in best] == [0, 16]
    assert best[0]["reward_held_out_low"] - 0.2 < none[0]["reward_held_out"] < best[0]["reward_held_out_high"] + 0.2
    assert best[1]["reward_held_out"] > best[0]["reward_held_out"]
    assert best[1]["kl"] > 0


def test_intervals_are_scipys():
    values, others = [1.0, 1.4, 0.7, 1.1, 2.0], [0.8, 1.5, 0.4, 0.9, 1.2]
    plain = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = SPREAD.interval(values)
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), plain.low, plain.high), rel=1e-12)
    ratio = stats.ttest_rel(np.log(values), np.log(others)).confidence_interval(0.95)
    found = SPREAD.paired(dict(enumerate(values)), dict(enumerate(others)))
    assert (found.low, found.high) == pytest.approx((math.exp(ratio.low), math.exp(ratio.high)), rel=1e-12)
