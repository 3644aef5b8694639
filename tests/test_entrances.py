"""Public functions check the types of their arguments: a wrong one is one T2RError that names it."""

import inspect
import os
from collections.abc import Sequence

import pytest
import torch

import t2r
from commands import TEXT, words
from families import tiny
from t2r.errors import T2RError
from t2r.options.entrance import check_type, described, entrance, matches

NOWHERE = "no such folder"
"""Not a name on the Hub, so that every call with valid types ends here."""
STRANGE = (
    3,
    -1,
    2.5,
    float("nan"),
    True,
    None,
    b"x",
    object(),
    ["x"],
    [3],
    {"a": 1},
    "",
    "x\0",
    "\ud800",
    torch.zeros(2),
    int,
)
CALLS = {
    "analyze": {"model": NOWHERE, "text": "text.txt"},
    "average": {"models": [NOWHERE, NOWHERE], "out": "out"},
    "convert": {"model": NOWHERE, "out": "out", "train": "text.txt"},
    "evaluate": {"models": NOWHERE, "text": "text.txt"},
    "generate": {"model": NOWHERE, "prompts": "the sea"},
    "inspect": {"source": NOWHERE},
    "load": {"source": NOWHERE},
    "load_tokenizer": {"source": NOWHERE},
    "pretrain": {"config": NOWHERE, "out": "out", "train": "text.txt"},
    "report": {"source": NOWHERE},
    "teach": {"model": NOWHERE, "out": "out", "train": "text.txt"},
}


@pytest.mark.parametrize("name", CALLS)
def test_any_argument_may_be_wrong(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "text.txt").write_text(TEXT)
    function = getattr(t2r, name)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        for strange in STRANGE:
            if parameter.name == "tasks" and strange is STRANGE[8]:  # a valid type, and lm-eval reads all its tasks
                continue
            with pytest.raises(T2RError) as error:
                function(**CALLS[name] | {parameter.name: strange})
            assert len(str(error.value)) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("load", {"source": 3}, "source must be text or a path; got 3"),
        ("load", {"device": 3}, "device must be text; got 3"),
        ("load", {"trust_remote_code": 1}, "trust_remote_code must be true or false; got 1"),
        ("average", {"models": NOWHERE}, "models must be a list, each text; got 'no such folder'"),
        ("convert", {"train": 3}, "train must be text, a list, a mapping or None; got 3"),
        ("convert", {"limit": "many"}, "limit must be a whole number or None; got 'many'"),
        ("convert", {"bf16": "yes"}, "bf16 must be true or false or None; got 'yes'"),
        ("convert", {"feature_size": 8.0}, "feature_size must be a whole number or None; got 8.0"),
        ("convert", {"memory": 2.5}, "memory must be text, a whole number or None; got 2.5"),
        ("pretrain", {"model_overrides": 3}, "model_overrides must be a list, each text; got 3"),
        ("evaluate", {"window": [512, "x"]}, "window must be a whole number, a list, each a whole number or None; got"),
        ("evaluate", {"window": [512, 1]}, "window must be a whole number, at least 2"),
        ("evaluate", {"trials": 0}, "trials must be a whole number, at least 1"),
        ("evaluate", {"beams": 2000}, "beams must be a whole number, at least 1 and at most 1000"),
        ("analyze", {"seed": -1}, "seed must be a whole number, at least 0"),
        ("generate", {"prompts": [3]}, "prompts must be text or a list, each text; got a list"),
        ("generate", {"prompts": ["the", "\udce9"]}, "prompts is not valid Unicode (U+DCE9 at 0)"),
        ("generate", {"on_completion": 3}, "on_completion must be a function or None; got 3"),
        ("report", {"prompts": "the sea"}, "prompts must be a list, each text; got 'the sea'"),
    ],
)
def test_errors_name_the_argument(name, arguments, says):
    with pytest.raises(T2RError) as error:
        getattr(t2r, name)(**CALLS[name] | arguments)
    assert says in str(error.value)


@pytest.fixture(scope="module")
def model():
    return t2r.swap(tiny("gpt2", torch.float32), feature_size=6)


def test_models_are_checked(model):
    tokenizer = words()
    for call in (
        lambda: t2r.merge(3),
        lambda: t2r.merge(model, force="yes"),
        lambda: t2r.swap(3),
        lambda: t2r.swap(tiny("gpt2", torch.float32), {"feature_size": 8}),
        lambda: t2r.swap(tiny("gpt2", torch.float32), feature_size="8"),
        lambda: t2r.read_document(model, 3, "the sea"),
        lambda: t2r.read_document(model, tokenizer, 3),
        lambda: t2r.read_document(model, tokenizer, "the \ud800 sea"),
        lambda: t2r.read_document(model, tokenizer, "the sea", 3),
        lambda: t2r.read_document(model, tokenizer, "the sea", chat=1),
        lambda: t2r.read_document(3, tokenizer, "the sea"),
        lambda: t2r.generate(model, "the sea", tokenizer=3),
        lambda: t2r.generate(model, "the sea", tokenizer=tokenizer, state=3),
        lambda: t2r.generate(model, "the sea", tokenizer=tokenizer, max_new_tokens="3"),
        lambda: t2r.generate(model, "the sea", tokenizer=tokenizer, batch_size=0),
        lambda: t2r.inspect(model, feature_size=2.5),
        lambda: t2r.Engine(model, compiled="yes"),
        lambda: t2r.Engine(model, state_dtype=torch.ones(2)),
        lambda: t2r.convert(model, "out", train=TEXT, tokenizer=3),
        lambda: t2r.evaluate([model, 3], "text.txt", tokenizer=tokenizer),
    ):
        with pytest.raises(T2RError):
            call()


def test_a_device_may_be_an_object(model, tmp_path):
    model.save_pretrained(tmp_path / "rnn")
    assert t2r.load(tmp_path / "rnn", device=torch.device("cpu")).device.type == "cpu"
    with pytest.raises(T2RError, match="dtype must be text; got a dtype"):
        t2r.load(tmp_path / "rnn", dtype=torch.float32)


def test_types():
    assert matches(torch.tensor(3).item(), int)
    assert not matches(True, int)
    assert matches(3, float)
    assert matches(range(3), Sequence[int])
    assert not matches([1, "a"], Sequence[int])
    assert not matches(3, os.PathLike[str])
    check_type("x", {"a": 1}, dict[str, int] | None)
    assert described(int | None) == "a whole number or None"

    @entrance()
    def function(a: "int", *, b: "list[str] | Undefined" = (), **rest: "int") -> None:  # type: ignore[name-defined]  # noqa: F821
        """Do nothing."""

    function(3, b=5, c="unchecked")
    assert function.__doc__ == "Do nothing."
    with pytest.raises(TypeError):
        function()
