"""State between calls: found wherever a loss keeps it, named as that, and harmless if no result depends on it."""

import sys
from collections import deque
from functools import lru_cache

import pytest
import torch
from cases.parts import total
from weekly import first

import kltest
from kltest.loss.state import State, places_of

CACHE = {}
STEP = 0


def log_ratio(logp, ref_logp, mask):
    return total(logp - ref_logp, mask)


def by_shape(logp, ref_logp, mask):
    """DEFECT: the reference of the first batch of each shape."""
    reference = CACHE.setdefault(tuple(logp.shape), ref_logp.detach().clone())
    return log_ratio(logp, reference, mask).square() / 2


@lru_cache
def scale_of(rows, columns):
    CACHE["scales"] = CACHE.get("scales", 0) + 1
    return 1 + CACHE["scales"] / 10


def cached(logp, ref_logp, mask):
    """DEFECT: a scale that depends on the order in which shapes were seen."""
    return scale_of(*logp.shape) * log_ratio(logp, ref_logp, mask).square() / 2


def by_first(logp, ref_logp, mask):
    """DEFECT: the scale of the first batch that was ever seen, on an attribute of the function."""
    u = log_ratio(logp, ref_logp, mask)
    if not hasattr(by_first, "scale"):
        by_first.scale = float(u.detach().abs().mean())
    return u.square() / 2 / by_first.scale


class Running:
    """DEFECT: a running mean on the object."""

    def __init__(self):
        self.seen = deque(maxlen=50)

    def __call__(self, logp, ref_logp, mask):
        u = log_ratio(logp, ref_logp, mask)
        self.seen.append(float(u.detach().mean()))
        return (u - sum(self.seen) / len(self.seen)).square() / 2


def with_closure():
    """DEFECT: a list in the closure."""
    seen = []

    def closure(logp, ref_logp, mask):
        u = log_ratio(logp, ref_logp, mask)
        seen.append(float(u.detach().abs().mean()))
        return u.square() / 2 / seen[0]

    return closure


def warmed_up(logp, ref_logp, mask):
    """DEFECT: a counter of the module."""
    global STEP
    STEP += 1
    return min(1.0, STEP / 1000) * log_ratio(logp, ref_logp, mask).square() / 2


class Meter:
    mean = 0.0


def on_a_class(logp, ref_logp, mask):
    """DEFECT: a running mean on a class."""
    u = log_ratio(logp, ref_logp, mask)
    Meter.mean = 0.9 * Meter.mean + 0.1 * float(u.detach().abs().mean())
    return u.square() / 2 / (1 + Meter.mean)


class OnItsClass:
    """DEFECT: a running mean in a dictionary that all objects of the class share."""

    MEANS = {"abs": 0.0}  # noqa: RUF012

    def __call__(self, logp, ref_logp, mask):
        u = log_ratio(logp, ref_logp, mask)
        self.MEANS["abs"] = 0.9 * self.MEANS["abs"] + 0.1 * float(u.detach().abs().mean())
        return u.square() / 2 / (1 + self.MEANS["abs"])


class Buffered(torch.nn.Module):
    """DEFECT: a running mean in a buffer."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, logp, ref_logp, mask):
        u = log_ratio(logp, ref_logp, mask)
        new = 0.9 * self.mean + 0.1 * u.detach().abs().mean()
        if self.in_place:
            self.mean.copy_(new)
        else:
            self.mean = new
        return u.square() / 2 / (1 + new)


@lru_cache
def positions(columns):
    return torch.arange(columns)


def harmless(logp, ref_logp, mask):
    """Right: what it keeps depends on nothing but its key."""
    CACHE["calls"] = CACHE.get("calls", 0) + 1
    return log_ratio(logp, ref_logp, mask * (positions(logp.shape[1]) >= 0)).square() / 2


@pytest.mark.parametrize(
    ("loss", "named"),
    first(
        1,
        [
            (Running(), "attributes of self"),
            (with_closure(), "seen in its closure"),
            (warmed_up, "STEP of its module"),
            (Buffered(True), "attributes of self"),
            (cached, "the cache of scale_of"),
            (by_first, "attributes of by_first"),
            (by_shape, "CACHE of its module"),
            (on_a_class, "attributes of Meter"),
            (OnItsClass(), "attributes of self"),
            (Buffered(False), "attributes of self"),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_state_is_named_as_that_and_not_as_a_coupling(loss, named):
    # In a bandit every batch has one shape.
    environment = "sequence" if loss is by_shape else "bandit"
    report = kltest.grade(loss, environment=environment, select="KL1,KL2,KL5")
    assert report.verdict == "refuted"
    # By shape, a single rollout has a constant reference: it follows the entropy's gradient, whatever was seen before.
    assert [check.code for check in report.errors] == ["KL105"] * (loss is by_shape) + ["KL507"]
    assert named in report.errors[-1].message
    assert [row.agrees for row in report.gradients] == ([False, False] if loss is by_shape else [None])


@pytest.mark.scheduled
def test_state_that_changes_no_result_is_none():
    report = kltest.grade(harmless, environment="bandit,sequence", select="KL1,KL2,KL5")
    assert (report.verdict, report.errors) == ("confirmed", [])


def test_what_changed_is_named_and_made_as_it_was():
    CACHE.clear()
    running = Running()
    for function, places in ((by_shape, ["CACHE of its module"]), (running, ["attributes of self"])):
        state = State(places_of(function, {}))
        assert state.changed() == []
        function(*(torch.full((2, 3), number) for number in (-1.0, -2.0, 1.0)))
        assert state.changed() == places
        state.reset()
        assert state.changed() == []
    assert CACHE == {}
    assert len(running.seen) == 0


class Baseline:
    """Right: a running mean of what earlier batches cost, which is zero on average wherever it stands."""

    def __init__(self, own=False):
        self.mean, self.own = None, own

    def __call__(self, logp, ref_logp, mask):
        cost = log_ratio(logp, ref_logp, mask).detach()
        if self.own or self.mean is None:
            self.mean = float(cost.mean())
        score = ((cost - self.mean) * logp.where(mask != 0, 0.0).sum(-1)).mean()
        self.mean = 0.9 * self.mean + 0.1 * float(cost.mean())
        return score


@pytest.mark.scheduled
def test_a_baseline_of_earlier_batches_changes_no_expectation():
    report = kltest.grade(Baseline(), environment="bandit,ragged", select="KL1,KL2,KL5")
    assert (report.verdict, [check.code for check in report.warnings]) == ("confirmed", ["KL507"])
    assert [row.method for row in report.gradients] == ["exact"] * 2
    assert "follows the same expected gradient after other calls" in report.warnings[0].message


def test_a_wrong_gradient_is_wrong_with_a_baseline_too():
    def loss(logp, ref_logp, mask, baseline=Baseline()):  # noqa: B008
        return -baseline(logp, ref_logp, mask)

    report = kltest.grade(loss, environment="bandit", select="KL1,KL5")
    assert "KL103" in [check.code for check in report.errors]


@pytest.mark.scheduled
@pytest.mark.parametrize("call", ["of_losses.MEAN.centred", "centred", "of_losses.centred", "MEAN.centred"])
def test_state_in_another_module_of_the_project_is_seen(call, tmp_path, monkeypatch):
    (tmp_path / "of_losses.py").write_text(
        "SEEN = {'mean': 0.0}\n"
        "def centred(u):\n"
        "    before = SEEN['mean']\n"
        "    SEEN['mean'] = 0.9 * before + 0.1 * float(u.mean())\n"
        "    return u - before\n"
        "class Mean:\n"
        "    before = 0.0\n"
        "    def centred(self, u):\n"
        "        before, self.before = self.before, 0.9 * self.before + 0.1 * float(u.mean())\n"
        "        return u - before\n"
        "MEAN = Mean()\n"
    )
    path = tmp_path / "loss.py"
    path.write_text(
        "import of_losses\n"
        "from of_losses import MEAN, centred\n"
        "def loss(logp, ref_logp, mask):\n"
        "    u = (logp - ref_logp).where(mask != 0, 0.0).sum(-1)\n"
        f"    return ({call}(u.detach()) * logp.where(mask != 0, 0.0).sum(-1)).mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "of_losses", raising=False)
    report = kltest.grade(f"{path}:loss")
    assert (report.verdict, [check.code for check in report.failed]) == ("confirmed", ["KL507"])
