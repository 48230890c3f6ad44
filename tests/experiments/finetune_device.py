"""Runs of the language-model runner on a device that is not the CPU give the CPU's numbers.

`test_finetune_device.py` runs these tests in a process of their own: once torch has a device that is not the CPU,
forked children of its process cannot differentiate. The device is a stand-in, or the one that KLTEST_DEVICE names.
"""

import contextlib
import math
import os
from dataclasses import replace

import pytest
import torch

from kltest.auditing.audit import audit
from kltest.auditing.models import load
from kltest.finetune.run import run
from kltest.finetune.settings import METRICS, Settings
from kltest.language_models.generation import generate
from kltest.language_models.language import LanguageModel
from kltest.language_models.models import tiny_model
from kltest.samples.sketch import Sketch

SIZES = {"model": "tiny:30k", "task": "addition:1", "steps": 3, "prompts": 4, "group_size": 2, "reference_steps": 200}
MEASURED = {"eval_every": 2, "eval_prompts": 16, "gradient_every": 2, "gradient_chunks": 3, "gradient_batches": 1}
CPU = Settings(
    **SIZES, **MEASURED, reference_reward=0.3, learning_rate=1e-3, kl="k3-loss", device="cpu", dtype="float32"
)


DEVICE = os.environ.get("KLTEST_DEVICE", "fake")
if DEVICE == "fake":  # torch has one such backend: with it, nothing goes backward on a real device
    import accelerator
stand_in_only = pytest.mark.skipif(DEVICE != "fake", reason="counts what the stand-in alone counts")


def device():
    """A context in which the device exists."""
    return accelerator.Accelerator() if DEVICE == "fake" else contextlib.nullcontext()


pytestmark = pytest.mark.usefixtures("models_folder")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl": "leave-one-out", "micro_batch": 3},
        {"kl": "rao-blackwell", "inner_epochs": 2},
        {"algorithm": "grpo", "inner_epochs": 2, "optimiser": "sgd"},
        {"dtype": "float64", "temperature": 0.7},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_a_run_on_a_device_is_that_on_the_cpu(changes, tmp_path):
    settings = replace(CPU, **changes)
    expected = run(settings, quiet=True)
    with device():
        found = run(replace(settings, device=DEVICE), tmp_path, quiet=True)
        # A finished run is read again, onto the device.
        assert run(replace(settings, device=DEVICE), tmp_path, quiet=True) == found
    # In bfloat16 other tokens are drawn, and what the comparison of gradients can tell of them differs.
    optional = {one for one in METRICS if one.startswith("kl_gradient")} if settings.dtype == "bfloat16" else set()
    assert [record.keys() - optional for record in found] == [record.keys() - optional for record in expected]
    assert all(math.isfinite(value) for record in found for value in record.values())
    # The reference, whose matrices are in the lower dtype, is the policy to the last bit.
    assert found[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    # Sums in another order, over a few updates; in bfloat16 they lead to other tokens.
    near = {"float64": 1e-6, "bfloat16": math.inf}.get(settings.dtype, 2e-3)
    for one, other in zip(found, expected, strict=True):
        for name in one.keys() & other.keys() - {"sampler_gap"}:
            assert one[name] == pytest.approx(other[name], rel=near, abs=near), (other["step"], name)


def test_an_audit_on_a_device_is_that_on_the_cpu():
    """With a sampler of its own, so that every estimator is at work."""

    def audited(where):
        roles = ("model", "ref", "sampler")
        policy, ref, sampler = (load("tiny:20k", role, seed=0, dtype="float64", device=where) for role in roles)
        prompts = {"prompts": ["1+2=", "3"], "units": 8, "max_new_tokens": 3, "group_size": 2}
        found = audit("k3-ratio", policy, ref, sampler=sampler, **prompts)
        return found.distance.value, found.distance.low, found.signal_to_noise, found.tokens

    expected = audited("cpu")
    with device():
        found = audited(DEVICE)
    # Sums in another order, in float64.
    assert found == pytest.approx(expected, rel=1e-6)


@stand_in_only
def test_a_token_waits_for_the_device_once_in_eight():
    """What is read from the device, and how many operations a layer and token cost there."""
    torch.manual_seed(0)
    model = tiny_model(30_000, 20, 19, 0).eval()
    with accelerator.Accelerator() as stand_in:
        policy = LanguageModel(model.to("fake"), None, (19,), 0)
        counts = []
        for tokens in (8, 16):
            stand_in.counts.clear()
            generate(policy, [[3, 4]] * 2, torch.zeros(4, tokens))
            launched = sum(count for name, count in stand_in.counts.items() if name not in accelerator.VIEWS)
            counts.append((stand_in.counts["_local_scalar_dense"], launched))
    assert counts[1][0] - counts[0][0] == 1
    assert (counts[1][1] - counts[0][1]) / 8 < 50 * model.config.num_hidden_layers + 40


@stand_in_only
def test_a_gradient_is_folded_by_few_operations_on_a_device():
    """Blocks of a processor's cache were two thousand launches for each gradient of half a billion weights."""
    with accelerator.Accelerator() as stand_in:
        layer = torch.nn.Linear(2**11, 2**11).to("fake")
        sketch = Sketch(layer)
        into, gradient = (torch.zeros(size, device="fake") for size in (sketch.size, (2**11, 2**11)))
        stand_in.counts.clear()
        sketch.fold(layer.weight, gradient, into)
    assert stand_in.counts["index_add_"] == 1


@stand_in_only
def test_devices_are_not_mixed():
    with accelerator.Accelerator():
        one = torch.ones(2, device="fake")
        assert one.device.type == "fake"
        assert float((one + 1).sum()) == 4.0
        with pytest.raises(RuntimeError, match="same device"):
            one + torch.ones(2)
