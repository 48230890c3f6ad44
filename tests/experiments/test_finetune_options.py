"""Options of the language-model runner: minibatches, adapters, samples, trackers."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kltest.errors import UsageError
from kltest.finetune.settings import Settings

pytest.importorskip("transformers")

from kltest.finetune.models import load
from kltest.finetune.run import run
from kltest.finetune.tasks import task_named

SIZES = {"model": "tiny:30k", "task": "addition:1", "steps": 2, "prompts": 4, "group_size": 2, "reference_steps": 2}
SMALL = Settings(**SIZES, eval_every=0, eval_prompts=4, gradient_every=0, kl="k3-loss", beta=0.5, device="cpu")


pytestmark = pytest.mark.usefixtures("models_folder")


@pytest.mark.scheduled
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


def test_what_a_run_leaves_for_people(tmp_path, monkeypatch):
    """Samples, and metrics with a tracker."""
    logged = []
    tracking = pytest.importorskip("accelerate.tracking")

    class Tracker(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "tensorboard", True, None

        def __init__(self, project, logging_dir):
            logged.append((project, logging_dir))

        def store_init_configuration(self, values):
            assert values["kl"] == "k3-loss"

        def log(self, values, step, **_):
            logged.append((step, values))

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Tracker)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [tracking.LoggerType.TENSORBOARD])
    records = run(replace(SMALL, samples=3, tracker="tensorboard"), tmp_path, quiet=True)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [one["step"] for one in samples] == [0] * 3 + [1] * 3
    task = task_named(SMALL.task)
    for one in samples:
        answer = str(sum(map(int, one["prompt"].rstrip("=").split("+"))))
        assert one["reward"] == task.reward(SimpleNamespace(answer=answer), one["completion"])
    assert [str(word) for word in logged[0]] == ["kltest", str(tmp_path)]
    assert logged[1:] == [(one["step"], {k: v for k, v in one.items() if k != "step"}) for one in records]
    for name, words in {"tensorbord": "tracker: .*tensorboard", "wandb": "wandb is not installed"}.items():
        with pytest.raises(UsageError, match=words):
            run(replace(SMALL, tracker=name), quiet=True)


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
