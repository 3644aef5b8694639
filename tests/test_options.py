"""Tests of options: accepted values, and that other definitions agree with them."""

import dataclasses
import inspect
from dataclasses import dataclass

import pytest
import torch

import t2r
from families import tiny
from t2r.cli.convert import convert as convert_command
from t2r.cli.pretrain import pretrain as pretrain_command
from t2r.errors import T2RError
from t2r.feature_maps import FEATURE_MAPS
from t2r.generation.teacher import write_corpus
from t2r.generation.translation import translate
from t2r.hub import choose_dtype
from t2r.model.modeling import T2RModel
from t2r.options import (
    AnalysisOptions,
    Conversion,
    GenerationOptions,
    Pretraining,
    RunOptions,
    SwapOptions,
    check,
    option,
    options_of,
)
from t2r.options.calls import flat
from t2r.training.recipes.stage import Stage

NAN, INF = float("nan"), float("inf")


@dataclass
class Group:
    whole: int = option(1, help="A number of things.", minimum=1, maximum=20_000)
    share: float | None = option(None, help="A share.", above=0, below=1, unset="none")
    word: str = option("a", help="A word.", choices=("a", "b"))
    yes: bool = option(True, help="Whether.")
    pair: list[float] = option([0.5, 0.5], help="Two.", length=2, minimum=0)
    many: list[int] | None = option(None, help="Any number of them.", hint="as 1,2")
    other: int = 3  # not an option


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("whole", [1, 20_000], [0, 20_001, 1.0, 1.5, True, None, "1", NAN, INF, 10**400]),
        ("share", [None, 0.5], [0, 1, 0.0, 1.0, -0.1, True, NAN, INF, -INF, "0.5", [0.5]]),
        ("word", ["a", "b"], ["c", "", None, 1, ["a"]]),
        ("yes", [True, False], [0, 1, None, "yes"]),
        ("pair", [[0, 1.5], (0.0, 0.0)], [[0.5], [0.5, -1.0], [0.5, NAN], [0.5, True], 0.5, None, "ab"]),
        ("many", [None, [], [1, -2]], [["a"], [1.0], [True], 3, "1,2"]),
    ],
)
def test_what_an_option_accepts(name, good, bad):
    for value in good:
        check(Group, {name: value})
    for value in bad:
        with pytest.raises(T2RError, match=rf"^here: {name} must be .*; got "):
            check(Group, {name: value}, "here: ")


def test_errors_say_what_is_allowed():
    def said(**values) -> str:
        with pytest.raises(T2RError) as error:
            check(Group, values)
        return str(error.value)

    assert said(whole=0) == "whole must be a whole number, at least 1 and at most 20,000; got 0"
    assert said(share=2.0) == "share must be a number, above 0 and below 1; got 2.0"
    assert said(word="c") == "word must be one of a, b; got 'c'"
    assert said(yes=1) == "yes must be true or false; got 1"
    assert said(pair=[1]) == "pair must be a list of 2 numbers, at least 0; got [1]"
    assert said(many="1,2") == "many must be a list of whole numbers; got '1,2'; as 1,2"
    assert said(other=1, more=2) == "unknown option more, other; the options are whole, share, word, yes, pair, many"
    assert len(said(word="x" * 10_000)) < 150


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("whole", "1e3", 1000),
        ("whole", 1000.0, 1000),
        ("whole", "1.5", "1.5"),
        ("whole", True, True),
        ("whole", 10**30, 10**30),
        ("share", "1e-3", 0.001),
        ("share", 1, 1.0),
        ("share", "fast", "fast"),
        ("share", None, None),
        ("word", 5, "5"),
        ("yes", "true", "true"),
        ("pair", ["5e-1", 1], [0.5, 1.0]),
    ],
)
def test_numbers_from_yaml(name, given, read):
    result = options_of(Group)[name].read(given)
    assert result == read
    assert type(result) is type(read)


PYTHON_ONLY = {"model", "config", "out", "tokenizer", "progress", "given"}
"""Fields that are arguments of the command line, or of Python only."""


@pytest.mark.parametrize(
    "group", [SwapOptions, GenerationOptions, AnalysisOptions, RunOptions, Stage, Conversion, Pretraining]
)
def test_defaults_are_allowed_and_every_option_has_help(group):
    assert {field.name for field in dataclasses.fields(group)} - PYTHON_ONLY == set(options_of(group)) - PYTHON_ONLY
    for each in options_of(group).values():
        assert each.help.endswith(".")
        assert each.optional == (each.default is None) or each.default is not None
        if not each.required:
            each.check(each.default)


def test_the_configuration_has_the_options_of_a_swap():
    config = t2r.T2RConfig()
    for name, each in options_of(SwapOptions).items():
        assert getattr(config, name) == each.default
    with pytest.raises(T2RError, match="seed must be a whole number"):
        t2r.swap(tiny("gpt2", torch.float32), seed=2**70)
    with pytest.raises(T2RError, match="unknown option feature_sise; the options are feature_map"):
        t2r.swap(tiny("gpt2", torch.float32), feature_sise=3)


def test_names_in_the_help_exist():
    named = options_of(SwapOptions)["feature_map"].help.rstrip(".").replace(" or ", ", ").split(": ")[1].split(", ")
    assert set(named) <= set(FEATURE_MAPS)
    for name in options_of(RunOptions)["dtype"].choices:
        assert name == "auto" or isinstance(choose_dtype(name), torch.dtype)


def test_functions_have_the_defaults_of_the_options():
    for function in (t2r.load, t2r.generate, t2r.evaluate, translate):
        for name, parameter in inspect.signature(function).parameters.items():
            if name in ("device", "window", "stride", "limit", "trials", "beams", "length_penalty"):
                assert parameter.default == options_of(RunOptions)[name].default
    assert inspect.signature(write_corpus).parameters["tokens"].default == Conversion.teacher_tokens


@pytest.mark.parametrize(
    ("function", "group", "command"),
    [(t2r.convert, Conversion, convert_command), (t2r.pretrain, Pretraining, pretrain_command)],
)
def test_training_functions_and_commands_have_the_options_of_their_group(function, group, command):
    """Each is listed once, in the group; type checkers, `help` and the command line show all of them."""
    parameters = inspect.signature(function).parameters
    assert list(parameters)[1] == "out"
    for name, each in options_of(group).items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == each.default
        assert f"    {name}: " in function.__doc__
        assert each.flag.replace("-", "_") in inspect.signature(command).parameters
    assert "`source`" in function.__doc__
    assert "--" not in function.__doc__.partition("Options:")[2]
    with pytest.raises(T2RError, match="unknown option feature_sise; the options are "):
        function("x", "y", feature_sise=3)
    with pytest.raises(T2RError, match="minutes must be a number, above 0"):
        function("x", "y", minutes=0)
    with pytest.raises(TypeError, match="missing a required argument: 'out'"):
        function("x")


def test_only_the_options_of_a_swap_that_were_given_override_a_recipe():
    seen = {}

    @flat(Conversion)
    def call(given: Conversion) -> None:
        seen.update(given.swap())

    call("model", "out", feature_size=8, decay=False, seed=3, minutes=1)
    assert seen == {"feature_size": 8, "decay": False}


def test_a_model_is_loaded_with_its_tokenizer_beside_it(tmp_path):
    t2r.swap(tiny("gpt2", torch.float32), feature_size=4).save_pretrained(tmp_path)
    model = t2r.load(tmp_path, device="cpu")
    assert isinstance(model, T2RModel)
    assert isinstance(model, t2r.SwappedModel)
    assert model.continue_from
    assert t2r.load_tokenizer(tmp_path) is None
    with pytest.raises(T2RError, match="has no tokenizer"):
        t2r.generate(tmp_path, "hello")
    with pytest.raises(T2RError, match="requires the tokenizer"):
        t2r.generate(model, "hello")
    assert t2r.inspect(tmp_path).swapped
    assert callable(t2r.bench.ops.run)
    assert callable(t2r.bench.decoding.run)
