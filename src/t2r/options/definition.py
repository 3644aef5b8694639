"""What an option is: its name, type, default, range or choices, help, and flag on the command line."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from t2r.errors import T2RError

LARGEST_SEED = 2**32 - 1
"""The largest seed that numpy accepts; transformers seeds numpy too."""
LONGEST_NAME = 60
"""The number of characters of an invalid value shown in an error."""


@dataclass(frozen=True)
class Option:
    """One option, built by `options_of` from a dataclass field made by `option`."""

    name: str
    type: type
    """int, float, bool or str; for a list, the type of its items."""
    default: Any
    help: str
    optional: bool = False
    """Whether None is allowed. `unset` describes what None means."""
    length: int | None = None
    """The number of items in a list, 0 for any number, or None if the option is not a list."""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    former: Mapping[str, str] = field(default_factory=dict)
    """Values of former versions, which are still read, and what they are called now."""
    unset: str = ""
    flags: tuple[str, ...] = ()
    """The flag on the command line, if it is not made from the name."""
    repeated: bool = False
    """Whether the flag of a list is given once for each item."""
    details: str = ""
    """Said after the help in the documentation of a Python function."""
    hint: str = ""
    """Appended to the error message."""
    of_map: str = ""
    """When to pass the option to the feature map: `always`, or `given` for only if it differs from the default (not
    every map accepts it). Empty: never."""

    @property
    def flag(self) -> str:
        """The flag on the command line, without hyphens before it."""
        return (self.flags[0] if self.flags else self.name).partition("/")[0].lstrip("-").replace("_", "-")

    @property
    def many(self) -> bool:
        return self.length is not None

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def allowed(self) -> str:
        """A description of the allowed values."""
        one = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.type]
        if self.choices:
            one = f"one of {', '.join(self.choices)}"
        if self.many:
            many = {int: "whole numbers", float: "numbers", str: "texts"}[self.type]
            one = f"a list of {f'{self.length} ' if self.length else ''}{many}"
        bounds = [
            f"{words} {bound:,}" if bound >= 1e4 else f"{words} {bound:g}"
            for words, bound in (
                ("at least", self.minimum),
                ("above", self.above),
                ("at most", self.maximum),
                ("below", self.below),
            )
            if bound is not None
        ]
        return f"{one}, {' and '.join(bounds)}" if bounds else one

    def check(self, value: Any, where: str = "") -> None:
        """Raise T2RError if the value is not allowed. NaN, infinities, and booleans as numbers are never allowed."""
        if not (self.optional if value is None else self.accepts(value)):
            shown = repr(value)
            shown = shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}..."
            hint = f"; {self.hint}" if self.hint else ""
            raise T2RError(f"{where}{self.name} must be {self.allowed}; got {shown}{hint}")

    def accepts(self, value: Any) -> bool:
        if not self.many:
            return self.accepts_one(value)
        return (
            isinstance(value, list | tuple)
            and len(value) == (self.length or len(value))
            and all(map(self.accepts_one, value))
        )

    def accepts_one(self, value: Any) -> bool:
        if self.type in (bool, str):
            return isinstance(value, self.type) and (not self.choices or self.named(value) in self.choices)
        if isinstance(value, bool) or not isinstance(value, int if self.type is int else int | float):
            return False
        return (
            (self.type is int or -sys.float_info.max <= value <= sys.float_info.max)  # also a huge whole number
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def named(self, value: Any) -> Any:
        """Return the value by its present name."""
        return self.former.get(value, value) if isinstance(value, str) else value

    def read(self, value: Any) -> Any:
        """Convert a value from YAML to the option's type: YAML reads 1e-3 as text, and 1e3 may be meant as an integer.

        A value that cannot be converted is returned unchanged, and `check` rejects it."""
        if self.many and isinstance(value, list):
            return [self.read_one(part) for part in value]
        return self.read_one(value)

    def read_one(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return value
        if self.type is str:
            return str(value)
        if self.type is bool:
            return value
        try:
            number = float(value)
            if self.type is float:
                return number
            return int(value) if isinstance(value, int) else int(number) if number == int(number) else value
        except (ValueError, OverflowError):
            return value

    @property
    def default_words(self) -> str:
        """The default as shown in help and documentation."""
        if self.required:
            return "required"
        if self.default is None:
            return self.unset
        if self.default == ():
            return ""
        if isinstance(self.default, bool):
            single = bool(self.flags) and "/" not in self.flags[0]  # it has no --no-...
            return "" if single else f"{'' if self.default else 'no-'}{self.flag}"
        return f"{self.default:,}" if isinstance(self.default, int) and self.default >= 1e4 else str(self.default)


def option(default: Any = dataclasses.MISSING, *, help: str, **rest: Any) -> Any:
    """Define a field of a group of options. `rest` are fields of `Option`."""
    metadata = {"option": {"help": help, **rest}}
    if isinstance(default, list):
        return field(default_factory=functools.partial(list, default), metadata=metadata)
    return field(default=default, metadata=metadata)


def same(group: type, name: str, **changes: Any) -> Any:
    """Define a field as in another group, with some changes of `Option`."""
    entry = next(entry for entry in dataclasses.fields(group) if entry.name == name)
    default = changes.pop("default", entry.default)
    return field(default=default, metadata={"option": {**entry.metadata["option"], **changes}})


LATER = {"PreTrainedModel": Any, "PreTrainedTokenizerBase": Any}
"""Types that are not imported here, because that takes seconds."""


@functools.cache
def options_of(group: type) -> Mapping[str, Option]:
    """Return the options of a group by name, in the order of their definition."""
    hints = get_type_hints(group, localns=LATER)
    found = {}
    for entry in dataclasses.fields(group):
        if "option" not in entry.metadata:
            continue
        hint, optional = hints[entry.name], False
        given = dict(entry.metadata["option"])
        if "type" in given:  # Python accepts more than the command line
            hint, optional = given.pop("type"), True
        if get_origin(hint) in (types.UnionType, Union):
            hint, *others = (part for part in get_args(hint) if part is not type(None))
            optional = True
            assert not others, f"{group.__name__}.{entry.name} has more than one type"
        if get_origin(hint) is list:
            (hint,) = get_args(hint)
            given.setdefault("length", 0)
        factory = entry.default_factory
        default = entry.default if factory is dataclasses.MISSING else factory()
        found[entry.name] = Option(name=entry.name, type=hint, default=default, optional=optional, **given)
    return types.MappingProxyType(found)


def check(group: type, values: Mapping[str, Any], where: str = "") -> None:
    """Raise T2RError if a name is not an option of the group, or a value is not allowed."""
    known = options_of(group)
    refuse_unknown(values, known, where)
    for name, value in values.items():
        known[name].check(value, where)


def parse_auto(softmax_layers: Any) -> int | None:
    """Return N for `auto:N`, and None for anything else. Raises T2RError for any other string."""
    if not isinstance(softmax_layers, str):
        return None
    word, _, count = softmax_layers.partition(":")
    if word != "auto" or not count.isdigit() or int(count) < 1:
        raise T2RError(f"softmax_layers={softmax_layers!r}: give layers, or auto:N for the N most sensitive layers")
    return int(count)


def refuse_unknown(given: Mapping[Any, Any], known: Mapping[str, Any] | Sequence[str], where: str = "") -> None:
    if unknown := sorted(str(name) for name in given if name not in known):
        raise T2RError(f"{where}unknown option {', '.join(unknown)}; the options are {', '.join(known)}")
