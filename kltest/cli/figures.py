"""`kltest figures`."""

from __future__ import annotations

from kltest.cli.common import Folder


def command(output: Folder = None) -> int:
    """Draw every figure from the results (in a checkout)."""
    from kltest.reproduce import commands

    return commands.figures(output=output)
