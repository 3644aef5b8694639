"""The code in the documentation runs."""

import re
from pathlib import Path

import pytest
import torch

import t2r
from families import tiny
from repository import example

README = Path(__file__).parent.parent / "README.md"


BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
DEMO = [code for code in BLOCKS if "examples/teacher" in code]


@pytest.mark.parametrize("code", [code for code in BLOCKS if code not in DEMO])
def test_examples_in_the_readme_run(code, tmp_path):
    tiny("gpt2", torch.float32).save_pretrained(tmp_path)  # a folder, because the Hub may not be reachable
    exec(compile(code.replace('"gpt2"', repr(str(tmp_path))), str(README), "exec"), {})


def test_the_demo_in_a_few_lines(tmp_path, monkeypatch):
    """The example of the README with fewer steps, because the full example takes minutes."""
    (code,) = DEMO
    example("teacher/model.safetensors")
    convert, given = t2r.convert, {}

    def shorter(*args, minutes, **options):
        given.update(options, minutes=minutes)
        steps = ["transfer.steps=2", "distill.steps=2", "batch_tokens=512"]
        return convert(*args, overrides=steps, limit=2, progress=False, **options)

    monkeypatch.setattr(t2r, "convert", shorter)
    (tmp_path / "examples").symlink_to(README.parent / "examples")
    monkeypatch.chdir(tmp_path)
    said = []
    exec(compile(code, "README.md", "exec"), {"print": lambda *args: said.append(args)})
    assert given["minutes"] == 5
    assert given["feature_size"] == 32
    ((text,),) = said
    assert text.startswith("She opened the letter, and")
    assert "recall of a word mentioned once:" in (tmp_path / "novelist-rnn" / "README.md").read_text()
