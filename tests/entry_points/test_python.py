"""The Python door: every wrong argument is refused in words, and a grading leaves the process as it found it."""

import json
import math
import random
import signal
import time
import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from cases.parts import k2 as right
from weekly import first

import kltest

NAN, INF = math.nan, math.inf


@pytest.mark.scheduled
def test_what_may_be_left_out_may_be_none():
    optional = ["placement", "credit", "sampler", "timeout", "group_size", "batch_size", "samples", "bound"]
    none = dict.fromkeys([*optional, "select", "ignore", "beta", "arguments", "expected_failures", "name"])
    assert kltest.grade(right, environment="bandit", **none) == kltest.grade(right, environment="bandit")


@pytest.mark.scheduled
def test_coefficients_are_taken_to_the_last_digit_and_said_so():
    factor = 1 / 3 + 1e-7

    def scaled(logp, ref_logp, mask):
        return factor * right(logp, ref_logp, mask)

    for expect in ({"reverse_kl": factor}, f"{factor!r}*reverse_kl"):
        report = kltest.grade(scaled, environment="bandit", expect=expect)
        assert report.verdict == "confirmed"
        assert report.expect == f"{factor!r}*reverse_kl"
    assert kltest.grade(scaled, environment="bandit", expect={"reverse_kl": 0.3333}).verdict == "refuted"


@pytest.mark.scheduled
def test_a_logged_nan_is_graded_without_a_warning():
    def logs_nan(logp, ref_logp, mask):
        return right(logp, ref_logp, mask), {"kl": math.nan}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = kltest.grade(logs_nan, environment="ragged")
    assert [check.code for check in report.failed] == ["KL601"]
    assert json.loads(report.to_json())["value"][0]["matches"] is None


@contextmanager
def default(set_default, value, back):
    set_default(value)
    yield
    set_default(back)


FOUND = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "a block on another device": lambda: torch.device("meta"),
    "another default device": lambda: default(torch.set_default_device, "meta", None),
    "half precision by default": lambda: default(torch.set_default_dtype, torch.float16, torch.float32),
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.fixture(scope="module")
def expected():
    return kltest.grade(right, environment="ragged").to_json()


@pytest.mark.parametrize("found", first(1, FOUND))
def test_a_grading_is_the_same_whatever_the_process_is_set_to(found, expected):
    with FOUND[found]():
        assert kltest.grade(right, environment="ragged").to_json() == expected


def settings():
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()


def generators():
    return str(torch.get_rng_state().tolist()), random.getstate(), str(np.random.get_state())  # noqa: NPY002


CHANGES = {
    "gradients": lambda: torch.set_grad_enabled(False),
    "type": lambda: torch.set_default_dtype(torch.float16),
    "device": lambda: torch.set_default_device("meta"),
    "seeds": lambda: (torch.manual_seed(0), random.seed(0), np.random.seed(0)),  # noqa: NPY002
}


@pytest.mark.parametrize("change", first(1, CHANGES))
def test_what_a_loss_changes_in_the_process_does_not_outlast_the_call(change):
    def changing(logp, ref_logp, mask):
        found = right(logp, ref_logp, mask)
        CHANGES[change]()
        return found

    before, drawn = settings(), generators()
    try:
        report = kltest.grade(changing, environment="ragged")
        assert settings() == before
        assert generators() == drawn
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert report.verdict == "confirmed"


def test_a_limit_that_is_no_time_at_all_is_over_at_once_and_one_without_end_never():
    report = kltest.grade(right, timeout=1e-9)
    assert report.verdict == "inconclusive"
    assert "the time was over after 1e-09 s" in report.unfinished
    for long in (INF, 1e12):
        assert kltest.grade(right, environment="bandit", timeout=long).verdict == "confirmed"


@pytest.mark.scheduled
def test_somebody_elses_alarm_goes_on():
    """pytest-timeout and its kin use the one alarm that a process has."""
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        kltest.grade(right, environment="bandit", timeout=30.0)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 60.0
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
        kltest.grade(right, environment="bandit", timeout=30.0)
        until = time.monotonic() + 5
        while not rung and time.monotonic() < until:
            time.sleep(0.01)
        assert rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
