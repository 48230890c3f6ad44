"""Access to an installed library: its parts by name, and the arguments that they take."""

import ast
import builtins
import importlib
import importlib.util
import inspect
import sys
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


def placeholder():
    """Return what stands for a package that is not installed: as a module, a decorator, a base class, an annotation."""

    class Missing(type):
        def __getattr__(cls, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything

        def __getitem__(cls, index):
            return Anything

        def __call__(cls, *given, **named):
            # A class that inherits from it is called as any other; as a decorator it leaves what it decorates as it is.
            if cls is not Anything:
                return super().__call__(*given, **named)
            return given[0] if given and (inspect.isfunction(given[0]) or inspect.isclass(given[0])) else Anything

    class Anything(metaclass=Missing):
        __version__ = "0"

    return Anything


def tried(frame):
    """True if the line that a frame has reached stands in a `try`, as the import of what may be missing does."""
    tree = ast.parse(Path(frame.f_code.co_filename).read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Try) and node.lineno <= frame.f_lineno <= node.end_lineno for node in ast.walk(tree)
    )


def loaded(module, without=()):
    """Import a library's module, with placeholders for other packages that it imports and that are not installed.

    A package above it whose own lines cannot be run here is taken for an empty one. Packages and modules
    `without` which it is to be imported are replaced even if they are there.
    """
    library, usual, stands_in = module.partition(".")[0], builtins.__import__, placeholder()

    def imported(name, globals=None, *more, **named):
        inside = str((globals or {}).get("__name__")).partition(".")[0] == library
        if inside and any(f"{name}.".startswith(f"{each}.") for each in without):
            return stands_in
        try:
            return usual(name, globals, *more, **named)
        except ModuleNotFoundError as error:
            if not inside or str(error.name).partition(".")[0] == library or tried(sys._getframe(1)):
                raise
            return stands_in

    builtins.__import__ = imported
    try:
        names = module.split(".")
        for parent in (".".join(names[:depth]) for depth in range(1, len(names))):
            try:
                importlib.import_module(parent)
            except Exception:
                if (spec := importlib.util.find_spec(parent)) is None:
                    raise
                sys.modules[parent] = importlib.util.module_from_spec(spec)
        return importlib.import_module(module)
    except Exception as error:
        raise LookupError(f"{module} of the installed {library} cannot be loaded: {error}") from error
    finally:
        builtins.__import__ = usual


def found(module, names, without=()):
    """Return `names` (dotted) of a module that may need placeholders; LookupError if this version does not have it."""
    loaded(module, without)
    return part(module, names)


def taken(function, offered, settings):
    """Return arguments for a function: those offered that it names, and all settings.

    Raises LookupError for a setting that the function does not name, even if it would swallow it, and for a parameter
    without a default that nothing fills.
    """
    parameters = inspect.signature(function).parameters
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
    module, colon, names = place.partition(":")
    if not colon:
        return [place] if place else []
    try:
        inside, _, parameter = names.rstrip(")").partition("(")
        if parameter:
            default = inspect.signature(part(module, inside)).parameters[parameter].default
            return [] if default is inspect.Parameter.empty else [parameter, default]
        if names.startswith("-"):
            return [names.lstrip("-"), written(module, names)]
        name = names.rpartition(".")[2]
        try:
            return [name, part(module, names)]
        except LookupError:
            return [name, written(module, names)]
    except (LookupError, OSError, TypeError, ValueError):
        return []


def written(module, name):
    """Return the default of a class's field, or of a command line's `--option`, from a module that is not imported."""
    package, *names = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise LookupError(f"there is no package {package}")
    places = list(spec.submodule_search_locations or ()) or [str(spec.origin)]
    home = Path(places[0], *names).with_suffix(".py")
    nodes, (kind, _, field) = list(ast.walk(ast.parse(home.read_text(encoding="utf-8")))), name.rpartition(".")
    fields = [each for node in nodes if isinstance(node, ast.ClassDef) and node.name == kind for each in node.body]
    values = [each.value for each in fields if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == field]
    values += [node for node in nodes if isinstance(node, ast.Call) and repr(name) in map(ast.unparse, node.args)]
    for value in values:
        if isinstance(value, ast.Call):
            value = next((each.value for each in value.keywords if each.arg == "default"), None)
        if value is not None:
            return ast.literal_eval(value)
    raise LookupError(f"{module} has no default of {name}")


def called(function, offered, settings=()):
    """Return what a function returns for those of the offered arguments that it names, and for all settings."""
    return function(**taken(function, offered, dict(settings)))


def packed(rows, mask):
    """Return the live part of each row, up to its last live token, as a list: batches without padding."""
    lengths = [int(live.nonzero()[-1]) + 1 if live.any() else 0 for live in mask]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]
