"""Counter-examples: the smallest environment in which a loss fails, and a program that shows it without kltest."""
