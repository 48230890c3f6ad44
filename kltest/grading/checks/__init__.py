"""One check a file: a known way to get a KL gradient wrong, with a stable code, its words, and how to recognise it."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from kltest.grading.checks.check import Check, Found

__all__ = ["CHECKS", "Check", "Found"]


def _discover() -> dict[str, Check]:
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    found = [module.CHECK for module in modules if hasattr(module, "CHECK")]
    return {check.code: check for check in sorted(found, key=lambda check: check.code)}


CHECKS: dict[str, Check] = _discover()
