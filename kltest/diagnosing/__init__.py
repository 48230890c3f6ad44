"""Diagnosis of logged rollouts: what per-token log-probs alone show of sampler, engine, reference, masks and penalty."""
