"""One check of the arguments of a public function, from its annotations and from the options that it has.

A wrong type then is one T2RError that names the argument, not an error of Python far below."""

from __future__ import annotations

import builtins
import functools
import inspect
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from t2r.errors import T2RError
from t2r.options.definition import LONGEST_NAME, Option, options_of

P = ParamSpec("P")
R = TypeVar("R")
WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "None",
    Sequence: "a list",
    list: "a list",
    tuple: "a list",
    Collection: "a list",
    Iterable: "a list",
    Mapping: "a mapping",
    dict: "a mapping",
    Callable: "a function",
    os.PathLike: "a path",
    Path: "a path",
}


def entrance(*groups: type, unchecked: Collection[str] = ()) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a function: their types by its annotations, and those that are options of these groups by
    the options, of which later groups have precedence.

    Arguments that are `unchecked` are checked by the function itself."""
    known: dict[str, Option] = {}
    for group in groups:
        known |= options_of(group)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = signature.bind(*args, **kwargs).arguments  # raises TypeError for other arguments, as Python does
            hints = hints_of(function)
            for name, value in given.items():
                if name in unchecked or signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                    continue
                check_type(name, value, hints.get(name, Any), known.get(name))
                if name in known and value is not None and not is_device(name, value):
                    for one in value if isinstance(value, list | tuple) and not known[name].many else [value]:
                        known[name].check(one)
            return function(*args, **kwargs)

        return call

    return decorate


def check_type(name: str, value: Any, hint: Any, option: Option | None = None) -> None:
    """Raise T2RError unless a value has the type of an annotation. An `option` may have a hint for the user."""
    if is_device(name, value) or matches(value, hint):
        check_unicode(name, value)
        return
    shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    shown = shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}..."
    if hasattr(value, "column_names"):
        shown += ", a dataset in memory: give a name, datasets:NAME, or write it to a file (to_json) and give the file"
    told = f"; {option.hint}" if option is not None and option.hint else ""
    raise T2RError(f"{name} must be {described(hint)}; got {shown}{told}")


def check_unicode(name: str, value: Any) -> None:
    """Raise T2RError for text, also in a list, that has no UTF-8: tokenizers and files refuse it later."""
    for text in value if isinstance(value, list | tuple) else [value]:
        try:
            if isinstance(text, str):
                text.encode()
        except UnicodeEncodeError as error:
            raise T2RError(f"{name} is not valid Unicode (U+{ord(text[error.start]):X} at {error.start})") from error


def is_device(name: str, value: Any) -> bool:
    """Return whether a value is a torch device, which is accepted in place of its name."""
    return name == "device" and type(value).__module__ == "torch" and type(value).__name__ == "device"


def matches(value: Any, hint: Any) -> bool:
    """Return whether a value has a type. A path is accepted as text, and a whole number as a number."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(matches(value, part) for part in parts)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is Callable or (origin is None and hint is Callable):
        return callable(value)
    if origin is not None and issubclass(origin, Iterable):
        if isinstance(value, str | bytes) or not isinstance(value, origin):
            return False
        return all(matches(part, parts[0]) for part in value) if parts and isinstance(value, Sequence) else True
    if isinstance(origin, type):
        return isinstance(value, origin)
    if hint is Any or not isinstance(hint, type):
        return True  # also what cannot be checked
    if hint is bool:
        return isinstance(value, bool)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, str | os.PathLike if hint is str else hint)


def described(hint: Any) -> str:
    """Describe the values that an annotation allows."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    words = []
    for part in parts:
        origin, inner = get_origin(part) or part, get_args(part)
        word = WORDS.get(origin) or (f"a {origin.__name__}" if isinstance(origin, type) else "of another type")
        if word == "a list" and inner and inner[0] is not Any:
            word = f"a list, each {described(inner[0])}"
        words.append(word)
    words = list(dict.fromkeys(words))
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@functools.cache
def hints_of(function: Any) -> dict[str, Any]:
    """Return the annotations of a function or class. Names that are imported for type checkers only are Any."""
    return get_type_hints(function, localns=Names(getattr(inspect.unwrap(function), "__globals__", {})))


class Names(dict[str, Any]):
    """Names of a module, of builtins, and Any for all others."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        super().__init__()
        self.known = known

    def __missing__(self, name: str) -> Any:
        return self.known.get(name, getattr(builtins, name, Any))
