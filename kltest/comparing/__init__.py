"""Are two implementations of a loss the same function? `kltest same A B` and `kltest.same`."""
