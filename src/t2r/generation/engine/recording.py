"""Recording and replay of tensor operations on a CPU, like a CUDA graph on a GPU.

On a CPU, most of the time of a decoding step with one token is Python and view overhead. A recording contains only the
tensor operations. Intermediate results keep their memory, so views need no replay. Operations that depend only on
weights, and operations whose results are not used, are omitted.

The function must read its inputs from the same tensors in each call and update its state in place. Its control flow
must not depend on tensor values. Weights must not change between recording and replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from t2r.threads import Tuner, fixed_by_user, own_threads, set_own_threads

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
"""Operations whose results depend only on the shape of their input."""
DIRECT = {
    "add", "addcmul", "addmm", "argmax", "baddbmm", "bitwise_not", "bmm", "cat", "clamp", "clamp_min", "div", "exp",
    "gather", "ge", "gt", "index_select", "le", "lt", "matmul", "mean", "mm", "mul", "neg", "pow", "rsqrt", "sigmoid",
    "softmax", "sqrt", "sub", "sum", "tanh", "where",
}  # fmt: skip
"""Operations available in `torch` under the same name with `out`, which takes a third of the time of an overload."""
COPIES = {"clone", "contiguous", "flatten", "reshape", "to", "_to_copy"}
"""Operations that copy their input, if their result is not a view."""
SERIAL = 1 << 15
"""Operations on tensors of at most this many numbers run in one thread, as in PyTorch's elementwise operations."""
TRIAL = 0.5
"""Seconds of a trial with one number of threads. If a replay takes longer, two replays are a trial."""
BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations whose result is a number of Python, or has a shape that depends on values."""
TO_PYTHON = {
    Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
}  # fmt: skip
"""Methods that read the memory of a tensor on a CPU without an operation."""
FROM_PYTHON = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
"""Functions that make a tensor of numbers of Python, and read the values of tensors among them."""


class CannotRecord(Exception):
    """Raised if the function reads the value of a tensor or uses random numbers."""


class Operation(NamedTuple):
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    reads: frozenset[int]
    """Identifiers of the storages of its inputs."""
    writes: frozenset[int]
    """Identifiers of the storages that it writes."""


class NoLists(TorchFunctionMode):
    """Raises `CannotRecord` if a method of a tensor gives its values to Python without an operation."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_address_on_a_device(function, args):
            return function(*args, **(kwargs or {}))
        if function in TO_PYTHON or (function in FROM_PYTHON and reads_tensors(function, args, kwargs)):
            raise CannotRecord(f"{function.__name__} reads the values of a tensor")
        return function(*args, **(kwargs or {}))


class NoValues(TorchDispatchMode):
    """Raises `CannotRecord` if the values of a tensor are read, as recordings and CUDA graphs cannot do."""

    def __enter__(self) -> Any:
        self.lists = NoLists()
        self.lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.lists.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reads_values(function, args, kwargs or {}):
            raise CannotRecord(f"{function._schema.name} reads the value of a tensor")
        return function(*args, **(kwargs or {}))


def is_address_on_a_device(function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether this is the address of a tensor that Python cannot read: launching a kernel requires it."""
    return function is Tensor.data_ptr and args[0].device.type != "cpu"


def reads_tensors(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Return whether a function of `FROM_PYTHON` is given tensors. A tensor alone may be returned as it is."""
    data = args[1:] if function is Tensor.new_tensor else args
    if function in (torch.as_tensor, torch.asarray) and data and isinstance(data[0], Tensor):
        return False
    return any(isinstance(x, Tensor) for x in tree_leaves((data, kwargs or {})))


def reads_values(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation gives values of a tensor to Python, or has a result whose shape depends on them."""
    match function._schema.name:
        case "aten::index":  # a mask selects as many values as it has
            return any(x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1]) if isinstance(x, Tensor))
        case "aten::repeat_interleave":
            counts = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
            return isinstance(counts, Tensor) and kwargs.get("output_size") is None
        case "aten::where":
            return len(args) + len(kwargs) == 1
        case "aten::is_nonzero":  # without a tag
            return True
    return not BY_VALUE.isdisjoint(function.tags)


class Tape(NoValues):
    """Records every operation, and keeps every tensor alive, so that no memory is reused."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.held: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, function._schema
        # Only around operations that may draw: other threads may do so at any time.
        draws = torch.get_rng_state() if torch.Tag.nondeterministic_seeded in function.tags else None
        out = super().__torch_dispatch__(function, types, args, kwargs)
        if draws is not None and not torch.equal(draws, torch.get_rng_state()):
            raise CannotRecord("it uses random numbers")
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
            if writes and writes <= reads:  # a view, which stays valid
                return out
        self.operations.append(Operation(function, args, kwargs, results, reads, writes))
        return out


class Recording:
    """A recorded function. Calling it replays the function.

    Args:
        function: a function without arguments and return value, which reads `inputs` and modifies `outputs`.
        inputs: tensors that the caller modifies between replays.
        outputs: tensors that the caller reads between replays.
        tuned: whether large operations use the number of threads with which a replay is fastest, at most that of torch.
            The replays themselves are timed. A number that is set by the environment is used as it is.

    Raises CannotRecord if the function cannot be recorded.
    """

    def __init__(
        self,
        function: Callable[[], None],
        inputs: Iterable[Tensor],
        outputs: Iterable[Tensor],
        tuned: bool = False,
    ) -> None:
        tape = Tape()
        with tape:
            function()
        self.held = tape.held
        live = needed(tape.operations, inputs, outputs)
        self.calls = [call(operation) for operation in live]
        self.large = [is_large(operation) for operation in live]
        self.plans: dict[int, list[Callable[[], Any]]] = {1: self.calls}
        self.tuned = tuned and any(self.large) and not fixed_by_user()
        self.tuners: dict[int, Tuner] = {}
        """By the number of threads of torch."""

    def threads(self, most: int) -> int:
        """Return the number of threads of the next replay, if that of torch is `most`."""
        if most == 1 or not self.tuned:
            return most
        if most not in self.tuners:
            self.tuners[most] = Tuner(most, TRIAL)
            self.tuners[most].try_all()
        return self.tuners[most].count

    def __call__(self) -> None:
        most = torch.get_num_threads()
        threads = self.threads(most)
        if threads not in self.plans:
            self.plans[threads] = with_threads(self.calls, self.large, threads)
        began = time.perf_counter()
        if most == 1:
            for run in self.calls:
                run()
            return
        with own_threads(threads):
            for run in self.plans[threads]:
                run()
        if most in self.tuners:
            self.tuners[most].add(time.perf_counter() - began)


def with_threads(calls: list[Callable[[], Any]], large: list[bool], threads: int) -> list[Callable[[], Any]]:
    """Return the calls, with small operations in one thread and large ones in all.

    Some small operations, such as softmax, start all threads. Waiting for them takes longer than the operation, up to a
    millisecond if the cores are busy. Changing the number of threads takes less than a microsecond."""
    plan: list[Callable[[], Any]] = []
    now = threads
    for run, is_many in zip(calls, large, strict=True):
        wanted = threads if is_many else 1
        if wanted != now:
            plan.append(partial(set_own_threads, wanted))
            now = wanted
        plan.append(run)
    return plan


def is_large(operation: Operation) -> bool:
    """Return whether several threads can be of use, from the size of the largest tensor."""
    given = [x for x in tree_leaves((operation.args, operation.kwargs)) if isinstance(x, Tensor)]
    return max((x.numel() for x in (*given, *operation.results)), default=0) > SERIAL


def memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def needed(operations: list[Operation], inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> list[Operation]:
    """Return the operations to replay: those that depend on changing tensors and on which an output depends."""
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
    """Return a function that repeats an operation, writing to the memory of its results."""
    function, args, kwargs, results = operation[:4]
    name = function._schema.name.removeprefix("aten::")
    if function._schema.is_mutable:
        method = getattr(Tensor, name, None) if name.endswith("_") else None
        if name in DIRECT and "out" in kwargs:
            method = getattr(torch, name)
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
    """Return a linear layer as one matrix product, or None if its input is not contiguous."""
    if not (x.is_contiguous() and out.is_contiguous()):
        return None
    x, out = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        return partial(torch.mm, x, weight.t(), out=out)
    return partial(torch.addmm, bias, x, weight.t(), out=out)


def out_variant(function: Any) -> Any:
    """Return the overload of an operation that writes to given tensors, or None if there is none."""
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
