"""Grade real libraries in environments of their own, and keep, compare and show the results."""
