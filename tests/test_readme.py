"""What the documents show must run."""

import re
from pathlib import Path

import pytest
import torch

from families import tiny

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
def test_examples_in_the_readme_run(code, tmp_path):
    tiny("gpt2", torch.float32).save_pretrained(tmp_path)  # the hub is not always there; a folder loads the same way
    exec(compile(code.replace('"gpt2"', repr(str(tmp_path))), str(README), "exec"), {})
