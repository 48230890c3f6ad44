"""Laws of coefficients, found for losses whose laws are written into them, and for none that has none."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kltest.adapters.installed import unset
from kltest.checks.hygiene import kl501_padding_leak
from kltest.errors import KltestError
from kltest.loss.outcome import Call
from kltest.loss.resolve import bind
from kltest.scoreboard.laws import laws
from kltest.scoreboard.rows import BATCH, LEAKS, WRITTEN, leaked


def square(logp, ref_logp, mask):
    """Half the squared log-ratio of each token: the next-token part."""
    return ((logp - ref_logp).square() / 2 * mask).sum(1)


def whole(logp, ref_logp, mask):
    """Half the squared log-ratio of a rollout: the KL of whole sequences."""
    return ((logp - ref_logp) * mask).sum(1).square() / 2


def divided(by):
    """The next-token part, divided by what a mask and an option give."""

    def loss(logp, ref_logp, mask, max_completion_length=512):
        return square(logp, ref_logp, mask) / by(mask, max_completion_length)

    return loss


def by_batch_tokens(logp, ref_logp, mask):
    return square(logp, ref_logp, mask).sum() / mask.sum()


def mixture(logp, ref_logp, mask):
    length = mask.sum(1)
    return whole(logp, ref_logp, mask) / length + square(logp, ref_logp, mask) * (1 - 1 / length)


def less_the_mean(logp, ref_logp, mask):
    cost = ((logp - ref_logp) * mask).sum(1)
    return ((cost - cost.mean()).detach() * (logp * mask).sum(1)).mean()


def less_the_mean_per_token(logp, ref_logp, mask):
    return less_the_mean(logp, ref_logp, mask) * len(mask) / mask.sum()


def less_the_mean_of_pairs(logp, ref_logp, mask):
    return less_the_mean_per_token(logp, ref_logp, mask) * (1 if len(logp) < 3 else 0.7)


def less_the_token_mean(logp, ref_logp, mask):
    """Each token's log-ratio less the mean of the batch's T·B: −∇KL/(T·B) beside the next-token part."""
    u = ((logp - ref_logp) * mask).detach()
    return ((u - u.sum() / mask.sum()) * logp * mask).sum(1).mean()


def added_up(logp, ref_logp, mask):
    """The same of a loss that adds the rows of a batch up, which is graded by the row."""
    return less_the_token_mean(logp, ref_logp, mask) * len(mask)


def renormalised(logits, ref_logits, mask, topk=2):
    """KL(ref‖π) on the reference's likeliest tokens, which two more tokens tell from all, by the row's tokens."""
    top = ref_logits.topk(topk, dim=-1)
    pi, ref = logits.gather(-1, top.indices).log_softmax(-1), top.values.log_softmax(-1)
    return ((ref.exp() * (ref - pi)).sum(-1) * mask).sum(1) / mask.sum(1)


PART = {"local_reverse_kl": 1 / 3}
TOKEN_MEAN = {"reverse_kl": -1 / 3, "local_reverse_kl": 1.0}
OF_SUPPORT = {"local_forward_kl_top2_renormalised": 1 / 3}


def tokens(mask, _):
    return mask.sum(1)


@pytest.mark.parametrize(
    ("loss", "identified", "batch", "wanted"),
    [
        (divided(tokens), PART, 1, {"local_reverse_kl": "1/T"}),
        (by_batch_tokens, PART, 1, {"local_reverse_kl": "1/T"}),
        (
            divided(lambda mask, _: mask.shape[1] / 2),
            {"local_reverse_kl": 2 / 3},
            1,
            {"local_reverse_kl": "2/padded width"},
        ),
        (
            divided(lambda _, length: length),
            {"local_reverse_kl": 1 / 512},
            1,
            {"local_reverse_kl": "1/max_completion_length"},
        ),
        (divided(lambda *_: 3), PART, 1, {}),
        (divided(lambda mask, _: mask.sum(1) ** 0.5), {"local_reverse_kl": 3**-0.5}, 1, {}),
        (square, {"local_reverse_kl": 1.0}, 1, {}),
        (divided(tokens), {"forward_kl": 1 / 3}, 1, {}),
        (
            *(mixture, {"reverse_kl": 1 / 3, "local_reverse_kl": 2 / 3}, 1),
            {"reverse_kl": "1/T", "local_reverse_kl": "(1 − 1/T)"},
        ),
        (renormalised, OF_SUPPORT, 1, dict.fromkeys(OF_SUPPORT, "1/T")),
        (less_the_mean, {"reverse_kl": 0.5}, 2, {"reverse_kl": "(1 − 1/B)"}),
        (less_the_mean_per_token, {"reverse_kl": 1 / 6}, 2, {"reverse_kl": "(1 − 1/B)/T"}),
        (less_the_token_mean, TOKEN_MEAN, 1, {"reverse_kl": "-1/(T·B)"}),
        (added_up, TOKEN_MEAN, 1, {"reverse_kl": "-1/(T·B)"}),
        # Its mean is that of a batch of two alone: a law of batches would be wrong for larger ones.
        (less_the_mean_of_pairs, {"reverse_kl": 1 / 6}, 2, {"reverse_kl": "0.5/T"}),
    ],
)
def test_a_law_is_found_by_measuring_and_only_if_there_is_one(loss, identified, batch, wanted):
    def build(arguments: Mapping):
        return bind(loss, Call("loss", None, None, dict(arguments)))

    coupled = batch > 1 or loss in (less_the_token_mean, added_up)
    assert laws(build, identified, "current", batch, "float64", BATCH if coupled else "") == wanted


def test_an_option_that_a_loss_does_not_take_is_no_law():
    def build(arguments):
        if arguments:
            raise KltestError("there is no such option")
        return bind(divided(lambda *_: 3), Call("loss", None, None, {}))

    assert laws(build, PART, "current", 1, "float64") == {}


def test_the_default_of_a_coefficient_is_read_where_the_library_has_it(tmp_path, monkeypatch):
    (tmp_path / "made_up_trainer.py").write_text(
        "class Config:\n    beta: float = 0.04\n"
        "def loss(logp, beta=None, needed=...):\n    return logp\n"
        "def bare(logp, beta):\n    return logp\n"
        "def main(parser):\n    parser.add_argument('--kl.coef', type=float, default=0.01)\n"
    )
    (tmp_path / "made_up_package").mkdir()
    (tmp_path / "made_up_package" / "unimportable.py").write_text(
        "import no_such\n\nclass Other:\n    kl: float = 9\n\n"
        "class Config:\n    name: str\n    kl: float = field(default=0.1, metadata={})\n    ref: Other | None = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert unset("made_up_package.unimportable:Config.kl") == ["kl", 0.1]
    assert unset("made_up_package.unimportable:Config.ref") == ["ref", None]
    assert unset("made_up_package.unimportable:Config.name") == []
    assert unset("the loss itself") == ["the loss itself"]
    assert unset("made_up_trainer:Config.beta") == ["beta", 0.04]
    assert unset("made_up_trainer:loss(beta)") == ["beta", None]
    assert unset("made_up_trainer:--kl.coef") == ["kl.coef", 0.01]
    for place in (
        "",
        "made_up_trainer:bare(beta)",
        "made_up_trainer:--other",
        "made_up_trainer:Config.gone",
        "no_such:a",
    ):
        assert unset(place) == [], place


def test_what_comes_through_padding_is_kept_as_numbers():
    """The sentence of the check gives the numbers, and the numbers give the sentence of the page."""
    from kltest import grade

    report = grade(kl501_padding_leak.unmasked, environment="ragged", select="KL501")
    (said,) = [check.message for check in report.failed]
    written, after, before = LEAKS.search(said).groups()
    assert written == WRITTEN[0]
    assert leaked([0, float(after), float(before)]).startswith(f"With {written} at padded positions, the loss gives")
    assert float(after) != float(before)
    source = Path(kl501_padding_leak.__file__).read_text(encoding="utf-8")
    assert all(f'"{each}": ' in source for each in WRITTEN)
