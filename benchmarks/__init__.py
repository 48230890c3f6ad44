"""One script for each claim about speed: ratios within one run, never seconds of one machine against another's."""
