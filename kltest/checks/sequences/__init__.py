"""KL2xx: tokens, lengths and batches."""
