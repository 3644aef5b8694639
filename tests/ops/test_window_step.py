"""A step of windows in ring buffers, and of the states beside them, by one kernel, compared with PyTorch."""

from __future__ import annotations

import random
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given as given_some
from hypothesis import settings
from hypothesis import strategies as st

from t2r.attention.memories import Shape, WindowMemory
from t2r.feature_maps import make_feature_map
from t2r.ops import Draws, Far, Slots, State, Windows, combine, registry
from t2r.ops.rings import How
from t2r.ops.rounding import rounded
from t2r.ops.stored import stored

MISSING = registry.BACKENDS["triton"].missing()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = 30 if DEVICE == "cuda" else 2
"""Steps from the same buffers, which must agree to the last bit. On a GPU, programs arrive in any order."""
LARGER = 8 if DEVICE == "cuda" else 1
"""Blocks on a GPU are larger, and so are windows."""
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


class Case(NamedTuple):
    """One step of the windows of a layer."""

    sizes: tuple[int, ...]
    seen: tuple[int, ...]
    sinks: int = 1
    group: int = 2
    dim: int = 16
    value: int = 24
    nbits: int = 16
    block: int = 4
    placed: bool = False
    rotated: bool = False
    stateful: tuple[int, ...] | None = None
    """The heads that have a state. None: no head."""
    features: int = 5
    activation: str = "softmax"
    weighted: bool = True
    """Keys and queries of states have weights."""
    decay: bool = True
    half: bool = False
    """States are in bfloat16, rounded at random."""
    new: bool = False
    """The states of the first row begin with this token: possible only where states have places."""
    together: int = 8192
    """Numbers that are joined at a time."""
    dtype: torch.dtype = torch.float32


CASES = {
    "windows that differ": Case((10, 3, 5), (35, 4), sinks=4, group=3, dim=40, value=40),
    "a head without a window, query heads one by one": Case((13, 0, 3), (35, 4), group=3, together=16),
    "half precision": Case((20,), (70, 0, 9), dim=16, value=16, dtype=torch.bfloat16),
    "8 bits": Case((13, 5), (10, 19), sinks=0, nbits=8, placed=True),
    "8 bits, half precision, one query head": Case((9, 2), (40,), group=1, nbits=8, dtype=torch.bfloat16),
    "windows and states": Case((6, 0, 3), (35, 2), group=3, stateful=(0, 1, 2), rotated=True),
    "states of some heads": Case((6, 9, 3), (35, 2, 0), group=2, stateful=(2, 0), activation="relu", rotated=True),
    "states among those of others": Case((5, 0), (9, 3), stateful=(0, 1), nbits=8, placed=True, new=True, half=True),
    "sums without weights": Case((3, 4), (12,), 1, 1, stateful=(1,), weighted=False, decay=False, dtype=torch.bfloat16),
}  # fmt: skip


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
    for (first, size), row in product(zip(shape.firsts, shape.sizes, strict=True), range(len(counts))):
        if size:
            slots[row, first : first + min(counts[row], size + shape.sinks)] = True
    return slots


class Beyond(NamedTuple):
    """The states of a case, and their map."""

    map: torch.nn.Module
    state: State
    heads: tuple[int, ...]
    total: int

    @classmethod
    def of(cls, case, generator):
        heads = tuple(sorted(case.stateful))
        options = {"activation": case.activation, "init": "paper", "decay": case.decay}
        options |= {"key_weights": case.weighted, "query_weights": case.weighted, "shared": False, "grouped": True}
        made = make_feature_map(
            "t2r", head_dim=case.dim, feature_size=case.features, num_heads=len(heads) * case.group,
            num_key_value_heads=len(heads), **options,
        )  # fmt: skip
        for parameter in made.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        shape = (len(case.seen), len(heads), case.features)
        s = torch.randn(*shape, case.value, generator=generator).to(DEVICE)
        z = torch.rand(*shape, generator=generator).to(DEVICE) + 1
        empty = torch.tensor([n == 0 for n in case.seen], device=DEVICE)
        s, z = (x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0) for x in (s, z))
        s, z = (x.bfloat16() if case.half else x for x in (s, z))
        return cls(made.to(DEVICE, case.dtype).requires_grad_(False), State(s, z), heads, len(case.sizes))

    def kernel(self, state, slots, scaling, draws):
        numbers = [self.heads.index(h) if h in self.heads else -1 for h in range(self.total)]
        numbers = None if len(self.heads) == self.total else torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        rule = self.map.rule(None)
        return Far(state, self.map.step_features(scaling), rule.decay, numbers, slots, draws)

    def reference(self, q, left, scaling):
        """Return the sums of all heads, and the state after the token."""
        own = [x[:, self.of_heads(x)] for x in (q, *left)]
        phi_q, phi_k = self.map(own[0] * scaling, own[1])
        phi_k = phi_k.masked_fill(~own[3][..., None], 0)
        fades = self.map.rule(None)
        state = self.state.map(torch.Tensor.float)
        if fades.decay is not None:  # only where a token leaves
            left_over = torch.exp(-fades.decay.clamp(0, 1))[None].expand(*state.z.shape)
            state = state.faded(torch.where(own[3], left_over, 1.0))
        sums, state = fades._replace(decay=None).step(phi_q, phi_k, own[2], state, normalized=False)
        sums = sums._replace(peak=self.map.query_logs(own[0] * scaling))
        every = [
            torch.zeros(q.shape[0], q.shape[1], *x.shape[2:], device=DEVICE) for x in (sums.numerator, sums.denominator)
        ]
        every.append(torch.zeros_like(every[1]))
        for x, part in zip(every, (sums.numerator, sums.denominator, sums.peak), strict=True):
            x[:, self.of_heads(q)] = torch.zeros_like(x[:, self.of_heads(q)]) if part is None else part.float()
        return type(sums)(every[0], every[1], peak=every[2]), state

    def of_heads(self, x):
        group = x.shape[1] // self.total
        return [h * group + i for h in self.heads for i in range(group)]


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


def check(case, seed=0):
    """Compare a step with the rings and states in PyTorch, and with itself if programs run in another order."""
    from t2r.ops.triton import window_step

    case = case._replace(sizes=tuple(LARGER * n for n in case.sizes), seen=tuple(LARGER * n for n in case.seen))
    generator, order, scaling = torch.Generator().manual_seed(seed), random.Random(seed), 0.3
    shape, rows, heads = Shape(case.sizes, case.sinks, case.nbits), len(case.seen), len(case.sizes)
    seen, how = torch.tensor(case.seen, device=DEVICE), How(scaling)

    def numbers(*sizes):
        return torch.randn(*sizes, generator=generator).to(case.dtype).to(DEVICE)

    clean = stored(numbers(rows, shape.slots, case.dim), numbers(rows, shape.slots, case.value), case.nbits)
    q, k, v = (
        numbers(rows, heads * case.group, 1, case.dim),
        numbers(rows, heads, 1, case.dim),
        numbers(rows, heads, 1, case.value),
    )
    angle = torch.randn(rows, 1, case.dim // 2, generator=generator).repeat(1, 1, 2).to(DEVICE)
    rotation = (angle.cos().to(case.dtype), angle.sin().to(case.dtype)) if case.rotated else None
    far = None if case.stateful is None else Beyond.of(case, generator)
    places = torch.tensor(order.sample(range(rows + 2), rows), device=DEVICE) if case.placed else torch.arange(rows)
    places = places.to(DEVICE)

    def among(x, fill):
        """Return what is at the places of the rows, among other things."""
        if not case.placed:
            return x.clone()
        held = torch.full((rows + 2, *x.shape[1:]), fill, device=DEVICE).to(x.dtype)
        held[places] = x
        return held

    # What is not there yet must not be read, even if the step writes it.
    given = []
    for x in clean:
        nothing = torch.full_like(x, torch.nan if x.is_floating_point() else 77)
        given.append(among(torch.where(there(shape, case.seen)[..., None], x, nothing), 77))
    slow = WindowMemory(shape, held=[x.clone() for x in clean], lengths=seen)
    fast = WindowMemory(shape, held=[x.clone() for x in given], lengths=seen)
    fast.places = places if case.placed else None
    answers, slots, kept = [], None, None
    draws = Draws(seen, 3) if case.half else None
    if far is not None:
        kept = far.state.map(lambda x: among(x, torch.nan))
        if case.placed:
            fresh = torch.tensor([case.new and row == 0 for row in range(rows)], device=DEVICE)
            slots = Slots(places, fresh)
            if case.new:
                kept = kept.map(lambda x: x.index_fill(0, places[:1], torch.nan))
                far = far._replace(state=far.state.map(lambda x: x.index_fill(0, places.new_tensor([0]), 0)))
    own_q, own_k = (rotate(x, *rotation).to(case.dtype) if rotation else x for x in (q, k))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        block = max(16, 8 * case.block) if DEVICE == "cuda" else case.block
        patch.setitem(window_step.FORMS, case.nbits, window_step.FORMS[case.nbits]._replace(block=block))
        patch.setattr(window_step, "JOINED", case.together)
        patch.setattr("t2r.attention.memories.window.steps_at_once", lambda *given: False)
        windows = Windows(torch.tensor(case.sizes, device=DEVICE), case.sinks)
        (near,), gone = slow.attend(own_q, own_k, v, windows, None, how, leaves=True)
        expected, after = near, None
        if far is not None:
            beyond, after = far.reference(own_q, gone, scaling)
            after = after if draws is None else rounded(after, torch.bfloat16, draws)
            expected = near._replace(numerator=combine([near, beyond], torch.float32))
        for repeat in range(REPEATS):
            for own, x in zip(fast.held, given, strict=True):
                own.copy_(x)
            state = None if far is None else kept.map(torch.clone)
            of_kernel = None if far is None else far.kernel(state, slots, scaling, draws)
            sums, left = fast.step_at_once(q, k, v, how, leaves=True, far=of_kernel, rotation=rotation)
            answers.append((sums, left, state))
            if DEVICE == "cpu" and repeat == 0:
                in_any_order(patch, order)
    (found, left, state), *others = answers
    exact = case.dtype == torch.float32
    near_enough = {"rtol": 1e-4, "atol": 1e-5} if exact else {"rtol": 4e-2, "atol": 4e-2}
    torch.testing.assert_close(found.numerator.float(), expected.numerator.float(), **near_enough)
    if far is None:
        torch.testing.assert_close(found.peak, expected.peak, **near_enough)
    # Triton's interpreter cuts float32 to bfloat16 where a GPU rounds. Rotations are rounded twice.
    bit = 2.0**-7 if not exact and (case.nbits == 8 or case.rotated) else 1e-5 if case.rotated else 0
    assert torch.equal(left.valid, gone.valid)
    for own, other in ((left.k, gone.k), (left.v, gone.v)):
        torch.testing.assert_close(own[left.valid], other[gone.valid], rtol=bit, atol=bit)
    filled = there(shape, [count + 1 for count in case.seen])
    for own, x, other in zip(fast.held, given, slow.held, strict=True):
        if case.rotated and not own.is_floating_point():  # a number on the edge of two
            assert (own[places][filled].float() - other[filled].float()).abs().max() <= 1
        else:
            torch.testing.assert_close(own[places][filled], other[filled], rtol=bit, atol=bit)
        own[places] = torch.where(filled[..., None], x[places], own[places])
        torch.testing.assert_close(own, x, rtol=0, atol=0, equal_nan=True)  # nothing else was written
    if after is not None:
        for own, other, before in zip(state[:2], after[:2], kept[:2], strict=True):
            # The next number of bfloat16, or the one after if what leaves differs by a bit already.
            apart = near_enough | ({"rtol": 2.0**-6 if DEVICE == "cpu" and bit else 2.0**-7} if case.half else {})
            torch.testing.assert_close(own[places], other, **apart)
            own[places] = before[places]
            torch.testing.assert_close(own, before, rtol=0, atol=0, equal_nan=True)
    for again, also, _ in others:
        assert torch.equal(again.numerator, found.numerator)
        assert torch.equal(again.peak, found.peak)
        assert torch.equal(also.k[left.valid], left.k[left.valid])
    assert not fast.arrived.any()


@pytest.mark.parametrize("name", CASES)
def test_a_step(name):
    check(CASES[name])


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(0, 24), min_size=1, max_size=3).filter(any))
    seen = draw(st.lists(st.one_of(st.integers(0, 30), st.integers(31, 90)), min_size=1, max_size=2))
    stateful = draw(st.one_of(st.none(), st.sets(st.integers(0, len(sizes) - 1), min_size=1).map(tuple)))
    return Case(
        tuple(sizes),
        tuple(seen),
        sinks=draw(st.integers(0, 4)),
        group=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([8, 16])),
        value=draw(st.sampled_from([8, 24])),
        nbits=draw(st.sampled_from([16, 8])),
        block=draw(st.sampled_from([4, 8])),
        placed=draw(st.booleans()),
        rotated=draw(st.booleans()),
        stateful=stateful,
        features=draw(st.integers(1, 9)),
        activation=draw(st.sampled_from(["softmax", "relu"])),
        weighted=draw(st.booleans()),
        decay=draw(st.booleans()),
        half=stateful is not None and draw(st.booleans()),
        together=draw(st.sampled_from([16, 8192])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
    )


@settings(max_examples=15)
@given_some(case=cases(), seed=st.integers(0, 2**31))
@pytest.mark.slow
def test_any_step(case, seed):
    check(case, seed)


@pytest.mark.slow
def test_a_sequence_of_steps():
    """One row fills its rings and begins again, while the other goes through all of its second round."""
    for case in ("windows that differ", "8 bits"):
        for count in range(0, 2 * max(CASES[case].sizes) + 3):
            check(CASES[case]._replace(seen=(count, count + 7)))


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs require a GPU")
def test_a_captured_step_divides_windows_each_time():
    """Counts of programs are zeros again after each replay, whatever the number of tokens."""
    from t2r.graphs import CudaGraph

    shape, rows, group, dim = Shape((500, 130, 40), 4), 3, 3, 64
    token = [torch.zeros(rows, 1, 1, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    q, k, v = (torch.randn(rows, n, 1, dim, device=DEVICE, dtype=torch.bfloat16) for n in (3 * group, 3, 3))
    seen = torch.tensor([0, 60, 900], device=DEVICE)
    captured, eager = (WindowMemory(shape, held=shape.empty(*token), lengths=seen.clone()) for _ in range(2))
    with torch.no_grad():
        graph = CudaGraph(lambda: captured.step_at_once(q, k, v, How(0.1), leaves=True), torch.device(DEVICE, 0))
        for x, other in zip(captured.held, eager.held, strict=True):
            other.copy_(x)
        for step in range(150):
            for x in (q, k, v):
                x.normal_()
            found, left = graph()
            expected, gone = eager.step_at_once(q, k, v, How(0.1), leaves=True)
            assert torch.equal(found.numerator, expected.numerator), step
            assert torch.equal(found.peak, expected.peak), step
            assert torch.equal(left.valid, gone.valid), step
            captured.lengths.add_(1)
            eager.lengths.add_(1)
    assert not captured.arrived.any()
    assert not eager.arrived.any()
    for x, other in zip(captured.held, eager.held, strict=True):
        assert torch.equal(x, other)
