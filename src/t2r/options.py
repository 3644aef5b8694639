"""Options, each defined once: its type, default, range or choices, and help.

A group of options is a dataclass whose fields are made by `option`. Configurations, the command line, and the tables in
docs/recipes.md are derived from these fields, and `check` validates all of them. This module does not import torch:
`t2r --help` reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union, get_args, get_origin, get_type_hints

from t2r.errors import T2RError

LARGEST_SEED = 2**32 - 1
"""numpy, which transformers seeds too, takes no larger one."""
LONGEST_NAME = 60
"""Characters of a wrong value that an error shows."""


@dataclass(frozen=True)
class Option:
    """One option. `option` makes it, and `options_of` completes it with the name and type of its field."""

    name: str
    type: type
    """int, float, bool or str; of a list, the type of its items."""
    default: Any
    help: str
    optional: bool = False
    """None is allowed; `unset` says what it means."""
    length: int | None = None
    """How many items a list has; 0 for any number. None: it is not a list."""
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    unset: str = ""
    hint: str = ""
    """Added to the error."""
    of_map: str = ""
    """Passed on to the feature map: `always`, or `given`, only where it is not the default (not every map has it)."""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        one = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.type]
        if self.choices:
            one = f"one of {', '.join(self.choices)}"
        if self.length is not None:
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
        """Raise T2RError unless the value is allowed. NaN, infinities, and booleans in place of numbers never are."""
        if not (self.optional if value is None else self.accepts(value)):
            shown = repr(value)
            shown = shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]}..."
            hint = f"; {self.hint}" if self.hint else ""
            raise T2RError(f"{where}{self.name} must be {self.allowed}; got {shown}{hint}")

    def accepts(self, value: Any) -> bool:
        if self.length is None:
            return self.accepts_one(value)
        return (
            isinstance(value, list | tuple)
            and len(value) == (self.length or len(value))
            and all(map(self.accepts_one, value))
        )

    def accepts_one(self, value: Any) -> bool:
        if self.type in (bool, str):
            return isinstance(value, self.type) and (not self.choices or value in self.choices)
        if isinstance(value, bool) or not isinstance(value, int if self.type is int else int | float):
            return False
        return (
            -float("inf") < value < float("inf")
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def read(self, value: Any) -> Any:
        """A value from YAML with numbers as numbers: YAML reads 1e-3 as text, and 1e3 can be a whole number. What is
        not allowed is returned as it is, for `check` to refuse."""
        if self.length is not None and isinstance(value, list):
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
        """The default as help and documentation show it."""
        if self.required:
            return "required"
        if self.default is None:
            return self.unset
        if isinstance(self.default, bool):
            return f"{'' if self.default else 'no-'}{self.name.replace('_', '-')}"
        return f"{self.default:,}" if isinstance(self.default, int) and self.default >= 1e4 else str(self.default)


def option(default: Any = dataclasses.MISSING, *, help: str, **rest: Any) -> Any:
    """A field of a group of options. `rest` are fields of `Option`."""
    metadata = {"option": {"help": help, **rest}}
    if isinstance(default, list):
        return field(default_factory=functools.partial(list, default), metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def options_of(group: type) -> Mapping[str, Option]:
    """The options of a group by name, in the order in which they are defined."""
    hints = get_type_hints(group)
    found = {}
    for entry in dataclasses.fields(group):
        if "option" not in entry.metadata:
            continue
        hint, optional = hints[entry.name], False
        if get_origin(hint) in (types.UnionType, Union):
            hint, *others = (part for part in get_args(hint) if part is not type(None))
            optional = True
            assert not others, f"{group.__name__}.{entry.name} has more than one type"
        given = dict(entry.metadata["option"])
        if get_origin(hint) is list:
            (hint,) = get_args(hint)
            given.setdefault("length", 0)
        factory = entry.default_factory
        default = entry.default if factory is dataclasses.MISSING else factory()
        found[entry.name] = Option(name=entry.name, type=hint, default=default, optional=optional, **given)
    return types.MappingProxyType(found)


def check(group: type, values: Mapping[str, Any], where: str = "") -> None:
    """Raise T2RError for the first of these values that its option does not allow, or that no option is called."""
    known = options_of(group)
    refuse_unknown(values, known, where)
    for name, value in values.items():
        known[name].check(value, where)


def refuse_unknown(given: Mapping[Any, Any], known: Mapping[str, Any] | Sequence[str], where: str = "") -> None:
    if unknown := sorted(str(name) for name in given if name not in known):
        raise T2RError(f"{where}no option {', '.join(unknown)}; there are {', '.join(known)}")


# --- The groups ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True, repr=False, eq=False)
class SwapOptions:
    """What a swap is made of: the same names in `t2r.swap`, on the command line, in recipes and in saved files."""

    feature_map: str = option("t2r", help="The feature map: t2r, elu, rfa, performer or hedgehog.")
    feature_size: int | None = option(
        None, help="Size of the features: the rows of the state.", minimum=1, unset="the map's own", of_map="always"
    )
    cross_feature_size: int | None = option(
        None, help="The same for cross attention.", minimum=1, unset="as feature_size"
    )
    softmax_layers: list[int] | None = option(
        None,
        help="Decoder layers, from 0, that keep their softmax attention: 0-3,7 on the command line; for convert also "
        "auto:N, the N that matter most.",
        unset="none",
        hint="only convert can find them (auto:N)",
    )
    softmax_every: int | None = option(
        None, help="Keep every n-th layer, counted from the top one (4: the paper's T2R-75%).", minimum=1, unset="none"
    )
    recurrent: str = option(
        "causal,cross",
        help="What becomes recurrent in the decoder of an encoder-decoder: `causal,cross`, `causal` or `cross`.",
        choices=("causal,cross", "causal", "cross"),
    )
    shared: bool = option(True, help="Queries and keys share one map.", of_map="always")
    grouped: bool = option(
        True,
        help="With grouped-query attention, one key map and state for each key/value head; otherwise one for each "
        "query head, which is a larger state.",
        of_map="always",
    )
    decay: bool = option(False, help="Each feature of causal attention decays at a learned rate.", of_map="always")
    rotary: bool = option(
        True, help="With rotary positions, the map sees queries and keys after their rotation; otherwise before it."
    )
    init: str | None = option(
        None,
        help="How the map starts: paper or identity.",
        unset="the map's own",
        of_map="given",
    )
    activation: str = option("relu", help="Activation of the t2r map.", of_map="given")
    key_weights: bool = option(
        False, help="Each key has a learned, query-independent weight (t2r and hedgehog).", of_map="given"
    )
    freeze_feature_map: bool = option(False, help="Do not train the maps.")
    seed: int = option(
        0, help="Seed of everything drawn for the maps.", minimum=0, maximum=LARGEST_SEED, of_map="always"
    )


@dataclass(kw_only=True)
class GenerationOptions:
    """Options of `generate`, with transformers' names. None: the model's own default."""

    max_new_tokens: int = option(128, help="Most tokens to generate.", minimum=1, maximum=2**31 - 1)
    min_new_tokens: int | None = option(
        None, help="Fewest tokens to generate.", minimum=0, maximum=2**31 - 1, unset="the model's own"
    )
    do_sample: bool | None = option(
        None, help="Sample, instead of taking the most likely token.", unset="the model's own"
    )
    temperature: float | None = option(None, help="Temperature of sampling.", above=0, unset="the model's own")
    top_p: float | None = option(
        None, help="Sample from the most likely tokens of this total.", above=0, maximum=1, unset="the model's own"
    )
    top_k: int | None = option(
        None, help="Sample from so many most likely tokens; 0 for all.", minimum=0, unset="the model's own"
    )
    num_beams: int | None = option(None, help="Beams of beam search.", minimum=1, unset="the model's own")
    length_penalty: float | None = option(
        None, help="Of beam search: above 0 favors long texts.", unset="the model's own"
    )
    repetition_penalty: float | None = option(
        None, help="Above 1 makes repeated tokens less likely.", above=0, unset="the model's own"
    )
    num_return_sequences: int | None = option(None, help="Texts for each prompt.", minimum=1, unset="the model's own")


@dataclass(kw_only=True)
class RunOptions:
    """Options that mean the same in several commands and functions."""

    device: str = option("auto", help="auto (a GPU if there is one), cpu, cuda, ...")
    dtype: str = option(
        "auto",
        help="auto (as saved), float32, bfloat16 or float16.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    seed: int | None = option(
        None, help="Seed of sampling.", minimum=0, maximum=LARGEST_SEED, unset="a new one each time"
    )
    batch_size: int = option(8, help="Prompts or windows at a time.", minimum=1)
    limit: int | None = option(None, help="Evaluate on so many windows only.", minimum=1, unset="all")
    window: int | None = option(
        None, help="Tokens of a window.", minimum=2, unset="512, or as many as every model has positions"
    )
    stride: int | None = option(
        None,
        help="How far a window is advanced: so many tokens of each are scored.",
        minimum=1,
        unset="half the window",
    )
    minutes: float | None = option(
        None,
        help="Time for all of it: loading, what the teacher writes, training, measuring.",
        above=0,
        maximum=525_600,
        unset="the recipe's budget",
    )
    teacher_tokens: int = option(
        10_000_000, help="How much the teacher writes for --train teacher.", minimum=1, maximum=10**15
    )
    save_steps: int | None = option(None, help="Steps between two checkpoints.", minimum=1, unset="as time allows")
    gradient_checkpointing: bool = option(
        False, help="Compute activations again in the backward pass: slower, with less memory."
    )
    bf16: bool | None = option(None, help="Train in bfloat16.", unset="on a GPU")
    compile: bool | None = option(None, help="Compile layers with torch.compile.", unset="on a GPU")
