"""The parts of t2r-vllm that need no vLLM: who has which heads, pages, and the states in them."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import BartConfig, LlamaConfig

import t2r
from t2r.attention.memories import Shape, WindowMemory
from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.ops import Slots, State, Sum, Windows, combine
from t2r.ops.rings import How

pytest.importorskip("t2r_vllm", reason="the source distribution has no plugins")
import t2r_vllm
from t2r_vllm.layout import Heads, Layout, layer_types, sites
from t2r_vllm.memories import PagedState, PagedWindow

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm"
PLAN = {
    "windows": [[8, 8], [0, 16], [0, 0], [8, 24]],
    "states": [[False, False], [True, True], [True, True], [True, False]],
    "sinks": 0,
}


def config(**options: object) -> T2RConfig:
    base = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, vocab_size=64)
    return T2RConfig(base_config=base, **options)


def test_versions_agree():
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [f"t2r=={t2r.__version__}"]
    source = (PLUGIN / "src" / "t2r_vllm" / "__init__.py").read_text()
    assert re.search(r'__version__ = "(.+)"', source)[1] == project["version"]
    tested = re.search(r"VERSIONS = \((.+)\)", source)[1]
    assert all(line.split("==")[1] in tested for extra in project["optional-dependencies"].values() for line in extra)


def stand_in(monkeypatch, name, **members):
    """Put a module without anything else in the place of one of vLLM."""
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_another_version_is_refused_before_its_names_are_looked_up(monkeypatch):
    stand_in(monkeypatch, "vllm", __version__="0.9.1+cpu")
    with pytest.raises(T2RError, match=r"tested with vLLM .* only, and 0\.9\.1 is installed"):
        t2r_vllm.register()


def test_a_model_that_is_not_served_is_refused_for_what_it_is(monkeypatch):
    """Also if its plan has the layers of the decoder, of which the encoder has more."""
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.models"):
        stand_in(monkeypatch, name)
    stand_in(monkeypatch, "vllm.model_executor.models.config", VerifyAndUpdateConfig=object)
    monkeypatch.delitem(sys.modules, "t2r_vllm.configuration", raising=False)
    configuration = importlib.import_module("t2r_vllm.configuration")
    monkeypatch.delitem(sys.modules, "t2r_vllm.configuration")  # the next one gets its own, not one of stand-ins
    base = BartConfig(d_model=32, encoder_layers=3, decoder_layers=1, encoder_attention_heads=2, vocab_size=64)
    given = configuration.ServedConfig(base_config=base, plan={"windows": [[8, 8]]})
    assert getattr(given, "layer_types", None) is None  # vLLM reads them first
    with pytest.raises(T2RError, match="it is an encoder-decoder; use `t2r serve`"):
        configuration.refuse_model(given)


def test_types_of_layers():
    assert layer_types(config(softmax_every=2)) == ["linear_attention", "full_attention"] * 2
    kinds = ["sliding_attention", *["linear_attention"] * 3]
    assert layer_types(config(plan=PLAN)) == kinds
    for own in ({"sinks": 2}, {"nbits": 8}):  # vLLM's windows have neither
        assert layer_types(config(plan=PLAN | own)) == ["linear_attention"] * 4


def test_two_processes_have_parts_of_a_plan():
    first, second = (sites(config(plan=PLAN), 2, rank) for rank in (0, 1))
    assert (
        [site.sliding for site in first.values()] == [site.sliding for site in second.values()] == [8, None, None, None]
    )
    assert first[1].window is None  # of its heads
    assert second[1].window.sizes == (16,)
    assert all(site.beside for site in (first[1], second[1]))  # the maps of both have weights of queries
    assert (first[3].states, second[3].states) == ((0,), ())
    assert (first[1].share, second[1].share) == ((0, 2), (1, 2))
    for rank in (0, 1):  # each process has a map of the heads that are its own
        made = sites(config(), 2, rank)[0].make_map(config())
        assert (made.num_heads, made.key_heads) == (2, 1)


def test_heads_that_cannot_be_divided():
    assert Heads.of(config(), 4, 3).keys == 1  # two processes have the same key head
    with pytest.raises(T2RError, match="cannot be divided among 3 processes"):
        Heads.of(config(), 3)
    with pytest.raises(T2RError, match="2 key heads cannot be divided among 4"):
        Heads.of(config(plan=PLAN), 4)


@pytest.mark.parametrize("heads", [{"num_key_value_heads": 3}, {"num_key_value_heads": -2}, {"head_dim": -8}])
def test_heads_that_are_none(heads):
    given = config()
    for name, value in heads.items():
        setattr(given.base_config, name, value)
    with pytest.raises(T2RError, match=r"config\.json is damaged"):
        sites(given)


def test_a_map_with_negative_features_beside_windows():
    with pytest.raises(T2RError, match="'rfa' has negative features"):
        Layout.of(config(plan=PLAN, feature_map="rfa"), 1, torch.float32)


def test_keys_are_rounded_whoever_has_the_windows():
    k, v = torch.rand(2, 2, 1, 3, 8)
    expected = Shape((8,), 0, 8).rounded(k, v)
    assert not torch.equal(expected[0], k)
    layers = {
        number: [sites(config(plan=PLAN | {"nbits": 8}), 2, rank)[number] for rank in (0, 1)] for number in (1, 2)
    }
    assert all(map(torch.equal, layers[1][0].rounded(k, v), expected))  # its windows are those of the other process
    for site in (layers[1][1], *layers[2]):  # has windows, which round them; a layer without any
        assert all(map(torch.equal, site.rounded(k, v), (k, v)))


@pytest.mark.parametrize("nbits", [8, 16])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_page_has_room_for_every_layer_and_process(processes, nbits):
    given = config(plan=PLAN | {"nbits": nbits}, feature_size=12)
    layout = Layout.of(given, processes, torch.bfloat16)
    room = {part.name: part.shape for part in layout.parts}
    assert room["keys"] == room["values"] == (32 if processes == 1 else 24, 8)
    assert room["s"] == (3 - processes, 12, 8)
    pages = torch.zeros(3, *layout.shapes[0])
    parts = layout.split(pages)
    for number, x in enumerate(parts.values()):
        assert x.data_ptr() % 16 == pages.data_ptr() % 16
        x.fill_(number + 1)
    for number, x in enumerate(parts.values()):  # none is on top of another
        assert bool((x == number + 1).all())
    window = {"keys": torch.bfloat16, "values": torch.bfloat16}
    if nbits == 8:
        window = {"keys": torch.int8, "values": torch.int8, "scales": torch.float16}
    assert {name: x.dtype for name, x in parts.items()} == {"s": torch.float32, "z": torch.float32} | window


@torch.no_grad()
def test_states_in_pages_continue():
    """A prompt in two pieces and a token, for rows that lie anywhere, on pages with the numbers of other sequences."""
    rule = Sum(2, 4)
    q, k, v = (torch.rand(2, heads, 6, size) for heads, size in ((4, 4), (2, 4), (2, 3)))
    expected, after = rule.parallel(q, k, v)
    pages = State(torch.full((5, 2, 4, 3), torch.nan), torch.full((5, 2, 4), torch.nan))
    found, seen = [], 0
    for time in (3, 2, 1):
        slots = Slots(torch.tensor([3, 1]), torch.tensor([not seen] * 2))
        rows = (x[:, :, seen : seen + time] for x in (q, k, v))
        found.append(PagedState(pages, slots).advance(*rows, rule))
        seen += time
    torch.testing.assert_close(torch.cat(found, 2), expected)
    torch.testing.assert_close(pages.s[[3, 1]], after.s)
    assert pages.s[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize("nbits", [8, 16])
@torch.no_grad()
def test_windows_in_pages_continue(nbits):
    """The same for windows, compared with a memory that has read the same tokens."""
    shape, how = Shape((2, 4), 1, nbits), How(0.5)
    windows = Windows(torch.tensor(shape.sizes), shape.sinks)
    q, k, v = (torch.rand(2, heads, 9, 4) for heads in (4, 2, 2))
    token = torch.zeros(5, 2, 1, 4)
    before = tuple(x.fill_(torch.nan if x.is_floating_point() else 77) for x in shape.empty(token, token))
    pages = tuple(x.clone() for x in before)
    own, seen = WindowMemory(shape), 0
    for time in (5, 3, 1):
        slots = Slots(torch.tensor([3, 1]), torch.tensor([not seen] * 2))
        paged = PagedWindow(shape, pages, None, slots, torch.full((2,), seen))
        rows = [x[:, :, seen : seen + time] for x in (q, k, v)]
        (found, left), (expected, gone) = (m.attend(*rows, windows, None, how, leaves=True) for m in (paged, own))
        torch.testing.assert_close(combine(found, v.dtype), combine(expected, v.dtype))
        assert torch.equal(left.valid, gone.valid)
        torch.testing.assert_close(left.k[left.valid], gone.k[gone.valid])
        for page, x in zip(pages, own.held, strict=True):
            torch.testing.assert_close(page[[3, 1]], x)
        seen += time
    for page, x in zip(pages, before, strict=True):
        torch.testing.assert_close(page[[0, 2, 4]], x[[0, 2, 4]], equal_nan=True)


@torch.no_grad()
def test_a_window_does_not_read_what_another_sequence_left():
    """A prompt whose first piece is one token, which is a step in one kernel and leaves other slots as they were."""
    shape, how = Shape((4,), 1), How(0.5)
    windows = Windows(torch.tensor(shape.sizes), shape.sinks)
    q, k, v = (torch.rand(1, heads, 4, 4) for heads in (2, 1, 1))
    own, slots = WindowMemory(shape), Slots(torch.tensor([1]), torch.tensor([False]))
    own.attend(*(x[:, :, :1] for x in (q, k, v)), windows, None, how, leaves=False)
    pages = tuple(torch.full((2, *x.shape[1:]), torch.nan) for x in own.held)
    for page, x in zip(pages, own.held, strict=True):
        page[1, 0] = x[0, 0]
    paged = PagedWindow(shape, pages, None, slots, torch.tensor([1]))
    (found, _), (expected, _) = (
        m.attend(*(x[:, :, 1:] for x in (q, k, v)), windows, None, how, leaves=True) for m in (paged, own)
    )
    torch.testing.assert_close(combine(found, v.dtype), combine(expected, v.dtype))
