"""Preflight: checks of a KL term in anybody's training loop, in seconds, before the first step."""
