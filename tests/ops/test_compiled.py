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
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from t2r.ops.triton.decode_kernel import decode

def instructions(**constants):
    names = decode.arg_names
    kinds = {name: "*fp32" for name in ("s", "z", "z_abs", "decay", "dens", "logs")} | {"mask": "*u8", "fresh": "*u8"}
    kinds |= {name: "*bf16" for name in ("q", "k", "v", "out", "q_weight", "q_bias", "k_weight", "k_bias")}
    kinds |= {name: "*i64" for name in ("places", "slots")}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    loose = ("key_heads", "group", "k_share", "v_share", "mask_share", "logs_b")  # sizes that are any number
    even = [i for i, name in enumerate(names) if name not in constants and name not in loose]
    source = ASTSource(
        decode, signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return re.findall(r"(ld\\.global|st\\.global|bar\\.sync)", text)

print(json.dumps([instructions(**each) for each in json.loads(sys.argv[1])]))
"""
WINDOWS = """
import json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from t2r.ops.triton.window_step import step

def copies(eight):
    names = step.arg_names
    constants = dict(
        DIM=64, VALUE=64, BG=16, BN=64, BD=64, BV=64, STAGES=3, HOW="bf16", PLACED=True, EIGHT=eight
    )
    kinds = {name: "*bf16" for name in ("q", "k", "v", "out", "old_k", "old_v")}
    kinds |= {name: "*i64" for name in ("seen", "layout", "places")} | {"logs": "*fp32", "valid": "*u8"}
    kinds |= {name: "*i8" if eight else "*bf16" for name in ("keys", "values")} | {"scaling": "fp32"}
    kinds |= {"scales": "*fp16" if eight else "*fp32"}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    loose = ("key_heads", "group", "sinks", "scaling")
    even = [i for i, name in enumerate(names) if name not in constants and name not in loose]
    source = ASTSource(
        step, signature, constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in even},
    )
    text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    return re.findall(r"cp\\.async\\.c\\w\\.shared\\.global .*, (0x\\w+|\\d+)", text)

print(json.dumps([copies(eight) for eight in (False, True)]))
"""
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
    found, _, planned = output(COMPILE, json.dumps([SMOLLM2, grouped, PLANNED]))
    assert found.count("ld.global") < 60
    for each in (found, planned):
        assert "ld.global" not in each[each.index("bar.sync") :]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.slow
def test_windows_in_eight_bits_are_read_in_fewer_words():
    """Keys and values are on their way from memory while others are multiplied, in either form."""
    wide, narrow = output(WINDOWS)
    assert 0 < len(narrow) < len(wide)


def output(script: str, *arguments: str) -> list:
    """Run a script in a process that compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
