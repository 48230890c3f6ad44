"""Docstrings that are completed when a module is imported, as the options of `kltest.grade`, for the API pages."""

import inspect
from importlib import import_module
from typing import Any

import griffe


class Completed(griffe.Extension):
    """Replaces the docstring of a function by the one that it has at run time, where the source has a placeholder."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if func.docstring and "{options}" in func.docstring.value:
            function = getattr(import_module(func.module.path), func.name)
            func.docstring.value = inspect.getdoc(function) or ""
