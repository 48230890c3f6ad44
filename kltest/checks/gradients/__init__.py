"""KL1xx: which gradient is followed."""
