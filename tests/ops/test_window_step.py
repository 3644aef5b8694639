"""A step of windows in ring buffers by one kernel, compared with the rings in PyTorch."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given as given_some
from hypothesis import settings
from hypothesis import strategies as st

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
    """One row fills its rings and begins again, while the other goes through all of its second round."""
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
    whole = max(sizes) + sinks
    seen = torch.tensor([0, whole - 2], device=DEVICE)
    fast, slow = (memory_of(shape, rows, dim, value, dtype, seen) for _ in range(2))
    windows = Windows(torch.tensor(sizes, device=DEVICE), sinks)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-2}
    # Triton's interpreter cuts float32 to bfloat16 where a GPU rounds.
    last_bit = 2.0**-7 if nbits == 8 and dtype == torch.bfloat16 else 0
    for _ in range(whole + 3):
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


# --- Rings that are divided among programs ------------------------------------------------------------------

REPEATS = 30 if DEVICE == "cuda" else 2
"""Steps from the same buffers, which must agree to the last bit. On a GPU, programs arrive in any order."""


class Divided(NamedTuple):
    """One step of windows that are divided."""

    sizes: tuple[int, ...]
    seen: tuple[int, ...]
    sinks: int = 1
    group: int = 2
    dim: int = 16
    value: int = 24
    nbits: int = 16
    lanes: bool = False
    chunk: int = 8
    placed: bool = False
    dtype: torch.dtype = torch.float32
    at_once: int = 8192
    """Numbers that are joined at a time."""


CASES_DIVIDED = {
    "a head without a window, query heads one by one": Divided((13, 0, 3), (35, 4), group=3, at_once=16),
    "8 bits, lanes": Divided((13, 5), (40,), group=1, nbits=8, lanes=True, placed=True),
    "8 bits, products": Divided((13, 5), (10, 19), sinks=0, nbits=8, placed=True),
    "half precision": Divided((20,), (70, 0, 9), dim=16, value=16, dtype=torch.bfloat16),
}


def in_any_order(monkeypatch, order):
    """Let the interpreter run the programs of each launch in a random order instead of by their numbers."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    stock, orders = type(builder).set_grid_idx, {}

    def shuffled(x, y, z):
        count = builder.grid_dim[0]
        if count not in orders:
            orders[count] = order.sample(range(count), count)
        stock(builder, orders[count][x], y, z)

    monkeypatch.setattr(builder, "set_grid_idx", shuffled, raising=False)


def there(shape, counts):
    """Return which slots of the buffers have a token after so many tokens, `[rows, slots]`."""
    slots = torch.zeros(len(counts), shape.slots, dtype=torch.bool, device=DEVICE)
    for (first, size), row in ((pair, row) for pair in shape.layout("cpu").T.tolist() for row in range(len(counts))):
        if size:
            slots[row, first : first + min(counts[row], size + shape.sinks)] = True
    return slots


def filled(shape, case, generator):
    """Return buffers with random tokens in all slots."""
    k, v = (torch.randn(len(case.seen), shape.slots, n, generator=generator) for n in (case.dim, case.value))
    from t2r.ops.stored import stored

    return [x.to(DEVICE) for x in stored(k.to(case.dtype), v.to(case.dtype), case.nbits)]


def check_divided(case, seed=0):
    """Compare a step with the rings in PyTorch, and with itself if programs run in another order."""
    from t2r.ops.triton import window_step

    if DEVICE == "cuda":  # whose blocks are larger
        case = case._replace(
            sizes=tuple(8 * size for size in case.sizes), seen=tuple(8 * n for n in case.seen), chunk=8 * case.chunk
        )
    generator, order = torch.Generator().manual_seed(seed), random.Random(seed)
    shape, rows, heads = Shape(case.sizes, case.sinks, case.nbits), len(case.seen), len(case.sizes)
    seen, how = torch.tensor(case.seen, device=DEVICE), How(0.3)
    clean = filled(shape, case, generator)
    q, k, v = (
        torch.randn(rows, n, 1, width, generator=generator).to(DEVICE, case.dtype)
        for n, width in ((heads * case.group, case.dim), (heads, case.dim), (heads, case.value))
    )
    places = torch.tensor(order.sample(range(rows + 2), rows), device=DEVICE) if case.placed else torch.arange(rows)
    places = places.to(DEVICE)
    # What is not there yet must not be read, even if the step writes it.
    given = []
    for x in clean:
        held = torch.full((rows + 2, *x.shape[1:]), 77, device=DEVICE).to(x.dtype)
        held = held.fill_(torch.nan) if x.is_floating_point() else held
        held[places] = torch.where(there(shape, case.seen)[..., None], x, held[places])
        given.append(held if case.placed else held[:rows])
    slow = WindowMemory(shape, held=[x.clone() for x in clean], lengths=seen)
    windows = Windows(torch.tensor(case.sizes, device=DEVICE), case.sinks)
    fast = WindowMemory(shape, held=[x.clone() for x in given], lengths=seen)
    fast.places = places if case.placed else None
    answers = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        block = 16 if DEVICE == "cuda" else 4
        form = window_step.FORMS[case.nbits]._replace(lanes=case.lanes, block=block, chunk=case.chunk)
        patch.setitem(window_step.FORMS, case.nbits, form)
        patch.setattr(window_step, "AT_ONCE", case.at_once)
        patch.setattr("t2r.attention.memories.window.steps_at_once", lambda *given: False)
        (expected,), gone = slow.attend(q, k, v, windows, None, how, leaves=True)
        for repeat in range(REPEATS):
            for own, x in zip(fast.held, given, strict=True):
                own.copy_(x)
            answers.append(fast.step_at_once(q, k, v, how))
            if DEVICE == "cpu" and repeat == 0:
                in_any_order(patch, order)
    (found, left), *others = answers
    near = {"rtol": 1e-5, "atol": 1e-5} if case.dtype == torch.float32 else {"rtol": 4e-2, "atol": 4e-2}
    last_bit = 2.0**-7 if case.nbits == 8 and case.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(found.numerator, expected.numerator, **near)
    torch.testing.assert_close(found.peak, expected.peak, **near)
    assert torch.equal(left.valid, gone.valid)
    for own, other in ((left.k, gone.k), (left.v, gone.v)):
        torch.testing.assert_close(own[left.valid], other[gone.valid], rtol=last_bit, atol=0)
    after = there(shape, [count + 1 for count in case.seen])
    for own, x, other in zip(fast.held, given, slow.held, strict=True):
        assert torch.equal(own[places][after], other[after])
        own[places] = torch.where(after[..., None], x[places], own[places])
        torch.testing.assert_close(own, x, rtol=0, atol=0, equal_nan=True)  # nothing else was written
    for again, also in others:
        assert torch.equal(again.numerator, found.numerator)
        assert torch.equal(again.peak, found.peak)
        assert torch.equal(also.k[left.valid], left.k[left.valid])
    assert fast.arrived is not None or max(case.sizes) + case.sinks <= case.chunk
    assert fast.arrived is None or not fast.arrived.any()


@pytest.mark.parametrize("case", CASES_DIVIDED)
def test_a_step_of_divided_windows(case):
    check_divided(CASES_DIVIDED[case])


@st.composite
def divided_cases(draw):
    sizes = draw(st.lists(st.integers(0, 24), min_size=1, max_size=3).filter(any))
    seen = draw(st.lists(st.one_of(st.integers(0, 30), st.integers(31, 90)), min_size=1, max_size=2))
    return Divided(
        tuple(sizes),
        tuple(seen),
        sinks=draw(st.integers(0, 4)),
        group=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([8, 16])),
        value=draw(st.sampled_from([8, 24])),
        nbits=draw(st.sampled_from([16, 8])),
        lanes=draw(st.booleans()),
        chunk=draw(st.sampled_from([4, 8, 12])),
        placed=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        at_once=draw(st.sampled_from([16, 8192])),
    )


@settings(max_examples=15)
@given_some(case=divided_cases(), seed=st.integers(0, 2**31))
@pytest.mark.slow
def test_any_step_of_divided_windows(case, seed):
    check_divided(case, seed)


@given_some(
    windows=st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    sinks=st.integers(0, 5),
    chunk=st.sampled_from([64, 256, 512]),
)
def test_each_part_of_a_ring_has_something_to_do(windows, sinks, chunk):
    """As the kernel divides rings whose length is not a multiple of its block."""
    from t2r.ops.triton.window_step import MOST_PARTS, Split, divided

    slots = [size + sinks if size else 0 for size in windows]
    split = divided(tuple(windows), sinks, chunk)
    if split is None:
        assert max(slots) <= chunk
        return
    counts = [max(1, -(-own // split.chunk)) for own in slots]
    assert split == Split(split.chunk, sum(counts), max(counts))
    assert chunk <= split.chunk
    assert 1 < split.most <= MOST_PARTS
    assert split.chunk == chunk or split.most > MOST_PARTS // 2
    for own, parts in zip(slots, counts, strict=True):
        share = max(1, math.ceil(math.ceil(own / parts) / 64)) * 64
        assert share <= split.chunk
        assert (parts - 1) * share < max(own, 1) <= parts * share


def test_windows_are_divided_only_where_there_are_few_programs(monkeypatch):
    from t2r.ops.triton import window_step

    windows = (2448, 512, 128)
    assert all(window_step.split_of(windows, 4, 1, 9, nbits) is None for nbits in (8, 16))  # by default
    monkeypatch.setitem(window_step.FORMS, 16, window_step.Form(False, 64, 4, 3, 256))
    assert window_step.split_of(windows, 4, 16, 9, 16) == (256, 10 + 3 + 1, 10)
    assert window_step.split_of((200, 128, 0), 4, 16, 9, 16) is None
    assert window_step.split_of(windows, 4, 86, 9, 16) is None
    monkeypatch.setitem(window_step.FORMS, 8, window_step.Form(True, 128, 8, 3, 256))
    assert window_step.split_of(windows, 4, 28, 9, 8) == (256, 10 + 3 + 1, 10)
    assert window_step.split_of(windows, 4, 29, 9, 8) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs require a GPU")
def test_a_captured_step_divides_windows_each_time(monkeypatch):
    """Counts of programs are zeros again after each replay, whatever the number of tokens."""
    from t2r.graphs import CudaGraph
    from t2r.ops.triton import window_step

    monkeypatch.setitem(window_step.FORMS, 16, window_step.Form(False, 64, 4, 3, 64))
    shape, rows, group, dim = Shape((500, 130, 40), 4), 3, 3, 64
    q, k, v = (
        torch.randn(rows, n, 1, dim, device=DEVICE, dtype=torch.bfloat16) for n in (len(shape.sizes) * group, 3, 3)
    )
    seen = torch.tensor([0, 60, 900], device=DEVICE)
    captured, eager = (memory_of(shape, rows, dim, dim, torch.bfloat16, seen) for _ in range(2))
    with torch.no_grad():
        graph = CudaGraph(lambda: captured.step_at_once(q, k, v, How(0.1)), torch.device(DEVICE, 0))
        for x, other in zip(captured.held, eager.held, strict=True):
            other.copy_(x)
        for step in range(150):
            for x in (q, k, v):
                x.normal_()
            found, left = graph()
            expected, gone = eager.step_at_once(q, k, v, How(0.1))
            assert torch.equal(found.numerator, expected.numerator), step
            assert torch.equal(found.peak, expected.peak), step
            assert torch.equal(left.valid, gone.valid), step
            captured.lengths.add_(1)
            eager.lengths.add_(1)
    assert not captured.arrived.any()
    assert not eager.arrived.any()
    for x, other in zip(captured.held, eager.held, strict=True):
        assert torch.equal(x, other)
