"""KL4xx: groups of rollouts of one prompt, and the coefficient."""
