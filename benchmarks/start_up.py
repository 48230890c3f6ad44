"""The command line against the bare imports that it cannot do without, each in a fresh process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Row, compare, save


def main() -> list[Row]:
    beside = Path(sys.executable).with_name("kltest")
    command = str(beside) if beside.exists() else (shutil.which("kltest") or "kltest")
    claims = [
        (["--help"], "typer", 3.0),
        (["grade", "k3-loss", "--select", "KL1,KL2,KL3"], "torch", 2.5),
        (["grade", "k3-loss"], "torch", 10.0),
        (["grade", "k2-ratio-detached"], "torch", 10.0),
    ]
    rows = [
        compare(
            f"kltest {' '.join(arguments)} / import {module}",
            "wall time of the process",
            lambda arguments=arguments: _run([command, *arguments]),
            lambda module=module: _run([sys.executable, "-c", f"import {module}"]),
            bound=bound,
            rounds=7,
        )
        for arguments, module, bound in claims
    ]
    save("start_up", rows)
    return rows


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, check=False)
    # `kltest grade k3-loss` refutes (exit 1); anything above means that it did not do its work.
    if done.returncode > 1:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr.decode()[-500:]}")


if __name__ == "__main__":
    main()
