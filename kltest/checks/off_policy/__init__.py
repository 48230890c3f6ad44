"""KL3xx: a sampler that is not the policy."""
