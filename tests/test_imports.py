"""Importing t2r does not affect transformers, in any order of imports. Tested in new processes."""

import subprocess
import sys

import pytest

CONCRETE = "from transformers import LlamaForCausalLM, GPT2LMHeadModel"
LOADS = """
from transformers import AutoConfig, AutoModelForCausalLM
sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
base = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
config = AutoConfig.for_model("t2r", base_config=base, feature_size=4)
model = AutoModelForCausalLM.from_config(config)
assert type(model).__name__ == "T2RGPT2LMHeadModel", type(model)
assert AutoConfig.for_model("adaptive_lm").model_type == "adaptive_lm"
"""
PARTS = (
    "ops",
    "feature_maps",
    "attention",
    "config",
    "model.modeling",
    "hub",
    "training.sessions.session",
    "pipelines",
    "cli",
)


def run(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_t2r_can_be_imported_first():
    """Before models of transformers; after them: below; and after the Auto classes: tests/model/test_saving.py."""
    run(f"import t2r\n{CONCRETE}{LOADS}")


@pytest.mark.slow
def test_any_part_can_be_imported_first():
    """Each part in a fork of a process that has imported torch and transformers, which takes most of the time."""
    fork = (
        "import importlib, os, sys, torch\n"
        f"{CONCRETE}\n"
        f"for name in {PARTS}:\n"
        "    if not (child := os.fork()):\n"
        "        importlib.import_module(f't2r.{name}')\n"
        "        os._exit(0)\n"
        "    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert run(fork).split() == [word for name in PARTS for word in (name, "0")]


NO_CHANGES = f"""
import sys, torch, transformers
{CONCRETE}
hooks, before = list(sys.meta_path), dict(vars(transformers.PreTrainedModel))
import t2r
assert not [x for x in sys.meta_path if x not in hooks and type(x).__module__.startswith('t2r')]
assert dict(vars(transformers.PreTrainedModel)) == before
t2r.ops.backends()
assert torch.cuda.is_available() or "t2r.ops.triton.math" not in sys.modules, "kernels that were not used"
print("same")
"""


def test_no_import_hook_and_no_change_to_transformers():
    assert run(NO_CHANGES + LOADS).strip() == "same"


def test_the_command_line_answers_without_torch():
    code = (
        "import sys; sys.argv = ['t2r', '--help']\n"
        "try:\n    from t2r.cli import main; main()\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    assert "Usage" in run(code)
