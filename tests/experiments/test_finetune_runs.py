"""Runs of the language-model runner: gone on with after a kill, shared by processes, stopped with words."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import ran, until
from processes import written as has_lines
from typer.testing import CliRunner
from weekly import first

from kltest.cli import app
from kltest.errors import KltestError, UsageError
from kltest.finetune.settings import METRICS, Settings

pytest.importorskip("transformers")


from kltest.finetune import run as running
from kltest.finetune.checkpoints import RunFolder
from kltest.finetune.evaluation import compared, evaluate
from kltest.finetune.models import load
from kltest.finetune.objective import Fields, Objective, advantages
from kltest.finetune.picture import drawn
from kltest.finetune.run import run
from kltest.finetune.tasks import task_named
from kltest.language_models import generation
from kltest.samples.blocks import Sample

SIZES = {"model": "tiny:30k", "task": "addition:1", "steps": 6, "prompts": 4, "group_size": 2, "checkpoint_every": 2}
MEASURED = {"eval_every": 3, "eval_prompts": 16, "gradient_every": 4, "gradient_chunks": 3, "gradient_batches": 1}
REFERENCE = {"reference_steps": 200, "reference_reward": 0.3}
SMALL = Settings(**SIZES, **MEASURED, **REFERENCE, learning_rate=1e-3, beta=0.1, kl="k1-reward")
ARGUMENTS = [
    item for name, value in asdict(SMALL).items() if name != "kl_options" for item in ("--set", f"{name}={value}")
]


pytestmark = pytest.mark.usefixtures("models_folder")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, models_folder):
    folder = tmp_path_factory.mktemp("run")
    run(SMALL, folder, quiet=True)
    return folder


def of_file(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of(records, name):
    """The steps at which a metric was measured, and its values."""
    there = [record for record in records if name in record]
    return [record["step"] for record in there], [record[name] for record in there]


def command(*arguments):
    return [sys.executable, "-m", "kltest.cli", "finetune", *ARGUMENTS, *arguments]


@pytest.mark.scheduled
def test_what_is_written_down(finished):
    records = of_file(finished)
    assert [record["step"] for record in records] == list(range(7))
    assert set().union(*records) <= METRICS.keys()
    assert [record["step"] for record in records if "kl" in record] == [0, 3, 6]
    first, last = records[0], records[-1]
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)  # the policy is the reference, in float32
    assert last["kl_low"] < last["kl"] < last["kl_high"]
    assert last["kl"] > 0
    assert "reward" not in last
    assert all(record["sampler_gap"] < 1e-4 for record in records[:-1])  # float32, log-probs of order 1 to 10


def test_the_trained_model_is_as_others_read_it_and_can_be_trained_on(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(finished / "model")
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    ids = tokenizer("1+2=", return_tensors="pt")["input_ids"]
    state = torch.load(finished / "checkpoint.pt", weights_only=True)["model"]
    assert model(ids).logits.shape == (1, 4, len(tokenizer))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    settings = replace(SMALL, model=str(finished / "model"), steps=1, gradient_every=0)
    history = run(settings, quiet=True)
    assert of(history, "kl")[1][0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.scheduled
def test_killed_and_gone_on_with_it_writes_the_same_bytes(finished, tmp_path):
    """Killed for good (SIGKILL) once after a checkpoint and once between two, by what its metrics say."""
    folder = tmp_path / "run"
    for lines in (3, 4):
        process = subprocess.Popen(command("--output", str(folder)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        written = folder / "metrics.jsonl"
        until(has_lines, written, lines)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it was to be killed in the middle"
    with written.open("ab") as torn:
        torn.write(b'{"step": 5, "rew')
    done = ran(*command("--output", str(folder)))
    assert done.returncode == 0, done.stderr
    assert written.read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_keep_everything(finished, tmp_path, monkeypatch, number):
    folder, add = tmp_path / "run", RunFolder.add

    def interrupted(*line):
        add(*line)
        signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "add", interrupted)
        answer = CliRunner().invoke(app, ["finetune", *ARGUMENTS, "--output", str(folder)])
    assert answer.exit_code == 130, answer.output
    assert "run the same command to continue" in answer.output
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert state["step"] == len(of_file(folder)) == 1
    assert run(SMALL, folder, quiet=True)[-1]["step"] == 6
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_an_interrupt_before_the_first_step_does_not_say_that_something_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr("kltest.finetune.run.load", lambda *_: signal.raise_signal(signal.SIGTERM))
    answer = CliRunner().invoke(app, ["finetune", *ARGUMENTS, "--output", str(tmp_path)])
    assert answer.exit_code == 130, answer.output
    assert "no step is stored, and training of the reference starts again" in answer.output


def test_another_run_in_the_same_folder(finished, tmp_path):
    with pytest.raises(UsageError, match=r"other settings \(beta\)"):
        run(replace(SMALL, beta=0.2), finished, quiet=True)
    run(replace(SMALL, steps=0), tmp_path, quiet=True)
    assert len(run(replace(SMALL, steps=1), tmp_path, again=True, quiet=True)) == 2


TERMS = """
def rooted(logp, ref_logp):
    # Its derivative has no value where the policy is the reference.
    return ((logp - ref_logp) ** 2).sqrt()


def broken(logp, ref_logp):
    return (logp - ref_logp) / 0.0
"""


@pytest.mark.parametrize(
    ("changes", "words"),
    first(
        2,
        [
            ({"learning_rate": 1e30, "max_norm": 0.0, "eval_every": 0}, r"log-prob.* (nan|-inf).*learning_rate"),
            ({"kl": "rooted"}, "the gradient's norm is nan"),
            ({"kl": "broken"}, "broken returned nan"),
        ],
    ),
    ids=["policy", "gradient", "term"],
)
def test_what_is_not_finite_stops_the_run_and_says_where(tmp_path, changes, words):
    (tmp_path / "term.py").write_text(TERMS)
    term = {"kl": f"{tmp_path}/term.py:{changes['kl']}"} if "kl" in changes else {}
    with pytest.raises(KltestError, match=rf"step \d, update: .*{words}") as caught:
        run(replace(SMALL, gradient_every=0, **{**changes, **term}), tmp_path / "run", quiet=True)
    assert f"step {len(of_file(tmp_path / 'run'))}," in str(caught.value)


def test_out_of_memory_says_what_to_lower(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(running.Training, "_generate", fails)
    with pytest.raises(KltestError, match="step 0, generation: out of memory; lower micro_batch, prompts"):
        run(SMALL, quiet=True)


@pytest.mark.parametrize(
    "changes",
    first(
        1,
        [
            {"inner_epochs": 2},
            {"algorithm": "grpo", "kl": "auto", "inner_epochs": 2},
            {"kl": "rao-blackwell", "micro_batch": 3},
            {"kl": "none"},
            {"kl": "token-mean", "algorithm": "grpo", "clip": 0.0, "inner_epochs": 2},
            {"kl": "group-std", "optimiser": "sgd"},
            {"temperature": 0.8, "dtype": "float64"},
            {"dtype": "bfloat16"},
        ],
    ),
    ids=str,
)
def test_kinds_of_runs(changes):
    history = run(replace(SMALL, steps=2, gradient_every=0, **changes), quiet=True)
    assert of(history, "kl")[0] == [0, 2]
    assert all(math.isfinite(value) for record in history for value in record.values())
    assert ("gradient_norm_last" in history[0]) == (changes.get("inner_epochs", 1) > 1)


PROXY = """
from kltest.finetune.tasks import Addition


class Proxy(Addition):
    def gold(self, problem, completion):
        return 2 * self.reward(problem, completion) + 1


def proxy():
    return Proxy(1)
"""


@pytest.mark.scheduled
def test_a_gold_score_is_measured_and_not_trained_on(tmp_path, finished):
    """On the rollouts of the evaluation, whatever these are: there it is the reward's own function."""
    (tmp_path / "own.py").write_text(PROXY)
    gold = ("gold_held_out", "gold_held_out_low", "gold_held_out_high")
    found = run(replace(SMALL, task=f"{tmp_path}/own.py:proxy"), tmp_path / "run", quiet=True)
    for record in (one for one in found if "gold_held_out" in one):
        assert record["gold_held_out"] == pytest.approx(2 * record["reward_held_out"] + 1, rel=1e-12)
        assert record["gold_held_out_low"] < record["gold_held_out"] < record["gold_held_out_high"]
    assert of(found, "gold_held_out")[0] == [0, 3, 6]
    without = [{name: value for name, value in record.items() if name not in gold} for record in found]
    assert without == of_file(finished)


@pytest.mark.scheduled
def test_micro_batches_give_the_same_run():
    """The first update's gradient, rewards included, to float32."""
    whole, cut = (run(replace(SMALL, steps=1, micro_batch=size, max_norm=0.0), quiet=True) for size in (0, 3))
    assert of(cut, "gradient_norm")[1] == pytest.approx(of(whole, "gradient_norm")[1], rel=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cuda:77"}, "device 'cuda:77'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({}, "cannot be loaded"),
        ({"model": "./nope"}, "there is no such folder"),
    ],
)
def test_devices_and_models_that_there_are_not(tmp_path, change, words):
    with pytest.raises(UsageError, match=words):
        run(replace(SMALL, **(change or {"model": str(tmp_path)})), quiet=True)


def test_several_processes_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"runs in one process: .*micro_batch.*KLAuditCallback"):
        run(SMALL, quiet=True)


@pytest.mark.parametrize(
    ("library", "changes", "words"),
    [
        ("transformers", {}, r"pip install -e '\.\[finetune\]'"),
        ("peft", {"lora": 2}, "pip install peft"),
        ("accelerate", {"tracker": "wandb"}, "accelerate"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_its_command(monkeypatch, library, changes, words):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=words):
        run(replace(SMALL, **changes), quiet=True)


def test_advantages():
    """Groups (1, 0, 0) and (2, 4): by hand."""
    reward = torch.tensor([1.0, 0, 0, 2, 4], dtype=torch.float64)
    group = torch.tensor([5, 5, 5, 7, 7])
    assert advantages(reward, group, grpo=False).tolist() == pytest.approx([1, -1 / 2, -1 / 2, -2, 2])
    scaled = advantages(reward, group, grpo=True).tolist()
    std = [math.sqrt(1 / 3)] * 3 + [math.sqrt(2)] * 2
    assert scaled == pytest.approx([a / (s + 1e-4) for a, s in zip([2 / 3, -1 / 3, -1 / 3, -1, 1], std, strict=True)])


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
def test_the_reward_part_of_a_gradient_by_hand(algorithm):
    """Rewards 1 and 0 in one group of rollouts of two tokens and one; ratios 1.5 and 1, of which clip=.2 cuts 1.5."""
    old = torch.tensor([[-1.0, -2.0], [-1.5, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False]])
    up = torch.tensor([[math.log(1.5), 0.0], [0.0, 0.0]], dtype=torch.float64)
    fields = Fields(old + up, old, old, mask, mask.long(), torch.tensor([1.0, 0.0]).double(), torch.tensor([3, 3]))
    objective = Objective(replace(SMALL, algorithm=algorithm, kl="none", inner_epochs=2))
    found = objective.gradient(fields, objective.weights(fields)).logp
    if algorithm == "grpo":
        advantage = 0.5 / (math.sqrt(0.5) + 1e-4)
        expected = [[0.0, -advantage / 2 / 2], [advantage / 2, 0.0]]  # over two rollouts, and over their lengths
    else:
        expected = [[-1.5 / 2, -1.5 / 2], [1 / 2, 0.0]]  # the ratio of the sequence
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_cosine_and_size_are_of_the_expectations():
    """Gradients with noise three times as long as they are: their own cosines are far below that of their means."""
    generator = np.random.default_rng(0)
    truth = np.zeros(400)
    truth[0] = 1.0
    term = np.zeros(400)
    term[:2] = 0.5 * math.cos(1.0), 0.5 * math.sin(1.0)
    covered = []
    for _ in range(200):
        parts = [mean + generator.standard_normal((8, 400)) * 0.05 for mean in (term, truth)]
        found = compared(Sample(np.stack(parts, axis=1)))
        wanted = {"cosine": math.cos(1.0), "size": 0.5}
        low, high = ({of: found[f"kl_gradient_{of}_{end}"] for of in wanted} for end in ("low", "high"))
        covered.append([low[of] <= mean <= high[of] for of, mean in wanted.items()])
        assert found["kl_gradient_noise"] == pytest.approx(math.sqrt(400) * 0.05, rel=0.2)
    # 95 % intervals; the chance of fewer than 180 of 200 is below 1 %, and a jackknife of eight is a little short.
    assert (np.mean(covered, axis=0) >= 0.88).all()


def test_no_direction_where_there_is_no_gradient():
    generator = np.random.default_rng(1)
    noise, truth = generator.standard_normal((2, 8, 400)) * 0.05
    truth[:, 0] += 1
    found = compared(Sample(np.stack([noise, truth], axis=1)))
    assert "kl_gradient_cosine" not in found
    assert found["kl_gradient_size_low"] == 0.0
    assert 0 <= found["kl_gradient_size"] <= found["kl_gradient_size_high"] < 0.5
    assert compared(Sample(np.stack([truth, noise], axis=1))) == {}


def test_the_kl_that_is_measured_is_that_of_the_models(monkeypatch):
    """On one prompt with rollouts of one token, Rao–Blackwell leaves no noise: the KL of two rows of logits."""
    settings = replace(SMALL, max_tokens=1, eval_prompts=8, reference_steps=2, dtype="float64")
    task = task_named(settings.task)
    models = load(settings, task, torch.device("cpu"))
    with torch.no_grad():
        models.policy.model.lm_head.weight.mul_(3)
    seen = []
    original = generation.generate

    def watched(language, prompts, *rest, **options):
        seen.append(prompts)
        return original(language, prompts, *rest, **options)

    monkeypatch.setattr("kltest.finetune.rollouts.generate", watched)
    found = evaluate(models, task, settings, 0)
    expected = []
    for prompt in seen[0]:
        with torch.no_grad():
            rows = [
                one.model(torch.tensor([prompt])).logits[0, -1].log_softmax(0)
                for one in (models.policy, models.reference)
            ]
        expected.append(float((rows[0].exp() * (rows[0] - rows[1])).sum()))
    assert found["kl"] == pytest.approx(np.mean(expected), rel=1e-9)
    assert found["length_held_out"] == 1.0


def test_the_command_line(tmp_path, finished, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["finetune", *ARGUMENTS, "--output", str(finished)])
    assert done.exit_code == 0, done.output
    assert "held-out reward" in done.stdout
    assert re.findall(r"^ +(\d)  ", done.stdout, re.MULTILINE) == ["0", "3", "6"]
    wrong = CliRunner().invoke(app, ["finetune", *ARGUMENTS, "--set", "betta=1"])
    assert wrong.exit_code == 2
    assert "did you mean beta?" in wrong.output
    listed = CliRunner().invoke(app, ["finetune", "--list"]).stdout
    assert all(name in listed for name in (*METRICS, "beta", "gradient_every"))
    assert not list(Path(tmp_path).iterdir())
    assert (finished / "reward-against-kl.png").read_bytes().startswith(b"\x89PNG")
    both = CliRunner().invoke(app, ["finetune", "--compare", str(finished), str(finished), "--output", str(tmp_path)])
    assert both.exit_code == 0, both.output
    assert both.stdout.count(f"{finished.name}: k1-reward, β = 0.1") == 2
    assert (tmp_path / "reward-against-kl.png").stat().st_size > (finished / "reward-against-kl.png").stat().st_size / 2
    for broken in (tmp_path, tmp_path / "none"):
        refused = CliRunner().invoke(app, ["finetune", "--compare", str(finished), str(broken)])
        assert refused.exit_code == 2
        assert f"{broken} holds no run" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("name", "content"),
    [("checkpoint.pt", b"x" * 100), ("metrics.jsonl", b"{\n"), ("metrics.jsonl", b"[1, 2]\n"), ("settings.json", b"{")],
)
def test_a_damaged_file_is_named_and_left_as_it_is(finished, name, content, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / name).write_bytes(content)
    done = CliRunner().invoke(app, ["finetune", *ARGUMENTS, "--output", str(folder)])
    assert done.exit_code == 2
    assert name in done.output
    assert (folder / name).read_bytes() == content
    if name != "checkpoint.pt":
        drawn_again = CliRunner().invoke(app, ["finetune", "--compare", str(folder), str(folder)])
        assert (drawn_again.exit_code, name in drawn_again.output) == (2, True)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_weights_are_no_bug(name, tmp_path, monkeypatch):
    monkeypatch.setenv("KLTEST_MODELS", str(tmp_path / "models"))
    given = ("--task", "addition:1", "--steps", "0", "--set", "reference_steps=1", "--set", "eval_prompts=2")
    for model in ("tiny:10k", "own"):
        assert CliRunner().invoke(app, ["finetune", "--model", "tiny:10k", *given]).exit_code == 0
        (kept,) = (tmp_path / "models").iterdir()
        (kept / name).write_bytes((kept / name).read_bytes()[:20])
        done = CliRunner().invoke(app, ["finetune", "--model", model if model != "own" else str(kept), *given])
        assert done.exit_code == 2
        assert str(kept) in done.output
        shutil.rmtree(kept)


def test_runs_are_drawn_as_they_were_measured():
    ends = {"": 0.0, "_low": -0.1, "_high": 0.2}
    record = {f"{name}{end}": n + far for n, name in enumerate(("kl", "reward_held_out")) for end, far in ends.items()}
    (axes,) = drawn([("a run", [{"step": 0}, record])]).axes
    (found,) = axes.containers
    line, _, (across, along) = found.lines
    assert line.get_xydata().tolist() == [[0.0, 1.0]]
    np.testing.assert_allclose(across.get_segments(), [[[-0.1, 1.0], [0.2, 1.0]]])
    np.testing.assert_allclose(along.get_segments(), [[[0.0, 0.9], [0.0, 1.2]]])
    with pytest.raises(UsageError, match="a run: the run has no evaluation to draw"):
        drawn([("a run", [{"step": 0}])])
