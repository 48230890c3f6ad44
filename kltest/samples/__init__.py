"""Expected gradients from samples: drawing, controls, and one statistics of blocks for grading and for audits."""

from kltest.samples.sampled import Sampled, sampled

__all__ = ["Sampled", "sampled"]
