"""Jinja2 templates: every text that they print is escaped, unless it is markup already."""

from collections.abc import Callable

from jinja2 import Environment, PackageLoader, StrictUndefined

from kltest.render import fixes, screen, words


def environment(escape: Callable[[str], str], *, autoescape: bool = False) -> Environment:
    """Return an environment whose templates call the functions of `words` and `screen` and print text through `escape`.

    Args:
        escape: What is done to every text that is not `Markup`.
        autoescape: True if HTML's own escaping comes after that.
    """
    made = Environment(
        loader=PackageLoader("kltest.render"),
        autoescape=autoescape,
        finalize=lambda value: value if hasattr(value, "__html__") else escape(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    made.globals |= {"words": words, "screen": screen, "fixes": fixes}
    return made
