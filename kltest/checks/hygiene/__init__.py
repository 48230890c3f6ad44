"""KL5xx: padding, precision, side effects."""
