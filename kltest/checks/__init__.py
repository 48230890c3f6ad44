"""One check a file, a folder a family: a known way to get a KL gradient wrong, its code, its words, how it is found."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from kltest.checks.check import Check, Found

__all__ = ["CHECKS", "Check", "Found"]


def _discover() -> dict[str, Check]:
    families = (import_module(f"{__name__}.{family.name}") for family in iter_modules(__path__) if family.ispkg)
    modules = (
        import_module(f"{family.__name__}.{module.name}")
        for family in families
        for module in iter_modules(family.__path__)
        if module.name.startswith("kl")
    )
    found = (module.CHECK for module in modules)
    return {check.code: check for check in sorted(found, key=lambda check: check.code)}


CHECKS: dict[str, Check] = _discover()
