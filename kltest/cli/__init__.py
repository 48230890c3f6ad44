"""The command line: a module for each command, listed in `kltest.cli.application`."""

from kltest.cli.application import app, main

__all__ = ["app", "main"]
