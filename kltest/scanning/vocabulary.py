"""The word lists of the scan, from words.toml beside this file."""

import tomllib
from pathlib import Path

WORDS = {
    name: frozenset(words.split())
    for name, words in tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8")).items()
}
"""Sets of words by name."""
