"""Functions whose keyword arguments are the options of a group."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from t2r.options.definition import check, options_of, refuse_unknown
from t2r.options.training import Training

P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G", bound=Training)


# A ParamSpec takes the parameters from the dataclass, so type checkers, `help` and editors show each option with its
# type, and none is listed a second time. A TypedDict would be a second list, and `help` would show only `**options`.
def flat(group: Callable[P, G]) -> Callable[[Callable[[G], R]], Callable[P, R]]:
    """Make a function of a group of options callable with the options themselves, and document them.

    The function raises T2RError if an option is unknown or a number is not allowed."""
    signature = inspect.signature(group)

    def decorate(function: Callable[[G], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            refuse_unknown(kwargs, signature.parameters)
            signature.bind(*args, **kwargs)  # raises TypeError if an argument is missing
            chosen = group(*args, **kwargs)
            chosen.given = frozenset(kwargs)
            check(type(chosen), chosen.numbers())
            return function(chosen)

        returns = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(function)}\n\nOptions:\n{described(group)}"
        return call

    return decorate


def described(group: Any) -> str:
    """Return the options of a group as a part of a docstring, with the names of Python in place of flags."""
    known = options_of(group)
    names = {each.flag: name for name, each in known.items()}

    def named(found: re.Match[str]) -> str:
        return f"`{names.get(found[1], found[1])}`"

    lines = []
    for name, each in known.items():
        unset = f"None: {each.unset}." if each.unset else ""
        text = " ".join(filter(None, [each.help, each.details, unset]))
        text = re.sub(r"--([a-z][a-z-]*)", named, text.replace(" Repeatable.", ""))
        lines += textwrap.wrap(f"{name}: {text}", 110, initial_indent="    ", subsequent_indent="        ")
    return "\n".join(lines)
