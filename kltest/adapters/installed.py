"""Access to an installed library: its parts by name, and the arguments that they take."""

import ast
import importlib
import importlib.util
import inspect
from pathlib import Path


def part(module, names):
    """Return `names` (dotted) of a module; LookupError if this version does not have it or cannot import it."""
    try:
        found = importlib.import_module(module)
        for each in names.split("."):
            found = getattr(found, each)
    except Exception as error:
        # A package may raise any exception if it finds no accelerator.
        library = module.partition(".")[0]
        raise LookupError(f"the installed {library} has no {module}:{names} that can be used here: {error}") from error
    return found


def taken(function, offered, settings):
    """Return arguments for a function: those offered that it names, and all settings.

    Raises LookupError for a setting that the function does not name, even if it would swallow it, and for a parameter
    without a default that nothing fills.
    """
    signatures = taken.__dict__.setdefault("signatures", {})
    if function not in signatures:
        signatures[function] = inspect.signature(function)
    parameters = signatures[function].parameters
    what = getattr(function, "__qualname__", type(function).__qualname__)
    for name in settings:
        if name not in parameters:
            raise LookupError(f"in the installed version {what} has no {name!r}, which this setting is about")
    values = {**{name: value for name, value in offered.items() if name in parameters}, **settings}
    for name, parameter in parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and name not in values:
            raise LookupError(f"in the installed version {what} wants {name!r}, which is not known here")
    return values


def unset(place):
    """Return the name of a coefficient and its default, [] if there is none; `place` as in `Setting.coefficient`."""
    module, _, names = place.partition(":")
    try:
        if names.startswith("-"):
            return [names.lstrip("-"), option_of(module, names)]
        inside, _, parameter = names.rstrip(")").partition("(")
        if parameter:
            default = inspect.signature(part(module, inside)).parameters[parameter].default
            return [] if default is inspect.Parameter.empty else [parameter, default]
        return [names.rpartition(".")[2], part(module, names)] if names else []
    except (LookupError, OSError, TypeError):
        return []


def option_of(module, name):
    """Return the default of an option in a module that parses a command line, which is read and not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            isinstance(each, ast.Constant) and each.value == name for each in node.args
        ):
            return next(ast.literal_eval(each.value) for each in node.keywords if each.arg == "default")
    raise LookupError(f"{module} has no option {name}")


def called(function, offered, settings=()):
    """Return what a function returns for those of the offered arguments that it names, and for all settings."""
    return function(**taken(function, offered, dict(settings)))


def costly(*functions):
    """Mark functions whose calls take milliseconds: how they combine the rows of a batch is then tried on fewer."""
    for function in functions:
        function.costly = True
