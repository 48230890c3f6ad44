"""`python -m kltest` is the command `kltest`."""

from kltest.cli import main

main()
