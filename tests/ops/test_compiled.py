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
        "*i64": ("places", "slots"),
        "*u8": ("mask", "fresh"),
    },
    "loose": ("key_heads", "group", "k_share", "v_share", "mask_share", "logs_b"),
}
WINDOWS = {
    "module": "t2r.ops.triton.window_step",
    "name": "step",
    "words": r"cp\.async\.c\w\.shared\.global .*?, (0x\w+)",
    "loose": ("key_heads", "group", "sinks", "chunk", "total", "scaling"),
}
WINDOW_KINDS = {
    "*bf16": ("q", "k", "v", "out", "old_k", "old_v"),
    "*i64": ("seen", "layout", "places"),
    "*fp32": ("logs",),
    "*i32": ("arrived",),
    "*u8": ("valid",),
    "fp32": ("scaling",),
}
WINDOW_SIZES = {
    "DIM": 64, "VALUE": 64, "BN": 64, "BD": 64, "BV": 64, "STAGES": 3, "HOW": "bf16", "PLACED": True,
    "PARTS": 0, "BH": 1, "BJ": 1, "JOINS": 1,
}  # fmt: skip
AS_THEY_ARE = {
    "kinds": WINDOW_KINDS | {
        "*bf16": (*WINDOW_KINDS["*bf16"], "keys", "values"), "*fp32": ("logs", "scales", "pairs", "work"),
    },
    "constants": WINDOW_SIZES | {"EIGHT": False, "LANES": False, "BG": 16},
}  # fmt: skip
IN_8_BITS = {
    "kinds": WINDOW_KINDS | {
        "*i8": ("keys", "values"), "*fp16": ("scales",), "*i32": ("pairs", "arrived"), "*fp32": ("logs", "work"),
    },
    "constants": WINDOW_SIZES | {"EIGHT": True, "LANES": True, "BG": 1},
}  # fmt: skip
DIVIDED = [
    kernel | {"constants": kernel["constants"] | {"PARTS": 16, "BH": 16, "BJ": joined}}
    for kernel, joined in ((AS_THEY_ARE, 4), (IN_8_BITS, 1))
]
"""The same with rings in up to 16 parts."""
SMOLLM2 = {
    "FEATURE": 128, "VALUE": 64, "DIM": 64, "HAS_Z_ABS": False, "HAS_MASK": False, "HAS_DECAY": True, "GROUPED": False,
    "MAPPED": True, "HAS_BIAS": True, "ACTIVATION": "softmax", "WEIGHS": True, "BF": 128, "BV": 64, "BLOCKS": 1,
    "BD": 64, "BG": 1, "CHUNKS": 1, "NORMALIZED": True, "BESIDE": False, "PLACED": False, "SLOTTED": False,
    "WEIGHS_QUERIES": False,
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
    found, _, planned = compiled([DECODE | {"constants": each} for each in (SMOLLM2, grouped, PLANNED)])
    assert found.count("ld.global") < 60
    for each in (found, planned):
        assert "ld.global" not in each[each.index("bar.sync") :]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.slow
def test_all_of_a_window_is_on_its_way_from_memory():
    """In either form, keys, values and scales are copied while others are used: words of 16 and of 4 bytes."""
    wide, narrow, *parts = compiled([WINDOWS | each for each in (AS_THEY_ARE, IN_8_BITS, *DIVIDED)])
    assert (set(wide), set(narrow)) == ({"0x10"}, {"0x10", "0x4"})
    assert narrow.count("0x10") < wide.count("0x10")
    assert parts == [wide, narrow]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.slow
def test_parts_of_a_ring_are_stored_before_they_are_counted_and_read_after():
    """All threads wait before one of them counts the program, and for its result before they read the parts."""
    words = r"(st\.global|bar\.sync|atom\.[\w.]+|ld\.global)"
    for found in compiled([WINDOWS | each | {"words": words} for each in DIVIDED]):
        (at,) = (i for i, word in enumerate(found) if word.startswith("atom"))
        assert found[at] == "atom.global.gpu.acq_rel.add.u32"
        stored = max(i for i in range(at) if found[i] == "st.global")
        read = min(i for i in range(at, len(found)) if found[i] == "ld.global")
        assert "bar.sync" in found[stored:at]
        assert "bar.sync" in found[at:read]


def compiled(kernels: list[dict]) -> list:
    """Run the script in a process that compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, json.dumps(kernels)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
