"""Wrong losses beside those of `clean_sceptic.py`: the same thoughts with a factor gone astray."""

from zoo.clean_sceptic import log_ratios
from zoo.table import Mutant


def square_of_the_mean(logp, ref_logp, mask):
    """1/n of the gradient: the square takes the mean's divisor twice."""
    return log_ratios(logp, ref_logp, mask).mean().square() / 2


MUTANTS = [Mutant("KL206", square_of_the_mean, ("KL402",))]
