"""Causal language models as policies: generation and scoring of rollouts, and tables of all next-token logits."""
