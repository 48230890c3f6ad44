"""The smallest environment in which a loss fails, and the program that shows it without kltest."""
