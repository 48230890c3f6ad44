"""Finding the KL terms of a source tree, lifting each into a function of rollout fields, and grading it."""
