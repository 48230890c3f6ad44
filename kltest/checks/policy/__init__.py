"""KL9xx: the policy part of a loss, what advantage, ratio, mask and clip follow together."""
