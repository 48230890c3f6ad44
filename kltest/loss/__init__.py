"""From what a user names to something that can be called with a rollout."""
