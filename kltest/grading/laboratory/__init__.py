"""Experiments on a loss that checks look at: each changes one thing and asks what the loss makes of it."""
