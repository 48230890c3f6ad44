"""Libraries' own losses, called with the fields of a rollout as their trainers call them; one file a library.

Nothing in here knows kltest, so that a program that shows a finding again can contain the same lines. What an installed
version does not have is a LookupError with a sentence, never a setting that is silently left out.
"""
