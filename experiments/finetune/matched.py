"""Terms compared at equal KL or at equal length: differences from k1 in the reward, by seed.

The end points of a term at its coefficients are a curve. `at_kl` compares two curves at each KL that both reach;
`given` compares terms by least squares over all end points of a seed, with what may explain the difference.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kltest.reproduce.frames import require

from .settings import LOCAL, UNBIASED

# Places at which curves are compared.
PLACES = 50


def at_kl(ends: pd.DataFrame, name: str, term: str) -> pd.Series:
    """Return a metric's difference from k1 in the reward at equal KL, by seed.

    Curves are linear in log KL between end points; the difference is averaged over the range of log KL of both.

    Args:
        ends: End points of one task: seed, variant, kl, and the metric.
        name: The metric.
        term: The variant that is compared.

    Raises:
        Missing: In no seed do the curves have a common range.
    """
    found = {}
    for seed, own in ends.groupby("seed"):
        curves = [own[own["variant"] == variant].sort_values("kl") for variant in (term, UNBIASED)]
        if min(map(len, curves)) < 2:
            continue
        logs = [np.log(one["kl"].to_numpy(float)) for one in curves]
        low, high = max(one[0] for one in logs), min(one[-1] for one in logs)
        if low < high:
            at = np.linspace(low, high, PLACES)
            ours, theirs = (np.interp(at, log, one[name]) for log, one in zip(logs, curves, strict=True))
            found[seed] = float(np.mean(ours - theirs))
    require(found)
    return pd.Series(found)


def given(ends: pd.DataFrame, name: str, causes: Sequence[str]) -> pd.DataFrame:
    """Return a metric's difference from k1 in the reward that other metrics leave: a row a seed, a column a term.

    Of each seed least squares over the end points of the three terms: the metric on an indicator of each term, and on
    each cause and its square; KL by its logarithm.

    Raises:
        Missing: No seed has the end points that this takes.
    """
    terms, found = [*LOCAL], {}
    for seed, own in ends[ends["variant"].isin((UNBIASED, *LOCAL))].groupby("seed"):
        columns = [np.ones(len(own)), *((own["variant"] == term).to_numpy(float) for term in terms)]
        for cause in causes:
            values = own[cause].to_numpy(float)
            values = np.log(values) if cause == "kl" else values
            centred = values - values.mean()
            columns += [centred, centred**2]
        design = np.stack(columns, axis=1)
        if np.linalg.matrix_rank(design) == design.shape[1]:
            found[seed] = np.linalg.lstsq(design, own[name].to_numpy(float), rcond=None)[0][1 : 1 + len(terms)]
    require(found)
    return pd.DataFrame(found, terms).T
