"""docs/tools.md names tests that exist, and its examples run."""

import ast
import re
from pathlib import Path

import pytest
import torch

import t2r
from families import tiny

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "tools.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_tests_that_the_page_names_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) == PAGE.count("`tests/") >= 9
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, (file, name)


def test_every_tool_that_is_linked_has_a_section():
    heads = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) == anchors


@pytest.mark.slow
@torch.no_grad()
def test_exported_programs_compute_what_the_model_computes(tmp_path, monkeypatch):
    """The examples of the page, in onnxruntime: a text of another length, and the same text token by token."""
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    how = {"feature_size": 8, "decay": True, "key_weights": True}
    t2r.swap(tiny("llama", torch.float32, layers=1), **how).save_pretrained("rnn")
    names: dict[str, object] = {}
    for code in PYTHON:
        exec(compile(code, "docs/tools.md", "exec"), names)
    ids = torch.randint(3, 90, (1, 50))
    expected = names["model"](ids).logits

    text = onnxruntime.InferenceSession("text.onnx")
    given = [ids.numpy(), torch.ones_like(ids).numpy()]
    (logits,) = text.run(None, {each.name: x for each, x in zip(text.get_inputs(), given, strict=True)})
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-5)

    step = onnxruntime.InferenceSession("step.onnx")
    states = [x.numpy() for state in names["states"] for x in state.values()]
    for place in range(ids.shape[1]):
        given = [ids[:, place : place + 1].numpy(), torch.tensor([[place]]).numpy(), *states]
        last, *states = step.run(None, {each.name: x for each, x in zip(step.get_inputs(), given, strict=True)})
    torch.testing.assert_close(torch.from_numpy(last), expected[:, -1], rtol=1e-4, atol=1e-5)
