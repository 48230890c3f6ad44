"""What the commands of `kltest` do, one a file; `kltest.cli` says how they are called."""
