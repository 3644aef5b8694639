"""Importing t2r does not affect transformers, in any order of imports. Tested in new processes."""

import subprocess
import sys
from itertools import permutations

import pytest

CONCRETE = "from transformers import LlamaForCausalLM, GPT2LMHeadModel"
AUTO = "from transformers import AutoConfig, AutoModelForCausalLM"
LOADS = """
from transformers import AutoConfig, AutoModelForCausalLM
sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
base = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
config = AutoConfig.for_model("t2r", base_config=base, feature_size=4)
model = AutoModelForCausalLM.from_config(config)
assert type(model).__name__ == "T2RGPT2LMHeadModel", type(model)
assert AutoConfig.for_model("adaptive_lm").model_type == "adaptive_lm"
"""
STATEMENTS = ("import t2r", CONCRETE, AUTO, "import torch")


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", [order for order in permutations(STATEMENTS, 2) if "import t2r" in order])
def test_any_order_of_imports_works(order):
    run("\n".join(order) + LOADS)


@pytest.mark.parametrize("name", ["ops", "feature_maps", "config", "model.modeling", "hub", "cli"])
def test_any_part_can_be_imported_first(name):
    run(f"import t2r.{name}\n{CONCRETE}")


def test_no_import_hook_and_no_change_to_transformers():
    said = run(
        "import sys, transformers\n"
        "hooks, before = list(sys.meta_path), dict(vars(transformers.PreTrainedModel))\n"
        "import t2r\n"
        "ours = [x for x in sys.meta_path if x not in hooks and type(x).__module__.startswith('t2r')]\n"
        "assert not ours\n"
        "assert dict(vars(transformers.PreTrainedModel)) == before\n"
        "print('same')"
    )
    assert said.strip() == "same"


def test_the_command_line_answers_without_torch():
    code = (
        "import sys; sys.argv = ['t2r', '--help']\n"
        "try:\n    from t2r.cli import main; main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert "Usage" in run(code)
