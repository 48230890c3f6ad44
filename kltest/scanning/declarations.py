"""Statements of the owners of a tree on its terms: comments, `[tool.kltest.scan]`, and baselines of known findings."""

import io
import json
import re
import shlex
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kltest.checks import CHECKS
from kltest.errors import UsageError, did_you_mean
from kltest.grading.forms import combination
from kltest.scanning.sources import Source

_COMMENT = re.compile(r"#\s*kltest:\s*(.*?)\s*$")
_OF = re.compile(r"\[([^\]]*)\]\s*")
_EXPECT = re.compile(r"expect\s*=\s*(\S+)")
_IGNORE = re.compile(r"ignore\s*\[([^\]]*)\]\s*(.*)")
Said = tuple[str, dict[str, str]]
"""The gradient that is declared ("": none), and excused codes with their reasons."""
Key = tuple[str, ...]
"""File, function, place, variant and formula of a finding, and its codes."""


@dataclass(frozen=True)
class Rules:
    """The table `[tool.kltest.scan]`, by patterns of files relative to its `folder`."""

    folder: Path = field(default_factory=Path.cwd)
    expect: Mapping[str, str] = field(default_factory=dict)
    ignore: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    baseline: str = ""

    def excludes(self, file: Path) -> bool:
        """Return True for a file that is not to be read."""
        return any(self._fits(file, pattern) for pattern in self.exclude)

    def of(self, file: str) -> Said:
        """Return what is said of all terms of a file."""
        path = Path(file)
        expected = [name for pattern, name in self.expect.items() if self._fits(path, pattern)]
        codes = [codes for pattern, codes in self.ignore.items() if self._fits(path, pattern)]
        return (expected or [""])[-1], {code: why for each in codes for code, why in each.items()}

    def _fits(self, file: Path, pattern: str) -> bool:
        absolute = Path.cwd() / file
        inside = absolute.is_relative_to(self.folder)
        return inside and fnmatchcase(absolute.relative_to(self.folder).as_posix(), pattern)


def rules(table: Mapping[str, Any], path: Path) -> Rules:
    """Return what the table `[tool.kltest.scan]` of a pyproject.toml says.

    Raises UsageError, naming file and line, for an unknown key, gradient or code, or a value of another kind.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next((number for number, line in enumerate(lines) if "kltest.scan" in line), 0)

    def place(word: str) -> str:
        line = next((number for number, line in enumerate(lines[start:], start) if word in line), start)
        return f"{path}, line {line + 1}: {word}"

    given = {"expect": {}, "ignore": {}, "exclude": [], "baseline": "", **table}
    expect, ignore, exclude, baseline, *more = given.values()
    if more:
        wrong = list(given)[4]
        hint = did_you_mean(wrong, list(given)[:4])
        raise UsageError(f"{place(wrong)} is no setting of kltest scan; {hint}there are: {', '.join(list(given)[:4])}")
    if not _texts(expect):
        raise UsageError(f'{place("expect")}: give gradients by files, as {{ "losses/*.py" = "forward_kl" }}')
    for name in expect.values():
        combination(name, place(name))
    if not isinstance(ignore, Mapping) or not all(map(_texts, ignore.values())):
        raise UsageError(
            f'{place("ignore")}: give reasons by files and codes, as {{ "losses/*.py" = {{ KL301 = "why" }} }}'
        )
    for code, why in ((code, why) for codes in ignore.values() for code, why in codes.items()):
        _check_excuse(code, why, place(code))
    if not isinstance(exclude, list) or not all(isinstance(each, str) for each in exclude):
        raise UsageError(f'{place("exclude")}: give a list of patterns of files, as ["tests/*"]')
    if not isinstance(baseline, str):
        raise UsageError(f"{place('baseline')}: give the path of a report of `kltest scan --output json:PATH`")
    folder = path.parent.resolve()
    return Rules(folder, expect, ignore, tuple(exclude), str(folder / baseline) if baseline else "")


def _texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values())


def _check_excuse(code: str, why: str, where: str) -> None:
    if code not in CHECKS:
        raise UsageError(f"{where}: there is no check {code!r}; {did_you_mean(code, CHECKS)}`kltest list` has them")
    if not why.strip():
        raise UsageError(f"{where}: {code} is excused without a reason; write one behind it")


def comments(source: Source) -> Iterator[tuple[int, bool, str]]:
    """Yield the comments `# kltest: …` of a file: line of its text, whether nothing else stands there, and words."""
    if "kltest:" not in source.text:
        return
    lines = source.text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT and (match := _COMMENT.match(token.string)):
            line, column = token.start
            yield line, not lines[line - 1][:column].strip(), match[1]


def said(words: str, place: str) -> Said:
    """Return what a comment says.

    Raises UsageError with its place for an unknown word, gradient or code, and for an excuse without a reason.
    """
    where = f"{place}: # kltest: {words}"
    words = _OF.sub("", words, count=1) if _OF.match(words) else words
    if match := _EXPECT.match(words):
        combination(match[1], where)
        return match[1], {}
    if match := _IGNORE.match(words):
        codes = [code.strip() for code in match[1].split(",")]
        for code in codes:
            _check_excuse(code, match[2], where)
        return "", dict.fromkeys(codes, match[2])
    raise UsageError(f"{where} says nothing that kltest knows; write expect=NAME or ignore[CODE] and a reason")


def speaks_of(words: str, variant: str, place: str) -> bool:
    """Return True unless a comment begins with another configuration or place than these, as `[k3]` or `[reward]`."""
    match = _OF.match(words)
    known = {place, *variant.split(", "), *re.findall(r"'([^']*)'", variant)}
    return match is None or match[1] == variant or {word.strip() for word in match[1].split(",")} <= known


def key(term: Mapping[str, Any]) -> Key:
    """Return what a baseline knows a term of a JSON report by: no line numbers, which move."""
    names = ("file", "function", "place", "variant", "formula")
    return *(str(term[name]) for name in names), ",".join(term["errors"])


def baseline(path: Path) -> list[Key]:
    """Return the keys of the findings of an earlier report; UsageError if it is none."""
    try:
        terms = json.loads(path.read_text(encoding="utf-8"))["terms"]
        return [key(term) for term in terms if term["status"] in ("finding", "known")]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"--baseline {path} is no report of `kltest scan --output {shlex.quote(f'json:{path}')}`"
        ) from None
