"""Source changes that make a loss follow the declared gradient: proposed only if the changed source is confirmed."""
