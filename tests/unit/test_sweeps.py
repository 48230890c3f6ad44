"""Settings, batches, and where the work is done: the same results wherever they come from."""

import json
import math
import signal
import subprocess
import sys
import time

import pytest

from kltest.errors import KltestError, UsageError
from kltest.sweeps import run as spreading
from kltest.sweeps.run import Batching, attempt, run, spread
from kltest.sweeps.settings import Settings
from kltest.sweeps.store import Failure, Store

SETTINGS = Settings(
    title="An example",
    tags=("test",),
    values={
        "estimator": ("k1-loss", "k3-loss", None),
        "beta": (0.1, 1.0),
        "steps": 100,
        "exact": True,
        "environment": "bandit",
    },
    full={"beta": (0.1, 1.0, 10.0)},
    seeds={"quick": 2, "full": 5},
    allowed={"beta": (0.0, 100.0), "steps": (1, math.inf), "environment": ("bandit", "sequence")},
    applies=lambda one: not (one["estimator"] is None and one["beta"] == 1.0),
)


# Settings


def test_the_grid_is_every_combination_that_applies():
    configurations = SETTINGS.configurations(SETTINGS.grid("quick"))
    assert len(configurations) == (3 * 2 - 1) * 2
    assert configurations[0] == {
        "estimator": "k1-loss",
        "beta": 0.1,
        "steps": 100,
        "exact": True,
        "environment": "bandit",
        "seed": 0,
    }
    assert len({json.dumps(one, sort_keys=True) for one in configurations}) == len(configurations)


def test_a_part_has_the_settings_that_concern_it_under_its_own_names():
    settings = Settings(
        title="two parts",
        tags=(),
        values={"part": ("exact", "sampled"), "beta": (0.1, 1.0), "steps": 10, "batch_size": (4, 8)},
        seeds={"quick": 2, "full": 2},
        parts={"exact": {"beta": "beta", "updates": "steps"}, "sampled": ("batch_size", "seed")},
        applies=lambda one: one.get("batch_size") != 8 or one["seed"] == 0,
    )
    assert settings.configurations(settings.grid("quick", ["steps=20"])) == [
        {"part": "exact", "beta": 0.1, "updates": 20},
        {"part": "exact", "beta": 1.0, "updates": 20},
        {"part": "sampled", "batch_size": 4, "seed": 0},
        {"part": "sampled", "batch_size": 4, "seed": 1},
        {"part": "sampled", "batch_size": 8, "seed": 0},
    ]
    assert len(settings.configurations(settings.grid("quick", ["part=sampled", "beta=0.5"]))) == 3
    with pytest.raises(UsageError, match=r"cannot be 'exat'.*did you mean exact"):
        settings.grid("quick", ["part=exat"])


def test_full_scale_contains_quick():
    quick, full = (SETTINGS.configurations(SETTINGS.grid(scale)) for scale in ("quick", "full"))
    assert len(full) == (3 * 3 - 1) * 5
    assert all(one in full for one in quick)


@pytest.mark.parametrize(
    ("change", "name", "values"),
    [
        ("beta=0.5", "beta", (0.5,)),
        ("beta=2", "beta", (2.0,)),
        ("beta = 1e-3, 1", "beta", (1e-3, 1.0)),
        ("beta=1,1.0", "beta", (1.0,)),
        ("steps=7,8", "steps", (7, 8)),
        ("exact=False", "exact", (False,)),
        ("environment=sequence", "environment", ("sequence",)),
        ("estimator=k3-loss,None", "estimator", ("k3-loss", None)),
    ],
)
def test_a_setting_is_set(change, name, values):
    grid = SETTINGS.grid("quick", [change])
    assert grid[name] == values
    assert [type(value) for value in grid[name]] == [type(value) for value in values]
    assert {key: value for key, value in grid.items() if key != name} == {
        key: value for key, value in SETTINGS.grid("quick").items() if key != name
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("beta", "name=value"),
        ("beta=", "name=value"),
        ("=3", "no setting ''"),
        ("bata=3", r"no setting 'bata' \(did you mean beta\?\).*estimator, beta, steps"),
        ("seed=3", "--seeds N"),
        ("beta=-1", "between 0 and 100, not -1"),
        ("beta=nan", "beta is a number"),
        ("beta=1e400", "between 0 and 100"),
        ("beta=1,,2", "beta is a number"),
        ("steps=0", "at least 1, not 0"),
        ("steps=1.5", "a whole number, as 100, not '1.5'"),
        ("steps=True", "a whole number"),
        ("exact=1", "True or False"),
        ("environment=grid", "one of: bandit, sequence"),
        ("environment=sequense", "did you mean sequence"),
        ("estimator=k4-loss", r"cannot be 'k4-loss'.*k1-loss, k3-loss"),
        ("steps=__import__('os').abort()", "a whole number"),
    ],
)
def test_a_setting_that_cannot_be_is_a_usage_error(change, said):
    with pytest.raises(UsageError, match=said):
        SETTINGS.grid("quick", [change])


def test_seeds_are_counted_from_0():
    assert SETTINGS.grid("quick", seeds=3)["seed"] == (0, 1, 2)
    with pytest.raises(UsageError, match="at least 1"):
        SETTINGS.grid("quick", seeds=0)
    with pytest.raises(UsageError, match="nothing is random"):
        Settings(title="", tags=(), values={"a": 1}).grid("quick", seeds=2)


# Batches


def test_only_what_may_differ_shares_a_batch_and_none_is_too_large():
    configurations = SETTINGS.configurations(SETTINGS.grid("full"))
    batches = Batching(("seed", "beta"), size=4).batches(configurations)
    assert sorted(json.dumps(one) for batch in batches for one in batch) == sorted(map(json.dumps, configurations))
    assert max(map(len, batches)) == 4
    for batch in batches:
        assert len({one["estimator"] for one in batch}) == 1


def test_without_a_batching_every_configuration_is_alone():
    assert Batching().batches([{"a": 1}, {"a": 2}]) == [[{"a": 1}], [{"a": 2}]]


def unlucky(batch):
    if any(one["a"] == 3 for one in batch):
        raise ValueError("three")
    return [[{"b": one["a"] ** 2}] for one in batch]


def test_one_that_fails_does_not_take_its_batch_along():
    results = dict((one["a"], result) for one, result in attempt(unlucky, [{"a": a} for a in range(5)]))
    assert [results[a] for a in (0, 1, 2, 4)] == [[{"b": a**2}] for a in (0, 1, 2, 4)]
    assert isinstance(results[3], Failure)
    assert results[3].reason == "ValueError: three"
    assert "in unlucky" in results[3].traceback


def test_rows_for_fewer_than_were_asked_for_are_a_failure():
    ((_, result),) = attempt(lambda batch: [], [{"a": 1}])
    assert isinstance(result, Failure)
    assert "1 configurations were asked for and 0 were computed" in result.reason


def test_a_failure_is_kept_with_its_reason_and_tried_again_when_asked(tmp_path):
    configurations = [{"a": a} for a in range(5)]
    calls = []

    def counted(batch):
        calls.extend(one["a"] for one in batch)
        return unlucky(batch)

    for retry, expected in ((False, [0, 1, 2, 3, 4]), (False, []), (True, [3])):
        calls.clear()
        with Store(tmp_path / "runs.jsonl", "1") as store:
            (failure,) = run(counted, configurations, store, label="x", workers=1, retry_failed=retry)
        assert calls == expected
        assert (failure.configuration, failure.reason) == ({"a": 3}, "ValueError: three")
    with Store(tmp_path / "runs.jsonl", "1") as store:
        done = run(
            lambda batch: [[{"b": 0}]] * len(batch), configurations, store, label="x", workers=1, retry_failed=True
        )
        assert done == []
        assert store.result({"a": 3}) == [{"b": 0}]
    with Store(tmp_path / "runs.jsonl", "1") as store:
        assert store.result({"a": 3}) == [{"b": 0}], "the last record of a configuration counts"


# Where the work is done


def sums(batch):
    import torch

    return [[{"sum": torch.linspace(0, one["a"], 200_001, dtype=torch.float64).exp().sum().item()}] for one in batch]


CONFIGURATIONS = [{"a": a} for a in range(12)]


def stored(path, **options):
    with Store(path, "1") as store:
        assert run(sums, CONFIGURATIONS, store, label="x", batching=Batching(("a",), 3), **options) == []
    return sorted(path.read_bytes().splitlines())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A scheduler and two workers, as a person would start them: the address, and the workers."""
    folder = tmp_path_factory.mktemp("dask")
    dask = [sys.executable, "-m", "dask"]
    scheduler_file = folder / "scheduler.json"
    scheduler = subprocess.Popen(
        [*dask, "scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(scheduler_file)],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not scheduler_file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    address = json.loads(scheduler_file.read_text())["address"]
    options = ["--no-nanny", "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder)]
    workers = [subprocess.Popen([*dask, "worker", address, *options], stderr=subprocess.DEVNULL) for _ in range(2)]
    spreading.connect(address).wait_for_workers(2, timeout=60)
    yield address, workers
    spreading.connect(address).close()
    spreading.connect.cache_clear()
    for process in (*workers, scheduler):
        process.terminate()
        process.wait()


@pytest.mark.scheduled
def test_results_are_identical_here_in_processes_and_on_a_cluster(tmp_path, cluster):
    here = stored(tmp_path / "here.jsonl", workers=1)
    assert len(here) == 12
    assert stored(tmp_path / "processes.jsonl", workers=2) == here
    assert stored(tmp_path / "cluster.jsonl", cluster=cluster[0]) == here


def slow_sums(batch):
    time.sleep(0.5)
    return sums(batch)


@pytest.mark.scheduled
def test_a_worker_that_is_killed_changes_no_result(tmp_path, cluster):
    address, workers = cluster

    class Killing(Store):
        """A store that, with the first results, kills the worker that is at work on others."""

        def add(self, results):
            super().add(results)
            if workers[0].poll() is None:
                assert all(client.processing().values()), "both workers have work"
                workers[0].kill()
                workers[0].wait()

    client = spreading.connect(address)
    with Killing(tmp_path / "killed.jsonl", "1") as store:
        assert run(slow_sums, CONFIGURATIONS, store, label="x", batching=Batching(("a",), 3), cluster=address) == []
    assert workers[0].returncode == -signal.SIGKILL
    assert len(client.scheduler_info()["workers"]) == 1
    assert sorted((tmp_path / "killed.jsonl").read_bytes().splitlines()) == stored(tmp_path / "here.jsonl", workers=1)


def test_a_task_that_a_cluster_cannot_read_is_said_and_others_go_on(tmp_path, monkeypatch, cluster):
    (tmp_path / "module_of_this_process.py").write_text("def work(batch): return batch")
    monkeypatch.syspath_prepend(tmp_path)
    import module_of_this_process

    started = time.monotonic()
    with pytest.raises(KltestError, match=r"--cluster .*a task cannot be run there \(.*\)\. Scheduler and workers"):
        list(spread(module_of_this_process.work, [[1]], cluster=cluster[0]))
    assert time.monotonic() - started < 30
    assert sorted(spread(len, [[1], [1, 2]], cluster=cluster[0])) == [1, 2]


def test_a_cluster_that_does_not_answer_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(spreading, "SECONDS_TO_ANSWER", 0.5)
    with pytest.raises(UsageError, match=r"tcp://127.0.0.1:9: no Dask scheduler.*dask scheduler"):
        spreading.connect("tcp://127.0.0.1:9")
    with pytest.raises(UsageError, match="nowhere"):
        spreading.connect("nowhere")


def test_without_dask_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask.distributed", None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[cluster\]'"):
        spreading.connect("tcp://127.0.0.1:8786")


def test_short_work_never_leaves_the_process():
    import os

    assert set(spread(lambda batch: os.getpid(), list(range(50)))) == {os.getpid()}


def nap(batch):
    import os

    time.sleep(0.05)
    return os.getpid()


def test_long_work_goes_over_to_processes(monkeypatch):
    import os

    monkeypatch.setattr(spreading, "WORTH_PROCESSES", 0.5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    found = list(spread(nap, list(range(30))))
    assert found[0] == os.getpid()
    assert len(found) == 30
    assert len(set(found)) > 1


def test_an_error_in_a_process_is_raised_here():
    with pytest.raises(KltestError, match="were computed"):
        list(spread(refuse, [1, 2], workers=2))


def refuse(batch):
    raise KltestError("nothing was computed: none were computed")


def test_an_experiment_without_settings_says_so():
    with pytest.raises(UsageError, match="no setting 'estimator'; the experiment has no settings"):
        Settings(title="", tags=(), values={}, seeds={"quick": 1}).grid("quick", ["estimator=k1-loss"])
