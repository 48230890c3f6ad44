"""Measure the expected gradient of a loss in one case after another, and name it."""
