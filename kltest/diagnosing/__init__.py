"""Diagnosis of logged rollouts: what log-probs alone show of sampler, engine, reference, masks and penalty."""
