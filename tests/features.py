"""Everything that kltest offers by name, listed through its public face: `python tests/features.py` prints it.

`features.json` is the list as it stood before the package was rebuilt, and commands that came later; `test_features.py`
holds that nothing of it is lost. A feature that is given up on purpose is moved there to "removed", with the reason.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

RECORDED = Path(__file__).with_name("features.json")
LIBRARIES = ("trl", "verl", "openrlhf", "liger", "torchrl", "tunix", "unsloth-zoo")


def offered() -> dict[str, list[str]]:
    """Names by kind, each sorted."""
    import kltest
    from kltest.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    listed = json.loads(_printed("list", "--json"))
    names = {
        "python": sorted(kltest.__all__),
        "grade arguments": sorted(inspect.signature(kltest.grade).parameters),
        "commands": sorted(commands),
        "options": sorted(_options(commands)),
        "gradients": sorted(each["name"] for each in listed["gradients"]),
        "estimators": sorted(each["name"] for each in listed["estimators"]),
        "environments": sorted(each["name"] for each in listed["environments"]),
        "checks": sorted(f"{each['code']} {each['name']}" for each in listed["checks"]),
        "settings of libraries": sorted(_settings()),
        "settings and metrics of finetune": sorted(_first_words(_printed("finetune", "--list"))),
        "keys of a report": sorted(_keys(json.loads(_printed("grade", "k2-ratio", "--output", "json", "--seed", "0")))),
    }
    return names


def _printed(*arguments: str) -> str:
    from kltest.cli import app

    return CliRunner().invoke(app, list(arguments)).stdout


def _options(commands: dict[str, Any]) -> Iterator[str]:
    for name, command in commands.items():
        for parameter in command.params:
            for text in (*parameter.opts, *parameter.secondary_opts):
                if text.startswith("-"):
                    yield f"{name} {text}"


def _settings() -> Iterator[str]:
    for library in LIBRARIES:
        for word in _first_words(_printed("libraries", "--list", library)):
            if word.startswith(f"{library}:") or "/" in word:
                yield word if word.startswith(f"{library}:") else f"{library}:{word}"


def _first_words(text: str) -> set[str]:
    return {line.split()[0].rstrip(":") for line in text.splitlines() if line.split() and line.startswith("  ")}


def _keys(value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, list):
        return {key for each in value for key in _keys(each, prefix + "[]")}
    if not isinstance(value, dict) or prefix.endswith(("identified", "versions")):
        return {prefix} if prefix else set()
    return {key for name, each in value.items() for key in _keys(each, f"{prefix}.{name}".lstrip("."))}


if __name__ == "__main__":
    print(json.dumps(offered(), indent=1, ensure_ascii=False))
