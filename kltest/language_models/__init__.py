"""Causal language models as policies: scoring, generation, and tiny ones that can be enumerated."""
