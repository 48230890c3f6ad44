"""KL7xx: top-k heads, temperature, truncated samplers."""
