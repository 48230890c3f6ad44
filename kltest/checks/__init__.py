"""Known ways to get a KL gradient wrong: a folder for each family, a module for each check, its words in words.toml.

To add a check, write its module, `klNNN_its_name.py`, and a table `[KLNNN]` in words.toml beside it.
"""

import tomllib
from pathlib import Path
from typing import Any

from kltest.checks.check import Check, Found

__all__ = ["CHECKS", "Check", "Found"]


def _discover() -> dict[str, Check]:
    found = {}
    for path in Path(__file__).parent.glob("*/words.toml"):
        for code, words in tomllib.loads(path.read_text(encoding="utf-8")).items():
            found[code] = _check(f"{__name__}.{path.parent.name}", code, words)
    return dict(sorted(found.items()))


def _check(family: str, code: str, words: dict[str, Any]) -> Check:
    texts: dict[str, Any] = {
        part: " ".join(text.split()) if isinstance(text, str) else text for part, text in words.items()
    }
    return Check(code=code, module=f"{family}.{code.lower()}_{words['name'].replace('-', '_')}", **texts)


CHECKS: dict[str, Check] = _discover()
