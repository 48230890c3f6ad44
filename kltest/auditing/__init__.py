"""Audits: the gradient that a loss follows on a real language model, measured by sampling, with intervals."""
