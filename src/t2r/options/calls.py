"""Functions whose keyword arguments are the options of a group."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_type_hints

from t2r.options.definition import LATER, check, options_of, refuse_unknown
from t2r.options.entrance import check_type
from t2r.options.training import Training

P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G", bound=Training)


# A ParamSpec takes the parameters from the dataclass, so type checkers, `help` and editors show each option with its
# type, and none is listed a second time. A TypedDict would be a second list, and `help` would show only `**options`.
def flat(group: Callable[P, G]) -> Callable[[Callable[[G], R]], Callable[P, R]]:
    """Make a function of a group of options callable with the options themselves, and document them.

    The function raises T2RError if an option is unknown, has a wrong type, or is a number that is not allowed."""
    signature = inspect.signature(group)
    required = [name for name, each in signature.parameters.items() if each.default is inspect.Parameter.empty]

    def decorate(function: Callable[[G], R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            refuse_unknown(kwargs, signature.parameters)
            signature.bind(*args, **kwargs)  # raises TypeError if an argument is missing
            chosen = group(*args, **kwargs)
            chosen.given = frozenset(kwargs)
            known = options_of(group)
            for name, hint in hints_of_group(group).items():
                if name in chosen.given or name in required:
                    check_type(name, getattr(chosen, name), hint, known.get(name))
            check(type(chosen), chosen.numbers())
            return function(chosen)

        returns = inspect.signature(function).return_annotation
        call.__signature__ = signature.replace(return_annotation=returns)  # type: ignore[attr-defined]
        call.__doc__ = f"{inspect.getdoc(function)}\n\nOptions:\n{described(group)}"
        return call

    return decorate


@functools.cache
def hints_of_group(group: Any) -> dict[str, Any]:
    import transformers  # the function is called, so it is loaded

    return get_type_hints(group, localns={name: getattr(transformers, name) for name in LATER})


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
