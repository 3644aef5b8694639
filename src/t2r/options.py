"""Option definitions. Each option has one definition of its type, default, range or choices, and help.

A group of options is a dataclass whose fields are made by `option`. Configurations, the command line, and the tables in
docs/recipes.md are derived from these fields, and `check` validates them. This module does not import torch, because
`t2r --help` imports it.
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
    unset: str = ""
    hint: str = ""
    """Appended to the error message."""
    of_map: str = ""
    """When to pass the option to the feature map: `always`, or `given` for only if it differs from the default (not
    every map accepts it). Empty: never."""

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def allowed(self) -> str:
        """A description of the allowed values."""
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
        """Raise T2RError if the value is not allowed. NaN, infinities, and booleans as numbers are never allowed."""
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
        """Convert a value from YAML to the option's type: YAML reads 1e-3 as text, and 1e3 may be meant as an integer.

        A value that cannot be converted is returned unchanged, and `check` rejects it."""
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
        """The default as shown in help and documentation."""
        if self.required:
            return "required"
        if self.default is None:
            return self.unset
        if isinstance(self.default, bool):
            return f"{'' if self.default else 'no-'}{self.name.replace('_', '-')}"
        return f"{self.default:,}" if isinstance(self.default, int) and self.default >= 1e4 else str(self.default)


def option(default: Any = dataclasses.MISSING, *, help: str, **rest: Any) -> Any:
    """Define a field of a group of options. `rest` are fields of `Option`."""
    metadata = {"option": {"help": help, **rest}}
    if isinstance(default, list):
        return field(default_factory=functools.partial(list, default), metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def options_of(group: type) -> Mapping[str, Option]:
    """Return the options of a group by name, in the order of their definition."""
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


# --- The groups ---------------------------------------------------------------------------------------------


@dataclass(kw_only=True, repr=False, eq=False)
class SwapOptions:
    """Options of a swap. The names are the same in `t2r.swap`, on the command line, in recipes and in saved files."""

    feature_map: str = option("t2r", help="The feature map: t2r, elu, rfa, performer or hedgehog.")
    feature_size: int | None = option(
        None,
        help="Feature size: the number of rows of the state. The state of a layer has feature size x (head size + 1) "
        "numbers of 4 bytes for each head, or with grouped for each key/value head.",
        minimum=1,
        unset="the map's own; t2r: 32",
        of_map="always",
    )
    cross_feature_size: int | None = option(
        None, help="Feature size of cross attention.", minimum=1, unset="as feature_size"
    )
    softmax_layers: list[int] | None = option(
        None,
        help="Decoder layers, from 0, that keep softmax attention: 0-3,7 on the command line; for convert and inspect "
        "also auto:N, the N layers with the largest effect on the loss, which convert measures.",
        unset="none",
        hint="only convert and inspect accept auto:N",
    )
    softmax_every: int | None = option(
        None,
        help="Keep softmax attention in every n-th layer, counted from the last (4: the paper's T2R-75%).",
        minimum=1,
        unset="none",
    )
    recurrent: str = option(
        "causal,cross",
        help="Attention of an encoder-decoder's decoder that becomes recurrent: `causal,cross`, `causal` or `cross`.",
        choices=("causal,cross", "causal", "cross"),
    )
    shared: bool = option(True, help="Queries and keys share one feature map.", of_map="always")
    grouped: bool = option(
        True,
        help="With grouped-query attention, one key map and state for each key/value head; otherwise one for each "
        "query head, which makes the state larger.",
        of_map="always",
    )
    decay: bool = option(False, help="Each feature of causal attention decays at a learned rate.", of_map="always")
    rotary: bool = option(
        True,
        help="With rotary positions, apply the feature map to queries and keys after their rotation; otherwise before.",
    )
    init: str | None = option(
        None,
        help="Initialization of the feature map: paper or identity.",
        unset="the map's own",
        of_map="given",
    )
    activation: str = option(
        "relu", help="Activation of the t2r feature map: relu, elu, tanh, cos, gelu or softmax.", of_map="given"
    )
    key_weights: bool = option(
        False, help="Each key has a learned, query-independent weight (t2r and hedgehog).", of_map="given"
    )
    freeze_feature_map: bool = option(False, help="Do not train the feature maps.")
    seed: int = option(
        0, help="Seed for all random values of the feature maps.", minimum=0, maximum=LARGEST_SEED, of_map="always"
    )


@dataclass(kw_only=True)
class GenerationOptions:
    """Options of `generate`, named as in transformers. None selects the model's own default."""

    max_new_tokens: int = option(128, help="Maximum number of tokens to generate.", minimum=1, maximum=2**31 - 1)
    min_new_tokens: int | None = option(
        None, help="Minimum number of tokens to generate.", minimum=0, maximum=2**31 - 1, unset="the model's own"
    )
    do_sample: bool | None = option(None, help="Sample instead of greedy search.", unset="the model's own")
    temperature: float | None = option(None, help="Sampling temperature.", above=0, unset="the model's own")
    top_p: float | None = option(
        None,
        help="Sample from the most likely tokens whose probabilities add up to this value.",
        above=0,
        maximum=1,
        unset="the model's own",
    )
    top_k: int | None = option(
        None, help="Sample from this many of the most likely tokens; 0 for all.", minimum=0, unset="the model's own"
    )
    num_beams: int | None = option(None, help="Number of beams for beam search.", minimum=1, unset="the model's own")
    length_penalty: float | None = option(
        None, help="Length penalty of beam search: values above 0 favor long sequences.", unset="the model's own"
    )
    repetition_penalty: float | None = option(
        None, help="Values above 1 make repeated tokens less likely.", above=0, unset="the model's own"
    )
    num_return_sequences: int | None = option(
        None, help="Number of texts to generate per prompt.", minimum=1, unset="the model's own"
    )


@dataclass(kw_only=True)
class AnalysisOptions:
    """Options of `analyze` whose defaults differ from those of other commands."""

    limit: int = option(16, help="Maximum number of samples, spread over the text.", minimum=1)
    trials: int = option(256, help="Trials of the recall test at each distance.", minimum=1)


@dataclass(kw_only=True)
class RunOptions:
    """Options shared by several commands and functions."""

    device: str = option("auto", help="auto (a GPU if available), cpu, cuda, ...")
    dtype: str = option(
        "auto",
        help="auto (as saved), float32, bfloat16 or float16.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    seed: int | None = option(
        None, help="Random seed for sampling.", minimum=0, maximum=LARGEST_SEED, unset="a new one each time"
    )
    batch_size: int = option(8, help="Prompts or windows per batch.", minimum=1)
    limit: int | None = option(None, help="Maximum number of windows to evaluate.", minimum=1, unset="all")
    window: int | None = option(
        None, help="Tokens per window.", minimum=2, unset="512, or fewer if a model has fewer positions"
    )
    stride: int | None = option(
        None,
        help="Tokens by which the window advances, and that are scored in each window.",
        minimum=1,
        unset="half the window",
    )
    trials: int = option(32, help="Trials of the recall test at each distance.", minimum=1)
    beams: int = option(5, help="Beams of the search that translates --src.", minimum=1, maximum=1000)
    length_penalty: float = option(0.6, help="Length penalty of the beam search.")
    bleu_tokenize: str = option("13a", help="sacrebleu's tokenizer for BLEU, for example zh for Chinese references.")
    minutes: float | None = option(
        None,
        help="Time for the whole run: loading, generating teacher text, training and evaluation.",
        above=0,
        maximum=525_600,
        unset="the recipe's budget",
    )
    teacher_tokens: int = option(
        10_000_000, help="Tokens that the teacher generates for --train teacher.", minimum=1, maximum=10**15
    )
    save_steps: int | None = option(
        None, help="Optimizer steps between checkpoints.", minimum=1, unset="every three minutes"
    )
    gradient_checkpointing: bool = option(
        False, help="Recompute activations in the backward pass: slower, but needs less memory."
    )
    bf16: bool | None = option(None, help="Train in bfloat16.", unset="on a GPU")
    compile: bool | None = option(None, help="Compile layers with torch.compile.", unset="on a GPU")
