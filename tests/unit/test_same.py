"""`kltest same`: planted differences are found, their right sisters are the same, and the program shows it."""

import json
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from multiprocessing import get_context

import jsonschema
import pytest
from losses_to_shrink import output
from typer.testing import CliRunner
from weekly import first, spread

import kltest
from kltest.cli import app
from kltest.errors import KltestError, UsageError

SCHEMA = json.loads((files("kltest.comparing") / "same-1.schema.json").read_text(encoding="utf-8"))
LOSSES = """
import os
import time

import torch


def cut(logp, ref_logp, mask):
    return (logp - ref_logp).where(mask != 0, 0.0)


def squares(logp, ref_logp, mask):
    return cut(logp, ref_logp, mask).square().sum() / 2


def in_chunks(logp, ref_logp, mask, chunk=2):
    starts = range(0, len(logp), chunk)
    return sum(squares(*(one[at : at + chunk] for one in (logp, ref_logp, mask))) for at in starts)


def without_the_last(logp, ref_logp, mask, chunk=2):
    starts = range(0, max(len(logp) - chunk + 1, 1), chunk)
    return sum(squares(*(one[at : at + chunk] for one in (logp, ref_logp, mask))) for at in starts)


def in_windows(logp, ref_logp, mask, window=512):
    whole = max(logp.shape[1] - logp.shape[1] % window, min(logp.shape[1], window))
    return squares(logp[:, :whole], ref_logp[:, :whole], mask[:, :whole])


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(context, u):
        context.save_for_backward(u)
        return u.square().sum() / 2

    @staticmethod
    def backward(context, upstream):
        return upstream * context.saved_tensors[0]


class WithoutUpstream(Fused):
    @staticmethod
    def backward(context, upstream):
        return context.saved_tensors[0]


def fused(logp, ref_logp, mask):
    return Fused.apply(cut(logp, ref_logp, mask))


def without_upstream(logp, ref_logp, mask):
    return WithoutUpstream.apply(cut(logp, ref_logp, mask))


def by_row(logp, ref_logp, mask):
    return cut(logp, ref_logp, mask).square().sum(-1) / 2


def padded(logp, ref_logp, mask):
    return (cut(logp, ref_logp, mask).sum(-1).square() / 2).mean()


def packed(logp, ref_logp, mask):
    live = mask != 0
    parts = (logp - ref_logp)[live].split(live.sum(-1).tolist())
    return torch.stack([part.sum().square() / 2 for part in parts]).mean()


def across_rows(logp, ref_logp, mask):
    live = mask != 0
    ends, sums = live.sum(-1).cumsum(0), (logp - ref_logp)[live].cumsum(0)
    return torch.stack([sums[end - 1].square() / 2 for end in ends]).mean()


def over_tokens(logp, ref_logp, mask):
    return cut(logp, ref_logp, mask).square().sum() / mask.sum()


def of_live(logp, ref_logp, mask):
    return (logp - ref_logp)[mask != 0].square().mean()


def over_columns(logp, ref_logp, mask):
    return cut(logp, ref_logp, mask).square().mean()


def in_float32(logp, ref_logp, mask):
    return squares(logp.float(), ref_logp.float(), mask)


def in_float32_and_chunks(logp, ref_logp, mask):
    return in_chunks(logp.float(), ref_logp.float(), mask)


def halved(logp, ref_logp, mask):
    return squares(logp, ref_logp, mask) / 2


def shifted(logp, ref_logp, mask):
    return squares(logp, ref_logp, mask) + 0.25


def times_the_mask(logp, ref_logp, mask):
    return ((logp - ref_logp) * mask).square().sum() / 2


def logs(logp, ref_logp, mask, kl_coef=0.1):
    kl = over_tokens(logp, ref_logp, mask)
    return kl_coef * kl, {"kl": kl.detach(), "rows": len(logp)}


def logs_columns(logp, ref_logp, mask, kl_coef=0.1):
    return kl_coef * over_tokens(logp, ref_logp, mask), {"kl": over_columns(logp, ref_logp, mask).item()}


def squared_coefficient(logp, ref_logp, mask, kl_coef=0.1):
    kl = over_tokens(logp, ref_logp, mask)
    return kl_coef**2 * kl, {"kl": kl.detach(), "rows": len(logp)}


def logs_less(logp, ref_logp, mask, kl_coef=0.04):
    return logs(logp, ref_logp, mask, kl_coef)


def clipped(logp, ref_logp, mask, most=3.0):
    return cut(logp, ref_logp, mask).clamp(-most, most).square().sum() / 2


def clipped_at_three(logp, ref_logp, mask, most=3.0):
    return cut(logp, ref_logp, mask).clamp(-3, 3).square().sum() / 2


def from_logits(logits, tokens, ref_logp, mask):
    return squares(logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].where(mask != 0, 0.0), ref_logp, mask)


def from_raw_logits(logits, tokens, ref_logp, mask):
    return squares(logits.gather(-1, tokens[..., None])[..., 0], ref_logp, mask)


def guarded(logp, advantage, group):
    std = torch.stack([advantage[group == one].std(unbiased=False) for one in group])
    return (logp.sum(-1) * advantage / (std + 1e-4)).mean()


def tied_as_ones(logp, advantage, group):
    std = torch.stack([advantage[group == one].std(unbiased=False) for one in group])
    return (logp.sum(-1) * torch.where(std > 0, advantage / (std + 1e-4), 1.0)).mean()


def of_groups(logp, mask, reward, num_generations=4):
    groups = reward.view(-1, num_generations)
    centred = (groups - groups.mean(1, keepdim=True)).view(-1, 1)
    return (logp.where(mask != 0, 0.0) * centred).sum() / mask.sum()


def of_short_rollouts(logp, ref_logp, mask):
    assert logp.shape[1] <= 64, "at most 64 tokens are taken"
    return squares(logp, ref_logp, mask)


def refusing(logp, ref_logp, mask):
    raise ValueError("never")


def noisy(logp, ref_logp, mask):
    return squares(logp, ref_logp, mask) * (1 + os.urandom(1)[0])


def drawn(logp, ref_logp, mask):
    return squares(logp, ref_logp, mask) * torch.rand((), dtype=torch.float64)


def hanging(logp, ref_logp, mask):
    while len(logp) > 8:
        time.sleep(0.01)
    return squares(logp, ref_logp, mask)


def hanging_later(logp, ref_logp, mask):
    return hanging(logp, ref_logp, mask) / 2


def over_all_tokens(logp, ref_logp, mask):
    count, ranks = mask.sum(), 1
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(count)
        ranks = torch.distributed.get_world_size()
    return ranks * cut(logp, ref_logp, mask).square().sum() / count
"""
SAME = (
    *(("squares", "in_chunks"), ("padded", "packed"), ("squares", "from_logits"), ("drawn", "drawn")),
    *(("squares", "fused"), ("by_row", "by_row"), ("over_tokens", "of_live"), ("guarded", "guarded")),
    *(("in_float32", "in_float32_and_chunks"), ("clipped", "clipped")),
)
# Two losses; one of the kinds of batches on which they differ, and one on which they do not; what differs; words.
DIFFER = {
    # A row of each kind of batch and of each thing that differs.
    ("squares", "without_the_last"): ("batch sizes", "groups", "the value", "3 rollouts of bandit"),
    ("squares", "in_windows"): ("long", "batch sizes", "the value", "1 rollout of long 1031"),
    ("fused", "without_upstream"): ("gradient from above", "batch sizes", "the gradient", "1 rollout of bandit"),
    ("packed", "across_rows"): ("batch sizes", "", "the value", "2 rollouts of bandit"),
    ("over_tokens", "over_columns"): ("columns", "", "the value", "1 rollout of"),
    ("squares", "in_float32"): ("batch sizes", "precision", "the value", "A computes in float64 and B in float32"),
    ("squares", "halved"): ("batch sizes", "", "the value", "B is A times 0.5"),
    ("squares", "times_the_mask"): ("padding", "batch sizes", "the value", "at padding"),
    ("logs", "squared_coefficient"): ("β", "batch sizes", "the gradient", "β = "),
    ("clipped", "clipped_at_three"): ("options", "batch sizes", "the value", "most = "),
    ("from_logits", "from_raw_logits"): ("raw logits", "batch sizes", "the value", "added to all logits"),
    ("guarded", "tied_as_ones"): ("groups", "", "the gradient", "1 rollout of"),
    # What else may be said of it.
    ("squares", "shifted"): ("batch sizes", "", "the value", "B is A plus 0.25; the gradients are equal"),
    ("squares", "by_row"): ("batch sizes", "", "the objective", "B is A divided by the number of rows"),
    ("logs", "logs_columns"): ("padding", "", "logged kl", "only A logs rows"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("same")
    (made / "losses.py").write_text(LOSSES, encoding="utf-8")
    return made


@pytest.fixture
def compare(folder):
    def compared(a, b, **options):
        return kltest.same(*(f"{folder}/losses.py:{name}" for name in (a, b)), **options)

    return compared


@pytest.fixture(scope="module")
def run():
    """What programs print, all run by one process that never hears of kltest."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield lambda code, folder: pool.submit(output, code, folder).result()


def families(found, status):
    return {one.family for one in found.tried if one.status == status}


@pytest.mark.parametrize(("a", "b"), first(2, SAME))
def test_right_sisters_are_the_same(compare, a, b):
    found = compare(a, b)
    if (a, b) == ("squares", "from_logits"):  # a NaN at padding goes through the logarithm of the softmax
        assert {part.what for one in found.tried for part in one.differences} == {
            "the gradient at padded positions (logits)"
        }
        return
    assert (found.verdict, found.exit_code) == ("same", 0), found.to_text()
    assert {"batch sizes", "padding", "columns", "gradient from above", "long"} <= families(found, "same")


@pytest.mark.parametrize(("a", "b"), spread(2, DIFFER))
def test_planted_differences_are_found_and_the_program_shows_them(compare, run, folder, a, b):
    family, other, what, words = DIFFER[a, b]
    found = compare(a, b)
    assert (found.verdict, found.exit_code) == ("differ", 1)
    assert family in families(found, "differ")
    assert other not in families(found, "differ")
    assert what in {part.what for one in found.tried for part in one.differences}
    assert words in found.to_text()
    lines = [line.split(" ", 1) for line in run(found.program, folder)]
    shown = {letter: [text for name, text in lines if name == letter] for letter in "AB"}
    assert shown["A"]
    assert shown["B"]
    assert shown["A"] != shown["B"]


def test_a_tolerance_is_obeyed(compare):
    assert compare("squares", "in_float32", tolerance=1e-5).verdict == "same"
    with pytest.raises(UsageError, match="tolerance"):
        compare("squares", "in_float32", tolerance=-1.0)


@pytest.mark.scheduled
def test_arguments_of_both_and_of_one(compare):
    assert compare("clipped", "clipped", arguments={"most": 2.0}, arguments_b={"most": 1.0}).verdict == "differ"
    assert compare("in_chunks", "in_chunks", arguments_b={"chunk": 3}).verdict == "same"
    assert "is 0.1 in A, 0.04 in B" in compare("logs", "logs_less").to_text()
    given = compare("logs", "logs_less", arguments_a={"kl_coef": 0.2}, arguments_b={"kl_coef": 0.1})
    assert given.explained == "B is A times 0.5"
    assert "0.2)[0])" in given.program


def test_what_one_refuses_is_listed_and_nothing_at_all_is_undecided(compare):
    found = compare("squares", "of_short_rollouts")
    assert found.verdict == "same"
    assert "at most 64 tokens are taken" in found.to_text()
    assert families(found, "not tried") == {"long"}
    assert families(compare("of_groups", "of_groups"), "not tried") <= {"options"}
    nothing = compare("squares", "refusing")
    assert (nothing.verdict, nothing.exit_code) == ("undecided", 4)
    assert "never" in nothing.reason
    with pytest.raises(KltestError, match="never"):
        nothing.raise_for_failure()


def test_a_loss_that_does_not_repeat_itself_is_undecided(compare):
    found = compare("noisy", "squares")
    assert found.exit_code == 4
    assert found.reason.startswith("A does not repeat itself")
    assert "It draws random numbers" in compare("drawn", "drawn").to_text()


@pytest.mark.scheduled
def test_ranks(compare):
    found = compare("over_tokens", "over_all_tokens", ranks=2)
    assert families(found, "differ") == {"ranks"}
    differ = [one.batch for one in found.tried if one.status == "differ"]
    assert any("A on one and on 2 ranks" in one for one in differ)
    assert not any("B on one" in one for one in differ)
    assert "A on 2 ranks is not A on one" in found.to_text()
    halves = compare("squares", "squares", ranks=2)
    assert "A on 2 ranks is not A on one: A on 2 ranks is A on one times 0.5" in halves.to_text()


def call(*arguments):
    return CliRunner().invoke(app, ["same", *map(str, arguments)])


def test_the_command_compares_two_checkouts_of_one_file(folder, tmp_path):
    for name, scale in (("old", 1), ("new", 3)):
        package = tmp_path / name / "trainer"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "scale.py").write_text(f"SCALE = {scale}\n")
        (package / "losses.py").write_text(
            "from trainer.scale import SCALE\n\n\ndef kl(logp, ref_logp, mask):\n"
            "    return SCALE * ((logp - ref_logp).where(mask != 0, 0.0) ** 2).sum()\n"
        )
    report = tmp_path / "same.json"
    both = [tmp_path / name / "trainer" / "losses.py" for name in ("old", "new")]
    done = call(*(f"{file}:kl" for file in both), "--output", "text", "--output", f"json:{report}")
    assert done.exit_code == 1
    assert "B is A times 3" in done.stdout
    found = json.loads(report.read_text(encoding="utf-8"))
    jsonschema.validate(found, SCHEMA)
    assert found["verdict"] == "differ"


@pytest.mark.scheduled
def test_exit_codes_of_the_command(folder):
    losses = f"{folder}/losses.py"
    assert call(f"{losses}:squares", f"{losses}:nothing").exit_code == 2
    assert call(f"{losses}:squares", "trl").exit_code == 2
    assert call(f"{losses}:squares", f"{losses}:clipped", "--arg-a", "most=1").exit_code == 2
    assert call(f"{losses}:squares", f"{losses}:squares").exit_code == 0
    wrong = call(f"{losses}:squares", f"{losses}:hanging_later", "--timeout", 6)
    assert wrong.exit_code == 1
    assert "smallest  " in wrong.stdout
    hangs = call(f"{losses}:squares", f"{losses}:hanging", "--timeout", 6)
    assert hangs.exit_code == 4
    assert "did not return within 6 s (--timeout), in hanging at" in hangs.stdout
