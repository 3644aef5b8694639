"""What the kernel of a step of windows becomes on a GPU that this machine need not have:

    python experiments/kernel_code.py [--nbits 8] [--features 32] [--block 128] [--warps 2] [--lines]

Triton and its assembler compile without a GPU. A step is short: what takes time is that each warp goes through its
instructions once, and waits at each barrier. So fewer of both are faster, before anything is measured. Printed are
registers, bytes on the stack (more than 0: registers were spilled), shared memory, instructions and barriers; with
`--lines` also the lines of the kernel with the most instructions, those of what they call included."""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from t2r.ops.triton import window_kernel
from t2r.ops.triton.blocks import block
from t2r.ops.triton.window_step import COLUMNS, JOINED, PARTS_AT_ONCE, TOKEN

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
ALIGNED = [["tt.divisibility", 16]]
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)")
PLACE = re.compile(r'//## File "([^"]+)", line (\d+)(?: inlined at "([^"]+)", line (\d+))?')


def compiled(given: argparse.Namespace) -> Any:
    """Compile the kernel for bfloat16 queries, rotated, among the buffers of other sequences."""
    half, single, state, eight = "*bf16", "*fp32", given.features > 0, given.nbits == 8
    types = dict.fromkeys(("work", "logs"), single) | {
        "table": "*i32",
        "arrived": "*i32",
        "seen": "*i64",
        "places": "*i64",
    }
    if eight:
        types |= {"keys": "*i8", "values": "*i8", "scales": "*fp16", "pairs": "*i32"}
    if state:
        types |= {"s": single, "z": single}
    joined = min(max(1, JOINED // (PARTS_AT_ONCE * block(given.size, 256))), triton.next_power_of_2(given.group))
    constants = dict(
        DIM=given.size, VALUE=given.size, BD=block(given.size, 256), BV=block(given.size, 256),
        FEATURE=max(1, given.features), BF=block(given.features, 256) if state else 1, STATES=given.heads,
        BN=given.block, BG=max(COLUMNS, triton.next_power_of_2(given.group)), BP=PARTS_AT_ONCE, BJ=joined,
        JOINS=-(-given.group // joined), HOW="bf16", EIGHT=eight, PLACED=True, ROTATED=True, LEAVES=False, STATE=state,
        NUMBERED=False, SLOTTED=False, HAS_DECAY=state, HAS_BIAS=False, ACTIVATION="softmax" if state else "",
        WEIGHS=state, WEIGHS_QUERIES=state, DRAWN=False, TOKEN=TOKEN,
    )  # fmt: skip
    kernel: Any = window_kernel.step
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        number = "fp32" if name == "scaling" else "i32"
        of_tensor = i < kernel.arg_names.index("q_b")
        signature[name] = "constexpr" if name in constants else types.get(name, half) if of_tensor else number
        if of_tensor or (number == "i32" and name not in window_kernel.SIZES and name not in constants):
            aligned[(i,)] = ALIGNED
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": given.warps})


def disassembled(code: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        tool = TOOLS / ("cuobjdump" if "-res-usage" in options else "nvdisasm")
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def by_line(listing: str) -> tuple[Counter[int], Counter[int]]:
    """Return the instructions and barriers of each line of the kernel's file below the kernel itself."""
    counts: Counter[int] = Counter()
    barriers: Counter[int] = Counter()
    lines: list[int] = []
    fresh = True
    for text in listing.splitlines():
        if place := PLACE.search(text):
            lines = [] if fresh else lines
            fresh = False
            for file, line in (place.group(1, 2), place.group(3, 4)):
                if file and Path(file).name == Path(window_kernel.__file__).name and int(line) not in lines[-1:]:
                    lines.append(int(line))
        elif found := INSTRUCTION.match(text):
            fresh = True
            line = (lines[-2:] or [0])[0]
            counts[line] += 1
            barriers[line] += found[1].startswith("BAR")
    return counts, barriers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbits", type=int, choices=(8, 16), default=8)
    parser.add_argument("--features", type=int, default=32, help="of the state of each key head; 0: windows alone")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--warps", type=int, default=2)
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--lines", action="store_true")
    given = parser.parse_args()
    kernel = compiled(given)
    code = kernel.asm["cubin"]
    listing = disassembled(code, "-c", "--print-line-info-inline")
    used = dict(re.findall(r"(REG|STACK):(\d+)", disassembled(code, "-res-usage")))
    counts, barriers = by_line(listing)
    print(
        f"{used['REG']} registers, {used['STACK']} bytes on the stack, {kernel.metadata.shared:,} bytes of shared "
        f"memory, {counts.total():,} instructions, {barriers.total()} barriers"
    )
    if given.lines:
        text = Path(window_kernel.__file__).read_text().splitlines()
        for line, count in counts.most_common(40):
            print(f"{count:5} {barriers[line]:3}  {line:4}  {text[line - 1].strip() if line else ''}"[:120])


if __name__ == "__main__":
    main()
