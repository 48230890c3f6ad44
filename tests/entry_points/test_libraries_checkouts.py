"""A library that is on no package index is cloned with git and graded at a commit."""

import json
import subprocess

import pytest

from kltest.cli.libraries import Measurement, libraries
from kltest.errors import UsageError

CLONED = """
from kltest.adapters import Adapter, Setting

ADAPTER = Adapter("cloned", "kltest-cloned", "COMMIT", (), "kltest_cloned", "", (
    Setting("penalty/linear", "kltest_cloned.losses:penalty", {"factor": 3.0}),
), repository="REPOSITORY", folder="packages")
"""
LOSS = """
from kltest_no_such_package import setting

@setting(1)
def penalty(logp, ref_logp, factor):
    return LAW
"""


@pytest.mark.scheduled
def test_a_library_that_no_index_has_is_graded_from_a_checkout(tmp_path):
    """At the commit of its adapter, at another one, and at the newest; the version is the commit."""
    repository, written = tmp_path / "repository", tmp_path / "repository" / "packages" / "kltest_cloned"
    git = ["git", "-C", str(repository), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    written.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    commits = []
    for law in ("factor * (logp - ref_logp) ** 2 / 2", "factor * (logp - ref_logp)"):
        (written / "losses.py").write_text(LOSS.replace("LAW", law))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", "One"], check=True)
        found = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], check=True, capture_output=True, text=True)
        commits.append(found.stdout.strip())
    adapter = tmp_path / "cloned.py"
    adapter.write_text(CLONED.replace("COMMIT", commits[0]).replace("REPOSITORY", str(tmp_path / "gone")))
    gone, again = tmp_path / "gone_results", tmp_path / "results"
    assert libraries([str(adapter)], output=str(gone)) == 3
    names, there = [str(adapter), f"{adapter}=={commits[1]}"], str(repository)
    for name in (names[0], f"{adapter}==newest"):
        assert libraries([name], request=Measurement(checkout=there), output=str(again)) == 0
    lines = (again / "runs.jsonl").read_text().splitlines()
    rows = {row["version"]: row for line in lines for row in json.loads(line)["rows"]}
    assert set(rows) == set(commits)
    gradients = {commit: rows[commit]["gradients"][0]["identified"] for commit in commits}
    assert gradients == {commits[0]: {"reverse_kl": pytest.approx(3.0)}, commits[1]: {"zero": 1.0}}
    with pytest.raises(UsageError, match="is no commit"):
        libraries([f"{adapter}==1.0"], output=str(again))
    with pytest.raises(UsageError, match="--checkout is for one library that is cloned"):
        libraries(["liger"], request=Measurement(checkout=there), output=str(again))
