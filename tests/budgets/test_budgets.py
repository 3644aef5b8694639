"""Memory budgets: costs, the allocation of windows, the scan of heads, and conversions to a budget."""

import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import t2r
from converting import make_model, make_world
from families import tiny
from t2r.budgets import scan
from t2r.budgets.allocation import allocate, choices
from t2r.budgets.costs import SINKS, SMALLEST, Costs, LayerCost, features_for, parse_memory
from t2r.budgets.planning import Planner
from t2r.budgets.scan import Kept, Limited, measure_needs, window_sizes
from t2r.errors import T2RError
from t2r.evaluation.memory import memory_of
from t2r.pipelines.budget import plan_memory
from t2r.pipelines.convert import convert

CONTEXT = 64
SHORT = (
    f"block_size={CONTEXT}",
    f"batch_tokens={CONTEXT}",
    "transfer.steps=2",
    "distill.steps=2",
    "warmup_steps=0",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


# --- Costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "bytes_"), [("8MiB", 2**23), ("1.5 kib", 1536), (700, 700), ("2gb", 2 * 10**9), ("12", 12)]
)
def test_memory_is_read(given, bytes_):
    assert parse_memory(given) == bytes_


@pytest.mark.parametrize("wrong", ["", "much", "-1MiB", "0", "8 parsecs", True, "1e3"])
def test_wrong_memory_is_refused(wrong):
    with pytest.raises(T2RError, match="for example 8MiB"):
        parse_memory(wrong)


def test_the_cost_of_a_plan_is_what_the_cache_holds():
    """In bfloat16, after more tokens than the longest window has."""
    model = tiny("llama", torch.bfloat16)
    costs = Costs.of(model, 20, features=4)
    shape = [layer.heads for layer in costs.layers]
    windows = [[16 if (i + h) % 2 else costs.layers[i].longest for h in range(heads)] for i, heads in enumerate(shape)]
    plan = costs.plan(windows)
    assert plan.states is None  # all heads have one
    rnn = t2r.swap(model, plan=plan, feature_size=4, grouped=True)
    cache = rnn.make_cache()
    with torch.no_grad():
        rnn(torch.arange(3, 33)[None], past_key_values=cache)
    held = sum(x.nbytes for layer in cache.layers for name, x in layer.tensors().items() if name != "seen")
    assert held == costs.of_plan(plan)


def test_a_budget_that_is_not_possible_names_the_limits():
    costs = Costs.of(tiny("llama"), CONTEXT)
    for wrong in (costs.least - 1, costs.whole + 1):
        with pytest.raises(T2RError, match=r"smallest plan .* needs 0\.\d+ MiB, and all keys and values of 64 tokens"):
            costs.check(wrong)
    costs.check(costs.least)
    costs.check(costs.whole)


def test_models_whose_windows_cannot_differ_are_refused_before_the_scan():
    with pytest.raises(T2RError, match="for language models"):
        Costs.of(tiny("marian"), CONTEXT)


def test_more_memory_has_more_features():
    model = tiny("llama")
    counts = [features_for(model, CONTEXT, memory) for memory in (1_000, 10_000, 10_000_000)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


# --- Allocation -----------------------------------------------------------------------------------------------


@st.composite
def worlds(draw):
    """Needs of a few heads, their costs, and a memory."""
    longest = draw(st.integers(40, 80))
    layers = draw(st.lists(st.builds(LayerCost, st.integers(1, 2), st.just(8), st.sampled_from([0, 64]),
                                     st.just(longest)), min_size=1, max_size=3))  # fmt: skip
    costs = Costs(tuple(layers), longest)
    needs = {head: {16: draw(st.floats(0, 9)), 32: draw(st.floats(0, 9))} for head in costs.heads}
    return needs, costs, draw(st.integers(costs.least, costs.whole + 999))


@given(worlds())
def test_windows_fit_into_the_memory(made):
    needs, costs, memory = made
    windows = allocate(needs, costs, memory)
    assert costs.of_plan(costs.plan(windows)) <= memory
    known = {SMALLEST, 32, costs.context}
    assert {window for row in windows for window in row} <= known


@given(worlds(), st.integers(0, 500))
def test_more_memory_is_never_worse_for_one_head_or_all(made, more):
    """The sum of isolated divergences does not grow, up to the step that no longer fits."""
    needs, costs, memory = made
    if len(costs.heads) > 1:
        return

    def loss(windows):
        return sum(dict(choices(needs[h], costs, h))[windows[h[0]][h[1]]] for h in costs.heads)

    assert loss(allocate(needs, costs, memory + more)) <= loss(allocate(needs, costs, memory))


@given(worlds())
def test_greedy_is_close_to_the_best(made):
    """All but the last step of the greedy choice are those of the best choice for some memory: its loss is at most the
    best loss with less memory by the most expensive step."""
    needs, costs, memory = made
    if len(costs.heads) > 4:
        return
    options = [choices(needs[head], costs, head) for head in costs.heads]
    windows = allocate(needs, costs, memory)
    found = sum(dict(options[i])[windows[h[0]][h[1]]] for i, h in enumerate(costs.heads))
    dear = max(layer.of(layer.longest) for layer in costs.layers)
    best = min(
        (
            sum(loss for _, loss in chosen)
            for chosen in itertools.product(*options)
            if sum(costs.layers[h[0]].of(w) for h, (w, _) in zip(costs.heads, chosen, strict=True)) <= memory - dear
        ),
        default=float("inf"),
    )
    assert found <= best + 1e-9


def test_fixed_windows_are_kept():
    needs = {(0, head): {16: 1.0, 32: 0.5} for head in range(3)}
    costs = Costs((LayerCost(3, 8, 0, 64),), 64)
    windows = allocate(needs, costs, costs.least + 8 * 64, {(0, 1): 64})
    assert windows[0][1] == 64
    assert windows[0][0] >= SMALLEST


# --- The scan -------------------------------------------------------------------------------------------------


def test_a_head_is_measured_alone():
    """Compare with a model whose one head has a window by a mask of its own."""
    model = tiny("llama", torch.float64)
    blocks = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    costs = Costs.of(model, 40)
    limited = Limited(model, costs, blocks)
    needs = measure_needs(limited, Kept.open(model, costs, blocks), progress=False)
    windows = [[costs.layers[0].longest] * layer.heads for layer in costs.layers]
    windows[1][0] = 16
    states = tuple(tuple(False for _ in row) for row in windows)
    rnn = t2r.swap(tiny("llama", torch.float64), plan={"windows": windows, "sinks": SINKS, "states": states})
    with torch.no_grad():
        ours, theirs = (m(blocks).logits.log_softmax(-1) for m in (rnn, model))
    expected = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert needs[1, 0][16] == pytest.approx(float(expected), rel=1e-4)
    assert set(needs) == set(costs.heads)
    assert float(expected) > 1e-6


def test_a_scan_is_resumed_and_kept(monkeypatch):
    model, blocks = tiny("llama"), torch.randint(3, 90, (2, 40))
    calls = []

    def stop(limited, layers=None, real=Limited.divergence):
        calls.append(layers)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return real(limited, layers)

    monkeypatch.setattr(scan.Limited, "divergence", stop)
    planner = Planner(model, None, blocks, recall=False, progress=False)
    with pytest.raises(KeyboardInterrupt):
        _ = planner.needs
    stopped = len(calls)
    total = sum(1 + layer.heads * len(window_sizes(planner.costs, i)) for i, layer in enumerate(planner.costs.layers))
    _ = Planner(model, None, blocks, recall=False, progress=False).needs
    layer = planner.costs.layers[0]
    done = 1 + layer.heads * len(window_sizes(planner.costs, 0))
    assert stopped > done  # the first layer was complete
    assert len(calls) - stopped == total - done
    before = len(calls)
    _ = Planner(model, None, blocks, recall=False, progress=False).needs
    assert len(calls) == before


def test_the_base_model_is_not_modified():
    model, blocks = tiny("llama"), torch.randint(3, 90, (1, 40))
    before = model(blocks).logits
    Planner(model, None, blocks, recall=False, progress=False).plan(Costs.of(model, 40).least + 500, features=0)
    assert not isinstance(model, t2r.T2RForCausalLM)
    assert torch.equal(model(blocks).logits, before)


# --- Conversions ----------------------------------------------------------------------------------------------


def budget_of(share):
    costs = Costs.of(make_model("llama"), CONTEXT)
    return int(costs.least + share * (costs.whole - costs.least))


@pytest.mark.parametrize("recipe", [None, "none"])
def test_a_conversion_to_a_budget(world, tmp_path, recipe):
    memory, out = budget_of(0.7), tmp_path / "rnn"
    results = convert(
        str(world / "llama"),
        str(out),
        train=str(world / "train.txt"),
        valid=str(world / "valid.txt"),
        memory=memory,
        recipe=recipe,
        overrides=SHORT if recipe is None else (),
        limit=2,
        progress=False,
    )
    rnn = AutoModelForCausalLM.from_pretrained(out)
    plan = rnn.t2r_config.memory_plan
    assert results["planned"]["used"] <= memory
    assert json.loads((out / "results.json").read_text())["planned"]["memory"] == memory
    assert any(has for _, row in plan.pairs() for has in row) == (recipe is None)
    assert list(results["stages"]) == ([] if recipe else ["transfer", "distill"])
    assert memory_of(rnn).state > 0
    page = t2r.report(out).read_text()
    assert "Memory plan:" in page
    assert page.count("<title>layer ") == sum(map(len, plan.windows))
    if recipe:
        base = AutoModelForCausalLM.from_pretrained(world / "llama")
        for name, weight in base.state_dict().items():
            assert torch.equal(weight, rnn.state_dict()[name])
    prompt = torch.arange(3, 30)[None]
    expected = rnn(torch.cat([prompt, prompt], 1)).logits[:, -1]
    cache = rnn.make_cache()
    rnn(prompt, past_key_values=cache)
    found = rnn(prompt, past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"memory": "1"}, "smallest plan of this model needs"),
        ({"memory": "1GiB"}, "all keys and values of 64 tokens"),
        ({"memory": "lots"}, "for example 8MiB"),
        ({"memory": "4KiB", "context": 4}, "at least 32"),
        ({"memory": "4KiB", "context": 6400}, "longer than the model's 64 positions"),
        ({"context": 64}, "context belongs to a memory budget"),
        ({"recipe": "none"}, "trains nothing: give memory"),
        ({"memory": "4KiB", "softmax_layers": [0]}, "do not give softmax_layers"),
    ],
)
def test_wrong_budgets_are_refused_and_leave_no_files(world, tmp_path, wrong, words):
    with pytest.raises(T2RError, match=words):
        convert(str(world / "llama"), str(tmp_path / "rnn"), train=str(world / "train.txt"), progress=False, **wrong)
    assert not list(tmp_path.glob("rnn*"))


def test_plans_of_several_budgets(world):
    found = plan_memory(
        str(world / "llama"), [budget_of(0.2), budget_of(0.8)], train=str(world / "train.txt"), progress=False,
        states=False,
    )  # fmt: skip
    assert [each.features for each in found] == [0, 0]
    assert found[0].divergence >= found[1].divergence
    assert all(each.used <= each.memory for each in found)


# --- Pages ----------------------------------------------------------------------------------------------------


def test_the_page_of_plans_shows_every_head(world, tmp_path):
    found = plan_memory(
        str(world / "llama"), [budget_of(0.3), budget_of(0.9)], train=str(world / "train.txt"), progress=False
    )
    file = tmp_path / "plans.json"
    file.write_text(json.dumps({"plans": [each.to_dict() for each in found]}))
    page = t2r.report(file).read_text()
    heads = [size for each in found for row in each.plan.windows for size in row]
    assert page.count("<title>layer ") == len(heads)
    for layer, row in enumerate(found[0].plan.windows):
        for head, size in enumerate(row):
            assert f"layer {layer}, head {head}: {size:,} tokens" in page
