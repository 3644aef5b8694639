"""A step of windows in ring buffers by one kernel, compared with the rings in PyTorch."""

from __future__ import annotations

import pytest
import torch

from t2r.attention.memories import Shape, WindowMemory
from t2r.ops import Windows, registry
from t2r.ops.rings import How

MISSING = registry.BACKENDS["triton"].missing()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

CASES = {  # windows of the key heads, sinks, query heads of each, size of keys and of values; dtype
    "windows that differ": ((10, 3, 5), 4, 3, 40, 40, torch.float32),
    "half precision": ((2, 6), 2, 2, 64, 64, torch.bfloat16),
    "a head without a window": ((6, 0, 6, 2), 1, 1, 16, 24, torch.float32),
    "no sinks": ((5, 5), 0, 2, 8, 8, torch.float32),
}


def memory_of(shape, rows, dim, value, dtype, seen):
    token = (torch.zeros(rows, 1, 1, n, device=DEVICE, dtype=dtype) for n in (dim, value))
    return WindowMemory(shape, held=shape.empty(*token), lengths=seen.clone())


@pytest.mark.parametrize(
    ("case", "nbits", "lanes"),
    [(case, nbits, nbits == 8) for case in CASES for nbits in (8, 16)]
    + [("no sinks", nbits, nbits == 16) for nbits in (8, 16)],
)
def test_a_step_of_windows(case, nbits, lanes, monkeypatch):
    """Rows with different numbers of tokens, until every ring was filled twice."""
    from t2r.ops.triton import window_step

    if nbits == 8 and lanes and case in ("windows that differ", "no sinks") and DEVICE == "cpu":
        pytest.skip("the interpreter takes seconds for each, and two other cases have 8 bits")
    sizes, sinks, group, dim, value, dtype = CASES[case]
    sizes = tuple(4 * size for size in sizes) if DEVICE == "cuda" else sizes
    # Several blocks in short windows. The interpreter, which takes a second for a step, also runs blocks of this size.
    form = window_step.FORMS[nbits]._replace(lanes=lanes, block=16 if DEVICE == "cuda" else 4)
    monkeypatch.setitem(window_step.FORMS, nbits, form)
    generator = torch.Generator().manual_seed(0)
    shape, heads, rows = Shape(sizes, sinks, nbits), len(sizes), 2
    seen = torch.tensor([0, 5], device=DEVICE)
    fast, slow = (memory_of(shape, rows, dim, value, dtype, seen) for _ in range(2))
    windows = Windows(torch.tensor(sizes, device=DEVICE), sinks)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-2}
    # Triton's interpreter cuts float32 to bfloat16 where a GPU rounds.
    last_bit = 2.0**-7 if nbits == 8 and dtype == torch.bfloat16 else 0
    for _ in range(2 * max(sizes) + sinks + 3):
        q, k, v = (
            torch.randn(rows, n, 1, width, generator=generator).to(DEVICE, dtype)
            for n, width in ((heads * group, dim), (heads, dim), (heads, value))
        )
        answers = []
        for memory, triton in ((fast, True), (slow, False)):
            monkeypatch.setattr("t2r.attention.memories.window.steps_at_once", lambda *given, triton=triton: triton)
            with torch.no_grad():
                answers.append(memory.attend(q, k, v, windows, None, How(0.3), leaves=True))
            memory.lengths += 1
        ((found,), left), ((expected,), gone) = answers
        torch.testing.assert_close(found.numerator, expected.numerator, **near)
        torch.testing.assert_close(found.peak, expected.peak, **near)
        assert torch.equal(left.valid, gone.valid)
        for own, other in ((left.k, gone.k), (left.v, gone.v)):
            torch.testing.assert_close(own[left.valid], other[gone.valid], rtol=last_bit, atol=0)
        for own, other in zip(fast.held, slow.held, strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize("seen", [[0, 3, 9]])
def test_a_step_of_windows_among_those_of_others(seen):
    """What is in the buffers before a sequence wrote there is not read."""
    shape, dim = Shape((2, 5), 1), 16
    given = torch.randn(3, 2, 9, dim, device=DEVICE)
    q, k, v = (torch.randn(3, heads, 1, dim, device=DEVICE) for heads in (4, 2, 2))
    places, lengths = torch.tensor([4, 0, 2], device=DEVICE), torch.tensor(seen, device=DEVICE)
    own = memory_of(shape, 3, dim, dim, torch.float32, torch.zeros_like(lengths))
    mask = torch.arange(9, device=DEVICE) < lengths[:, None]
    with torch.no_grad():
        own.extend(given, given + 1, mask, How(0.3, inplace=True))
        own.lengths = lengths
        held = [torch.full((6, shape.slots, dim), torch.nan, device=DEVICE) for _ in range(2)]
        other = WindowMemory(shape, held=held, lengths=lengths)
        other.skipped, other.places = None, places
        for row, place in enumerate(places.tolist()):
            for size, heads in shape.rings:
                for head in heads:
                    first, slots = int(shape.layout(DEVICE)[0, head]), size + shape.sinks
                    filled = slice(first, first + min(seen[row], slots))
                    other.keys[place, filled], other.values[place, filled] = (
                        own.keys[row, filled],
                        own.values[row, filled],
                    )
        (expected, left), (found, gone) = (memory.step_at_once(q, k, v, How(0.3)) for memory in (own, other))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gone, left)
    assert other.keys[[1, 3, 5]].isnan().all()
