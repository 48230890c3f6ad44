"""The main job: run the experiments of a checkout, draw the figures, typeset the paper, say what agrees.

`reproduce`, `run`, `figures` and `paper` do it and return the exit code; nothing here imports torch by itself.
`results(name)` gives the results of an experiment as a data frame.
"""

from kltest.reproduce.claims import Claim
from kltest.reproduce.commands import figures, paper, reproduce, run
from kltest.reproduce.experiment import Request
from kltest.reproduce.frames import results

__all__ = ["Claim", "Request", "figures", "paper", "reproduce", "results", "run"]
