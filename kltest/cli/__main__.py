"""`python -m kltest.cli` is the command `kltest`."""

from kltest.cli import main

main()
