"""A function of tensors at fixed addresses, recorded once and replayed: what a CUDA graph is, for a CPU.

With one token a step, most of a decoding step on a CPU is Python and the bookkeeping of views. A recording holds the
tensor operations alone. Every intermediate result keeps its memory, so that views need no replay; what depends on
weights alone is not computed again; and what nobody reads is left out.

The function must read its inputs from tensors that it finds at the same place each time, update its state in place, and
decide nothing by a tensor's value. Weights must not change between recording and replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

VALUE_FREE = {
    "aten::ones_like",
    "aten::zeros_like",
    "aten::full_like",
    "aten::empty_like",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::new_empty",
}
"""Operations whose results depend on the shape of their input only."""
DIRECT = {
    "add", "addmm", "argmax", "baddbmm", "bitwise_not", "bmm", "cat", "clamp", "clamp_min", "div", "exp", "gather",
    "ge", "gt", "index_select", "le", "lt", "matmul", "mean", "mm", "mul", "neg", "pow", "rsqrt", "sigmoid", "softmax",
    "sqrt", "sub", "sum", "tanh", "where",
}  # fmt: skip
"""Operations that `torch` has under the same name, with `out`: a call of those takes a third of an overload's time."""
COPIES = {"clone", "contiguous", "flatten", "reshape", "to", "_to_copy"}
"""Operations that move their input, if their result is not a view of it."""
READS_VALUES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::item")


class CannotRecord(Exception):
    """The function decides something by a tensor's value, or draws at random."""


class Operation(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    reads: frozenset[int]
    """The memory of its inputs, as numbers."""
    writes: frozenset[int]
    """The memory that it fills or changes."""


class NoValues(TorchDispatchMode):
    """Raises `CannotRecord` where a tensor's value would decide something: neither a recording nor a CUDA graph can."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in READS_VALUES:
            raise CannotRecord(f"{function._schema.name} looks at a tensor's value")
        return function(*args, **(kwargs or {}))


class Tape(NoValues):
    """Notes every operation, and holds on to every tensor, so that no memory is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.held: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, function._schema
        out = super().__torch_dispatch__(function, types, args, kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.held += results
        reads = frozenset(map(memory, given))
        if schema.is_mutable:
            values = [*args, *(kwargs.get(a.name) for a in schema.arguments[len(args) :])]
            changed = [v for a, v in zip(schema.arguments, values, strict=True) if a.is_write and v is not None]
            writes = frozenset(memory(x) for x in tree_leaves(changed) if isinstance(x, Tensor))
        else:
            writes = frozenset(map(memory, results))
            if writes and writes <= reads:  # a view: it stays valid
                return out
        self.operations.append(Operation(function, args, kwargs, results, reads, writes))
        return out


class Recording:
    """A recorded function: call it to run it again.

    Args:
        function: takes nothing, and returns nothing: it reads `inputs` and changes `outputs`.
        inputs: tensors that are changed between replays.
        outputs: tensors that are read between replays.
    """

    def __init__(self, function: Callable[[], None], inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        tape, draws = Tape(), torch.get_rng_state()
        with tape:
            function()
        if not torch.equal(draws, torch.get_rng_state()):
            raise CannotRecord("it draws at random")
        self.held = tape.held
        live = needed(tape.operations, inputs, outputs)
        self.calls = [call(operation) for operation in live]

    def __call__(self) -> None:
        for run in self.calls:
            run()


def memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def needed(operations: list[Operation], inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> list[Operation]:
    """The operations to run again: those that depend on what changes, and that something depends on."""
    changes = set(map(memory, inputs))
    for operation in operations:
        if operation.function._schema.is_mutable:
            changes |= operation.writes
    varying = []
    for operation in operations:
        depends = operation.function._schema.name not in VALUE_FREE and bool(operation.reads & changes)
        if depends or operation.writes & changes:
            changes |= operation.writes
            varying.append(operation)
    wanted, live = set(map(memory, outputs)), []
    for operation in reversed(varying):
        if operation.writes & wanted:
            wanted |= operation.reads
            live.append(operation)
    return live[::-1]


def call(operation: Operation) -> Callable[[], Any]:
    """Run an operation again, into the memory of its results."""
    function, args, kwargs, results = operation[:4]
    name = function._schema.name.removeprefix("aten::")
    if function._schema.is_mutable:
        method = getattr(Tensor, name, None) if name.endswith("_") else None
        return partial(function if method is None else method, *args, **kwargs)
    if name == "linear" and (product := linear(results[0], *args, **kwargs)) is not None:
        return product
    if name in COPIES and (move := copy_into(results[0], args[0])) is not None:
        return move
    into = out_variant(function)
    if into is not None and name in DIRECT:
        return partial(getattr(torch, name), *args, **kwargs, out=results[0])
    if into is None:

        def copied() -> None:
            again = [x for x in tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)]
            for own, new in zip(results, again, strict=True):
                own.copy_(new)

        return copied
    names = [a.name for a in into._schema.arguments if a.is_out]
    return partial(into, *args, **kwargs, **dict(zip(names, results, strict=True)))


def copy_into(out: Tensor, x: Tensor) -> Callable[[], Any] | None:
    if out.shape == x.shape:
        return partial(out.copy_, x)
    return partial(out.view(x.shape).copy_, x) if out.is_contiguous() else None


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Callable[[], Any] | None:
    """A linear layer as one product of matrices; None: its input is not one."""
    if not (x.is_contiguous() and out.is_contiguous()):
        return None
    x, out = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        return partial(torch.mm, x, weight.t(), out=out)
    return partial(torch.addmm, bias, x, weight.t(), out=out)


def out_variant(function: Any) -> Any:
    """The overload of an operation that writes to given tensors; None: it has none."""
    own = [(a.name, str(a.type)) for a in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        other = getattr(function.overloadpacket, name)
        arguments = other._schema.arguments
        outs = [a for a in arguments if a.is_out]
        if len(outs) == len(function._schema.returns) > 0 and own == [
            (a.name, str(a.type)) for a in arguments if not a.is_out
        ]:
            return other
    return None
