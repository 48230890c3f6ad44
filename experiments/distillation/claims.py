"""Distillation: claims on where each loss ends and how noisy it is, and the table of losses."""

import pandas as pd

from kltest.reproduce.bounds import EVERY, Bound, above, at_least, below, near
from kltest.reproduce.claims import OWN, Claims, Measured
from kltest.reproduce.frames import Row, Rows, known, need, ordered, select
from kltest.truth import ATLAS

from .experiment import FORMS, PARTS, K

VERL = "verl, RFC 7856 and pull requests 5041, 7425, 7806"
MILES = "Miles, issue 2362"
EXACT = near(0, 1e-6)  # some hundred steps that shrink what is left by a fifth or more each

claims = Claims("distillation")
tidy = ordered(PARTS)


def _alone(rows: pd.DataFrame, *forms: str, **wanted: object) -> pd.DataFrame:
    """Ends of losses alone, without a reward."""
    return need(rows, "ends", beta=0.0, **({"form": forms} if forms else {}), **wanted)


@claims.measure(OWN, "policies in closed form against some hundred steps", off=EXACT)
def _predicted(rows: pd.DataFrame) -> Measured:
    """alone, each loss ends at its fixed point: the teacher for sums over all tokens and the sampled token's log-ratio;
    ref/M on the support and nothing outside for the truncated forward sum; ref on the support for the tail bucket;
    `ref/e` on the support for the truncated reverse sum; the start for an exact KL in the advantage"""
    return {"off": _alone(rows)["off"].dropna()}


@claims.measure(
    f"{VERL}; the share: {OWN}", "1 − M/e, with M the teacher's mass on the support", outside=at_least(0.632)
)
def _pushed_out(rows: pd.DataFrame) -> Measured:
    """a reverse KL truncated to the teacher's likeliest tokens leaves at least {outside:.1%} of the student's mass
    outside of them, whatever the teacher has there"""
    found = _alone(rows, "reverse top")
    return {"outside": found["outside"], "teachers": found["teacher_outside"]}


@claims.measure(f"{VERL}; {OWN}", "every draw", times=above(1))
def _own_support(rows: pd.DataFrame) -> Measured:
    """truncated to the student's own likeliest tokens, it leaves the student with more than {times} times the mass
    outside of its likeliest tokens that the teacher has outside of its own"""
    found = _alone(rows, "reverse own")
    return {"times": found["own_outside"] / found["teacher_outside"]}


@claims.measure(VERL, "a millionth", outside=EXACT, teachers=above(0))
def _pulled_in(rows: pd.DataFrame) -> Measured:
    """a forward KL truncated to the teacher's likeliest tokens ends without the teacher's tail"""
    found = _alone(rows, "forward top")
    return {"outside": found["outside"], "teachers": found["teacher_outside"]}


@claims.measure(VERL, "every draw", share=below(1), kl=above(0))
def _clamped(rows: pd.DataFrame) -> Measured:
    """clamped where it is negative, it stops where the sum is zero, away from the teacher: with less than {share} times
    the teacher's mass outside"""
    found = _alone(rows, "forward top, clamped")
    return {"share": found["outside"] / found["teacher_outside"], "kl": found["kl"]}


@claims.measure(OWN, "of rounding", off=EXACT, left=above(1e-4))
def _bucket(rows: pd.DataFrame) -> Measured:
    """with a tail bucket the student has the teacher's mass outside of the teacher's likeliest tokens, and a KL of more
    than {left} remains, within the tail"""
    found = _alone(rows, "forward top, tail")
    return {"off": found["outside"] - found["teacher_outside"], "left": found["kl"]}


@claims.measure(MILES, "of rounding", times=near(1, 1e-9))
def _nothing(rows: pd.DataFrame) -> Measured:
    """an exact KL of the next token in the advantage moves nothing"""
    found = _alone(rows, "advantage")
    return {"times": found["kl"] / found["kl_at_start"]}


def _gaps(rows: pd.DataFrame, **wanted: object) -> pd.Series:
    """Mean loss of E[R] − β·KL against the optimum, by loss."""
    return known(need(rows, "ends", beta=above(0), **wanted).groupby("form")["gap"].mean())


@claims.measure(OWN, "means over draws, the steps that are left", sampled=below(0.05), least=above(0.1))
def _beside(rows: pd.DataFrame) -> Measured:
    """beside a reward the sampled token's log-ratio, to go, ends at the optimum of `E[R] − β·KL`, less than {sampled}
    below it; losses over a support end more than {least} below it in the mean"""
    gaps = _gaps(rows)
    return {
        "sampled": gaps[["sampled token"]],
        "least": gaps[[name for name in gaps.index if FORMS[name].of_a_support]],
    }


@claims.measure(OWN, "means over draws", times=above(1))
def _bounded(rows: pd.DataFrame) -> Measured:
    """a bounded divergence, as Jensen–Shannon's, holds a student beside a reward less than the forward KL does: it
    loses more than {times} times as much"""
    gaps = _gaps(rows)
    return {"times": gaps[["jensen-shannon"]].to_numpy() / gaps["forward"]}


def _noise(rows: pd.DataFrame, **wanted: object) -> pd.Series:
    """Variance of a rollout's gradient with the sampled token's log-ratio over that with the exact next-token KL."""
    found = need(rows, "noise", **wanted)
    return found["variance of sampled token"] / found["variance of reverse"]


@claims.measure(OWN, "every draw; at the teacher both vanish", times=above(2), place=below(1))
def _alone_noise(rows: pd.DataFrame, place: Bound) -> Measured:
    """without a reward the sampled token's log-ratio has more than {times} times the variance of the exact next-token
    KL of as many forward passes, at every overlap of student and teacher"""
    return {"times": _noise(rows, rewarded=False, place=place)}


@claims.measure(OWN, "every draw; of rounding", share=below(1), of_one_token=near(0, 1e-9), far=above(1))
def _beside_noise(rows: pd.DataFrame) -> Measured:
    """beside a reward the order turns: at the optimum the sampled token's log-ratio, less a baseline, cancels the
    reward's noise, all of it in a bandit, and has less than {share} times the exact KL's variance; far from a teacher
    it has more"""
    at = {"rewarded": True, "place": 1.0}
    whole, one = (_noise(rows, environment=environment, **at) for environment in ("sequence", "bandit"))
    return {"share": whole, "of_one_token": one, "far": _noise(rows, rewarded=True, place=0.0, teacher="far")}


@claims.measure(OWN, "every draw", same=EVERY)
def _tail_noise(rows: pd.DataFrame) -> Measured:
    """a tail bucket over the student's likeliest tokens is as noisy as the exact KL, not as the sampled token: nearer
    to the former on a scale of factors"""
    found = need(rows, "noise", rewarded=False, place=below(1))
    sampled, exact, tail = (found[f"variance of {name}"] for name in ("sampled token", "reverse", "reverse own, tail"))
    return {"same": tail**2 < sampled * exact}


# What a teacher sends for each token: ids and log-probs of four bytes each.
BYTES = {"sampled token": "4", "reverse own": "4k", "reverse own, tail": "4k"}
FOLLOWS = {
    "sampled token": "∇KL(π‖ref)",
    "advantage": "0",
    "forward top, clamped": "the same where the sum is positive, else 0",
}
ENDS = {
    "_teacher": "ref",
    "_start": "the start",
    "_within": "ref/M on S, 0 outside",
    "_coarse": "ref on S, 1 − M outside",
    "_over_e": "ref/e on S, 1 − M/e outside",
    "forward top, clamped": "where the sum is 0",
    "forward top, renormalised": "∝ ref on S, any mass",
    "reverse own": "none",
    "reverse own, tail": "ref on S, 1 − M outside",
}


def tables(rows: Rows) -> dict[str, list[Row]]:
    """The losses: what each follows, where it ends, its mass outside, bytes from the teacher, variance of a rollout."""
    ends, noise = select(rows, "ends", beta=0.0, k=K), select(rows, "noise", rewarded=False, place=0.0)

    def relative(name: str) -> float:
        return float((noise[f"variance of {name}"] / noise[f"square of {name}"]).mean())

    lines = []
    for name, form in FORMS.items():
        mine, measured = select(ends, form=name), f"variance of {name}" in noise
        lines.append(
            {
                "loss": form.words,
                "follows": _followed(name),
                "fixed point": ENDS[_end(name)],
                "mass outside": "" if mine.empty else f"{mine['outside'].mean():.2f}",
                "bytes a token": BYTES.get(name, "8k" if form.of_a_support else "4V"),
                "variance": f"{relative(name) / relative('sampled token'):.2g}" if measured else "",
            }
        )
    return {"forms": lines}


def _followed(name: str) -> str:
    return FOLLOWS.get(name) or ATLAS[FORMS[name].name.replace("K", "2")].formula.replace("top 2", "top k")


def _end(name: str) -> str:
    return name if (end := FORMS[name].end) is None else end.__name__
