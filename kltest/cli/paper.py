"""`kltest paper`."""

from __future__ import annotations

from kltest.cli.common import Folder


def command(output: Folder = None) -> int:
    from kltest.reproduce import commands

    return commands.paper(output=output)
