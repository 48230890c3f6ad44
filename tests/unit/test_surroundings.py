"""What is pretended, and what is watched, while a loss runs: it is told of it, its numbers stay, and all is undone."""

import os
import random
import time
from functools import partial

import pytest
import torch

from kltest.checks.surroundings import _of_other_masks
from kltest.grading.grader import Grading
from kltest.grading.options import Options
from kltest.loss.chances import Chances
from kltest.loss.surroundings import (
    Pretended,
    compiling,
    later,
    on_device,
    slices,
    under_autocast,
    variable,
    variables_read,
)

clock = time.monotonic
compiles = torch.compiler.is_compiling
cuda_is_there, mps_is_there = torch.cuda.is_available, torch.backends.mps.is_available


def reads_the_clock():
    return clock()


def asks_if_it_is_compiled():
    return compiles(), torch.compiler.is_compiling()


def asks_for_devices(tensor):
    accelerator = torch.accelerator.current_accelerator()
    return {
        "there": (cuda_is_there(), mps_is_there(), torch.xpu.is_available()),
        "on it": (tensor.is_cuda, tensor.is_mps, tensor.is_xpu, tensor.is_cpu, tensor.get_device()),
        "any": (torch.accelerator.is_available(), accelerator and accelerator.type),
        "type": tensor.type(),
    }


def draws_rarely():
    return [random.random() < 1e-9, bool(torch.rand(()) < 1e-9), bool((torch.rand(3) * 2 - 1 < -0.5).any())]


def test_a_tensor_says_another_type_and_keeps_its_numbers():
    tensor = torch.tensor([1 / 3], dtype=torch.float64)
    with Pretended(torch.bfloat16):
        said, cast = tensor.dtype, tensor.float()
        asked, sizes = cast.dtype, (tensor.element_size(), tensor.itemsize)
        mask = torch.ones(1).bool().dtype
    assert said == torch.bfloat16
    assert asked == torch.float32
    assert sizes == (2, 2)
    assert mask == torch.bool
    assert cast.dtype == torch.float64
    assert torch.equal(cast, tensor)


@pytest.mark.parametrize("mode", [Pretended(torch.bfloat16), Pretended(device="cuda")])
def test_lists_of_tensors_and_shapes_stay_what_they_are(mode):
    with mode:
        assert torch.stack([torch.ones(2)] * 3).shape == (3, 2)
        assert torch.ones(2).new(torch.Size([3])).shape == (3,)
        assert torch.distributions.Exponential(1.0).sample((3,)).shape == (3,)


def test_a_tensor_says_that_it_is_on_a_gpu_and_stays_where_it_is():
    tensor = torch.zeros(2)
    with Pretended(device="cuda"):
        said = tensor.is_cuda, tensor.device.type
        made = torch.arange(2, device=tensor.device)
        moved = tensor.to("cuda:0")
    assert said == (True, "cuda")
    assert {made.device.type, moved.device.type} == {"cpu"}


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_a_device_is_there_also_under_another_name_and_is_gone_again(kind):
    tensor = torch.zeros(2, dtype=torch.float64)
    before = asks_for_devices(tensor)
    with on_device(kind, asks_for_devices):
        said = asks_for_devices(tensor)
        made = torch.zeros(2, device=kind)
    assert said == {
        "there": (kind == "cuda", kind == "mps", kind == "xpu"),
        "on it": (kind == "cuda", kind == "mps", kind == "xpu", False, 0),
        "any": (True, kind),
        "type": f"torch.{kind}.DoubleTensor",
    }
    assert made.device.type == "cpu"
    assert asks_for_devices(tensor) == before
    assert before["type"] == "torch.DoubleTensor"


def test_the_name_of_a_type_is_that_of_another_precision():
    tensor = torch.zeros(2, dtype=torch.float64)
    with Pretended(torch.bfloat16):
        assert (tensor.type(), tensor.float().type()) == ("torch.BFloat16Tensor", "torch.FloatTensor")


def test_autocast_that_a_loss_switches_off_is_off_afterwards_and_nothing_is_cast():
    one = torch.eye(3) / 3
    with under_autocast():
        with torch.autocast("cpu", enabled=False):
            pass
        assert torch.is_autocast_enabled("cpu")
        assert (one @ one).dtype == torch.float32
        torch.set_autocast_enabled("cpu", torch.is_autocast_enabled("cpu"))
    assert not torch.is_autocast_enabled("cpu")
    assert (one @ one).dtype == torch.float32


def test_autocast_is_pretended_and_undone():
    with under_autocast():
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_compiling_is_pretended_also_under_another_name_and_undone():
    with compiling(asks_if_it_is_compiled):
        assert asks_if_it_is_compiled() == (True, True)
    assert asks_if_it_is_compiled() == (False, False)


def test_slices_have_the_same_numbers_and_gradients_and_lie_apart():
    tensor, row = torch.arange(6.0).view(2, 3).requires_grad_(), torch.ones(2)
    (found,), kept = slices(((tensor,), {"row": row, "reduction": "mean"}))
    found.square().sum().backward()
    assert torch.equal(found, tensor)
    assert found.stride() == (4, 1)
    assert torch.equal(tensor.grad, 2 * tensor)
    assert kept == {"row": row, "reduction": "mean"}


def test_clocks_go_ahead_also_under_another_name():
    before = reads_the_clock()
    with later(7200.0, reads_the_clock):
        ahead, whole = reads_the_clock(), time.time_ns()
    assert 7200 <= ahead - before < 7300
    assert clock is time.monotonic
    assert abs(time.time_ns() + 7200 * 10**9 - whole) < 100 * 10**9


def test_environment_variables_are_named_and_restored():
    names: set[str] = set()
    with variables_read(names):
        os.environ.get("KLTEST_NO_SUCH_VARIABLE", "")
    assert "KLTEST_NO_SUCH_VARIABLE" in names
    with variable("KLTEST_NO_SUCH_VARIABLE", "2"):
        assert os.environ["KLTEST_NO_SUCH_VARIABLE"] == "2"
    assert "KLTEST_NO_SUCH_VARIABLE" not in os.environ


def test_a_comparison_of_a_random_number_is_seen_and_turned():
    chances, draw = Chances(), random.random
    watched = partial(chances.watched, draws_rarely)
    for _ in range(50):
        with watched():
            assert draws_rarely()[:2] == [False, False]
    rare = chances.one_sided
    assert len(chances.seen) == 3
    assert len(rare) == 2
    for place, chances.turned in enumerate(rare):
        with watched():
            assert draws_rarely()[place] is True
    assert random.random == draw


@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_another_gradient_with_a_mask_of_another_type_is_found(kind):
    def loss(logp, ref_logp, mask):
        square = (logp - ref_logp).where(mask != 0, 0.0).sum(-1).square() / 2
        return square * (2.0 if mask.dtype == kind else 1.0)

    findings = Grading.of("", Options.of(environment="bandit")).measured(loss)
    found = _of_other_masks(findings)
    assert found is not None
    assert found.level == "error"
    assert "the gradient of the same batch differs by 1 of its size" in found.message
