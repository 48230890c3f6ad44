"""The language-model runner on a device that is not the CPU: the tests of `finetune_device.py`."""

import sys
from pathlib import Path

import processes
import pytest

pytest.importorskip("transformers")


@pytest.mark.scheduled
def test_runs_on_a_device_give_the_numbers_of_the_cpu():
    tests = Path(__file__).with_name("finetune_device.py")
    done = processes.ran(sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", tests)
    assert done.returncode == 0, done.stdout
