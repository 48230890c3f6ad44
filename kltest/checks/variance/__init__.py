"""KL8xx: the variance of a right gradient."""
