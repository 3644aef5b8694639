"""Kernels compiled for a GPU on a machine without one: the interpreter accepts programs that the compiler does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from t2r.ops.registry import BACKENDS

pytest.importorskip("triton", minversion="3.6")
MISSING = BACKENDS["triton"].missing()

COMPILE = """
import importlib, json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def found(module, name, words, kinds, loose, constants):
    kernel = getattr(importlib.import_module(module), name)
    names = kernel.arg_names
    kinds = {name: kind for kind, those in kinds.items() for name in those}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    even = [i for i, name in enumerate(names) if name not in constants and name not in loose]
    source = ASTSource(
        kernel, signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return re.findall(words, text)

print(json.dumps([found(**each) for each in json.loads(sys.argv[1])]))
"""
"""Prints what is found in the compiled text of kernels: their module and name, the expression to find, the types of
arguments that are not `i32`, the sizes that are any number, and the constants."""
DECODE = {
    "module": "t2r.ops.triton.decode_kernel",
    "name": "decode",
    "words": r"(ld\.global|st\.global|bar\.sync)",
    "kinds": {
        "*fp32": ("s", "z", "z_abs", "decay", "dens", "logs"),
        "*bf16": ("q", "k", "v", "out", "q_weight", "q_bias", "k_weight", "k_bias"),
        "*i64": ("places", "slots", "counts"),
        "*u8": ("mask", "fresh"),
    },
    "loose": ("key_heads", "group", "k_share", "v_share", "mask_share", "logs_b", "seed"),
}
HALF = [
    DECODE | {"kinds": DECODE["kinds"] | {"*fp32": ("decay", "dens", "logs"), kind: states}}
    for kind, states in (
        ("*bf16", (*DECODE["kinds"]["*bf16"], "s", "z", "z_abs")),
        ("*fp16", ("s", "z", "z_abs")),
    )
]
"""The same with states in half precision."""
WINDOWS = {
    "module": "t2r.ops.triton.window_kernel",
    "name": "step",
    "words": r"(st\.global|bar\.sync|atom\.[\w.]+|ld\.global[\w.]*|mma\.sync|ret;)",
    "loose": ("key_heads", "group", "sinks", "total", "most", "seed", "scaling"),
}
WINDOW_KINDS = {
    "*i64": ("seen", "places", "slots", "counts"),
    "*i32": ("table", "arrived", "numbers"),
    "*fp32": ("logs", "work", "s", "z", "decay"),
    "*u8": ("valid", "fresh"),
    "fp32": ("scaling",),
}
OF_MODEL = ("q", "k", "v", "cos", "sin", "out", "old_k", "old_v", "q_weight", "q_bias", "k_weight", "k_bias")
WINDOW_SIZES = {
    "DIM": 64, "VALUE": 64, "FEATURE": 32, "STATES": 2, "BD": 64, "BV": 64, "BF": 32, "BN": 64, "BG": 16, "BQ": 4,
    "CHUNKS": 1, "BP": 32, "BJ": 4, "JOINS": 1, "HOW": "bf16", "PLACED": False, "ROTATED": True, "LEAVES": False,
    "STATE": True, "NUMBERED": True, "SLOTTED": False, "HAS_DECAY": True, "HAS_BIAS": True, "ACTIVATION": "softmax",
    "WEIGHS": True, "WEIGHS_QUERIES": True, "DRAWN": False,
}  # fmt: skip
"""A layer with windows, and states for some heads, of SmolLM2."""
AS_THEY_ARE = WINDOWS | {
    "kinds": WINDOW_KINDS | {
        "*bf16": (*OF_MODEL, "keys", "values"), "*fp32": (*WINDOW_KINDS["*fp32"], "scales", "pairs"),
    },
    "constants": WINDOW_SIZES | {"EIGHT": False},
}  # fmt: skip
IN_8_BITS = WINDOWS | {
    "kinds": WINDOW_KINDS | {
        "*bf16": OF_MODEL, "*i8": ("keys", "values"), "*fp16": ("scales",), "*i32": (*WINDOW_KINDS["*i32"], "pairs"),
    },
    "constants": WINDOW_SIZES | {"EIGHT": True, "PLACED": True, "SLOTTED": True},
}  # fmt: skip
SMOLLM2 = {
    "FEATURE": 128, "VALUE": 64, "DIM": 64, "HAS_Z_ABS": False, "HAS_MASK": False, "HAS_DECAY": True, "GROUPED": False,
    "MAPPED": True, "HAS_BIAS": True, "ACTIVATION": "softmax", "WEIGHS": True, "BF": 128, "BV": 64, "BLOCKS": 1,
    "BD": 64, "BG": 1, "CHUNKS": 1, "NORMALIZED": True, "BESIDE": False, "PLACED": False, "SLOTTED": False,
    "WEIGHS_QUERIES": False, "DRAWN": False,
}  # fmt: skip
"""A layer of SmolLM2 in the default recipe."""
PLANNED = SMOLLM2 | {
    "FEATURE": 32, "BF": 32, "GROUPED": True, "BG": 4, "NORMALIZED": False, "BESIDE": True, "PLACED": True,
    "HAS_MASK": True, "WEIGHS_QUERIES": True,
}  # fmt: skip
"""A layer with windows, and states for some heads."""


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.slow
def test_the_decoding_step_loads_wide_words_before_it_computes():
    """A thread of 128 loads 64 values of the state and of each map, in words of 16 bytes: scalar loads are 200."""
    grouped = SMOLLM2 | {
        "GROUPED": True, "BLOCKS": 2, "HAS_MASK": True, "HAS_Z_ABS": True, "MAPPED": False, "CHUNKS": 3,
    }  # fmt: skip
    forms = [DECODE | {"constants": each} for each in (SMOLLM2, grouped, PLANNED)]
    forms += [half | {"constants": PLANNED | {"DRAWN": True}} for half in HALF]
    found, _, *planned = compiled(forms)
    assert found.count("ld.global") < 60
    for each in (found, *planned):
        assert "ld.global" not in each[each.index("bar.sync") :]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.slow
def test_parts_of_a_window_are_stored_before_they_are_counted_and_read_after():
    """All threads wait before one of them counts the program, and for its result before they read the parts."""
    for found in compiled([AS_THEY_ARE, IN_8_BITS]):
        (at,) = (i for i, word in enumerate(found) if word.startswith("atom"))
        assert found[at] == "atom.global.gpu.acq_rel.add.u32"
        stored = max(i for i in range(at) if found[i] == "st.global")
        read = min(i for i in range(at, len(found)) if found[i].startswith("ld.global"))
        assert "bar.sync" in found[stored:at]
        assert "bar.sync" in found[at:read]
        assert "mma.sync" in found[:at]


def compiled(kernels: list[dict]) -> list:
    """Run the script in a process that compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(kernels)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
