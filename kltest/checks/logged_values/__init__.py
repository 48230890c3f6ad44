"""KL6xx: the value that is logged."""
