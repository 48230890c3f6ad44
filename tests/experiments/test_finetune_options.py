"""Options of the language-model runner: minibatches, truncated rollouts, schedules, adapters, samples, trackers."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kltest.errors import UsageError
from kltest.finetune.settings import Settings

pytest.importorskip("transformers")

from kltest.finetune.models import load
from kltest.finetune.objective import Objective
from kltest.finetune.rollouts import draw
from kltest.finetune.run import Training, run
from kltest.finetune.tasks import task_named
from kltest.finetune.update import accumulate

SIZES = {"model": "tiny:30k", "task": "addition:1", "steps": 2, "prompts": 4, "group_size": 2, "reference_steps": 2}
SMALL = Settings(**SIZES, eval_every=0, eval_prompts=4, gradient_every=0, kl="k3-loss", beta=0.5, device="cpu")


@pytest.fixture(scope="module", autouse=True)
def models_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KLTEST_MODELS", str(tmp_path_factory.mktemp("models")))
        yield


def gradient(models, settings, rollouts):
    """Of one batch, by parameter."""
    models.policy.model.zero_grad()
    accumulate(Objective(settings), models, rollouts, longest=5)
    return [one.grad.clone() for one in models.policy.model.parameters()]


def test_minibatches_are_updates_of_their_own():
    """Without a step size every update is at the same policy: norms differ, all that is measured is the same."""
    still = replace(SMALL, learning_rate=0.0, max_tokens=5, kl="k1-loss")
    whole, parts = run(still, quiet=True), run(replace(still, minibatches=2), quiet=True)
    for one, other in zip(whole[:-1], parts[:-1], strict=True):
        assert other.pop("gradient_norm_last") != pytest.approx(other.pop("gradient_norm"), rel=1e-3)
        # exp of a difference of float32 log-probs of order 1 to 10, from batches of different sizes
        assert other.pop("ratio_largest") == pytest.approx(1.0, abs=1e-5)
        assert other == pytest.approx({name: value for name, value in one.items() if name != "gradient_norm"}, abs=1e-6)
    moving = run(replace(SMALL, learning_rate=1e-2, warmup=0, minibatches=2, kl="k1-loss"), quiet=True)
    assert all(abs(record["ratio_largest"] - 1) > 1e-4 for record in moving[:-1])
    assert all(record["sampler_gap"] < 1e-4 for record in moving[:-1])  # float32; the second part's policy has moved
    assert replace(SMALL, minibatches=2, kl="auto").resolved.kl == "k1-reward-sequence-ratio"
    with pytest.raises(UsageError, match=r"minibatches: 4 prompts .* 3 equal parts"):
        replace(SMALL, minibatches=3)


@pytest.mark.parametrize("kl", ["k3-loss", "leave-one-out", "rao-blackwell"])
def test_masked_rollouts_have_no_gradient(kl):
    """The gradient is that of the rollouts that ended; where it couples rows, of their log-probs."""
    settings = replace(SMALL, kl=kl, max_tokens=5, truncated="mask", baseline="none")
    task = task_named(settings.task)
    models = load(settings, task, torch.device("cpu"))
    models.policy.model.lm_head.weight.data.mul_(1.5)
    rollouts = draw(models.policy, task, settings, "train", (0,), 16, 2)
    rollouts = replace(rollouts, ref_logp=rollouts.sampled_logp - 0.3, reward=torch.arange(32.0).double())
    ended = rollouts.ended(models.policy.end)
    assert 0 < int(ended.sum()) < 32
    masked, kept = gradient(models, settings, rollouts), gradient(models, replace(settings, truncated="keep"), rollouts)
    assert any(not torch.allclose(one, other, rtol=1e-2) for one, other in zip(masked, kept, strict=True))
    if kl != "leave-one-out":
        alone = gradient(models, replace(settings, truncated="keep"), rollouts.rows(ended.nonzero()[:, 0]))
        share = float(ended.double().mean())
        for one, other in zip(masked, alone, strict=True):
            torch.testing.assert_close(one, share * other, rtol=1e-3, atol=1e-6)  # sums in another order, in float32
    training = Training(replace(settings, truncated="zero", prompts=16), task, models, Objective(settings))
    drawn = training._generate()
    assert (drawn.reward[~drawn.ended(models.policy.end)] == 0).all()


def test_schedules():
    """A rise over two updates; then from 1 to 0 over the other eight of ten."""
    for name, middle in {"constant": 1.0, "linear": 0.5, "cosine": 0.5}.items():
        settings = replace(SMALL, schedule=name, steps=5, inner_epochs=2, warmup=2)
        factor = [Training._scheduled(SimpleNamespace(settings=settings), update) for update in range(11)]
        assert factor[:2] == [0.5, 1.0]
        assert factor[6] == pytest.approx(middle)
        assert factor[10] == pytest.approx(float(name == "constant"))
        quarter = {"constant": 1.0, "linear": 0.75, "cosine": (1 + math.cos(math.pi / 4)) / 2}
        assert factor[4] == pytest.approx(quarter[name])


def test_what_a_run_leaves_for_people(tmp_path, monkeypatch):
    """Samples, a plot, and metrics with a tracker."""
    logged = []

    class Tracker:
        requires_logging_directory = True

        def __init__(self, project, logging_dir):
            logged.append((project, logging_dir))

        start = finish = lambda self: logged.append("…")

        def store_init_configuration(self, values):
            assert values["kl"] == "k3-loss"

        def log(self, values, step):
            logged.append((step, values))

    monkeypatch.setitem(pytest.importorskip("accelerate.tracking").LOGGER_TYPE_TO_CLASS, "mine", Tracker)
    records = run(replace(SMALL, samples=3, tracker="mine"), tmp_path, quiet=True)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["step"] for one in samples] == [0] * 3 + [1] * 3
    task = task_named(SMALL.task)
    for one in samples:
        answer = str(sum(map(int, one["prompt"].rstrip("=").split("+"))))
        assert one["reward"] == task.reward(SimpleNamespace(answer=answer), one["completion"])
    assert logged[0] == ("kltest", tmp_path)
    assert logged[2:-1] == [(one["step"], {k: v for k, v in one.items() if k != "step"}) for one in records]
    assert "<svg" in (tmp_path / "run.svg").read_text()
    with pytest.raises(UsageError, match="tracker: did you mean tensorboard"):
        run(replace(SMALL, tracker="tensorbord"), quiet=True)


def test_adapters_are_all_that_is_trained(tmp_path):
    pytest.importorskip("peft")
    settings = replace(SMALL, lora=2, learning_rate=1e-2, warmup=0, kl="k1-loss")
    whole = load(SMALL, task_named(SMALL.task), torch.device("cpu")).policy.model.state_dict()
    records = run(settings, tmp_path, quiet=True)
    assert records[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert records[-1]["kl"] > 1e-4
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"]
    assert all(torch.equal(kept.pop(name.replace("proj.", "proj.base_layer.")), one) for name, one in whole.items())
    assert kept
    assert all("lora_" in name for name in kept)
    assert run(settings, tmp_path, quiet=True) == records
    with pytest.raises(UsageError, match="lora: the model comes with adapters"):
        run(replace(settings, model=str(tmp_path / "model")), quiet=True)
