"""A pytest run of every registered estimator under every check, against the bare import of torch.

Two minutes are about a hundred imports of torch.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Row, compare

TESTS = """
import kltest
from kltest.estimators import registry

@kltest.parametrize_with_checks(list(registry()))
def test_registry(loss, check):
    check(loss)
"""


def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_registry.py").write_text(TESTS, encoding="utf-8")
        row = compare(
            "pytest, whole registry × all checks / import torch",
            "CPU time of the process, one worker",
            lambda: _tests(folder),
            lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True),
            bound=100.0,
            rounds=2,
        )
    return [row]


def _tests(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "--maxfail=100000"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    # Most of the registry is there to be refuted: failures are the work being done.
    if done.returncode != 1 or " error" in done.stdout.splitlines()[-1]:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr[-500:]}")
