"""One thread a process, how tests are shared between processes, and what is no test of kltest's own.

The environments are small: threads cost more than they gain, most of all if several processes test at once. Tests start
a hundred processes: kltest is compiled once for all of them. The example project is tried as its own user would, by
test_example_project.py.
"""

import gc
import os
import signal
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
collect_ignore = ["example_project"]
# A shell ignores it in what it starts in the background, and whatever is started from there would.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# All of the main job takes minutes, so it starts first; nothing waits for it at the end.
FIRST = "test_main_job.py"
# Each test grades a loss of its own and shares nothing: they fill the gaps at the end, one by one.
APART = "test_losses.py"

# Modules hold half a million objects and none is garbage: without this, every tenth second goes into looking.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: {FIRST: 0, APART: 2}.get(item.path.name, 1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With `-n`, a file's tests run in one process, so that what they share is computed once, and in this order."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return nodeid if file.endswith(APART) else file

    config.option.loadscopereorder = False
    return ByFile(config, log)
