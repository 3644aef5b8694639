"""Memory budgets: costs, what a byte is worth to each head, the descent, and conversions to a budget."""

import copy
import json
import math
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import t2r
from converting import make_model, make_world
from families import tiny
from t2r.budgets import descent, planning
from t2r.budgets.costs import SINKS, SMALLEST, Costs, LayerCost, features_for, parse_memory
from t2r.budgets.descent import Descent, fitted, grid
from t2r.budgets.limited import Limited
from t2r.budgets.planning import Planner
from t2r.errors import T2RError
from t2r.evaluation.sizes import memory_of
from t2r.model import logits
from t2r.ops import soft_windows
from t2r.ops.soft_windows import REACH
from t2r.pipelines.budget import plan_memory
from t2r.pipelines.convert import convert
from t2r.plans import MemoryPlan

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
    monkeypatch.setitem(descent.STEPS, "cpu", 6)


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


@pytest.mark.parametrize("nbits", [8, 16])
def test_the_cost_of_a_plan_is_what_the_cache_holds(nbits):
    """In bfloat16 or 8 bits, after more tokens than the longest window has."""
    model = tiny("llama", torch.bfloat16)
    costs = Costs.of(model, 20, features=4, nbits=nbits)
    shape = [layer.heads for layer in costs.layers]
    windows = [[16 if (i + h) % 2 else costs.layers[i].longest for h in range(heads)] for i, heads in enumerate(shape)]
    plan = costs.plan(windows)
    assert plan.states is None  # all heads have one
    rnn = t2r.swap(model, plan=plan, feature_size=4, grouped=True)
    cache = rnn.make_cache()
    with torch.no_grad():
        rnn(torch.arange(3, 33)[None], past_key_values=cache)
    held = sum(x.nbytes for layer in cache.layers for name, x in layer.tensors().items() if name != "seen")
    assert held == costs.of_windows(windows)


def test_a_budget_that_is_not_possible_names_the_limits():
    costs = Costs.of(tiny("llama"), CONTEXT)
    for wrong in (costs.least - 1, costs.whole + 1):
        with pytest.raises(T2RError, match=r"smallest plan .* needs [\d.]+ KiB, and all keys and values of 64 tokens"):
            costs.check(wrong)
    costs.check(costs.least)
    costs.check(costs.whole)


def test_a_model_with_windows_that_are_short_already_needs_no_budget():
    model = tiny("mistral")
    model.config.sliding_window = 8
    costs = Costs.of(model, CONTEXT)
    with pytest.raises(T2RError, match="it needs no budget"):
        costs.check(costs.whole)


def test_models_whose_windows_cannot_differ_are_refused_before_the_scan():
    with pytest.raises(T2RError, match="t5 models cannot have windows: their positions are a bias on the scores"):
        Costs.of(tiny("t5"), CONTEXT)


def test_more_memory_has_more_features():
    model = tiny("llama")
    counts = [features_for(model, CONTEXT, memory) for memory in (1_000, 10_000, 10_000_000)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


# --- Windows from a path --------------------------------------------------------------------------------------


@st.composite
def worlds(draw):
    """Sizes of the windows of a few heads, their costs, and a memory."""
    longest = draw(st.integers(20, 300))
    layer = st.builds(LayerCost, st.integers(1, 3), st.sampled_from([4, 8]), st.sampled_from([0, 64]), st.just(longest))
    costs = Costs(tuple(draw(st.lists(layer, min_size=1, max_size=3))), longest)
    sizes = [[draw(st.floats(SMALLEST, 1.3 * longest)) for _ in range(layer.heads)] for layer in costs.layers]
    return sizes, costs, draw(st.integers(costs.least, costs.whole + 999))


@given(worlds())
def test_windows_fit_into_the_memory(made):
    sizes, costs, memory = made
    windows = fitted(sizes, costs, memory)
    assert costs.of_windows(windows) <= memory
    for layer, row in zip(costs.layers, windows, strict=True):
        assert set(row) <= set(grid(layer.longest))


@given(worlds())
def test_no_window_could_be_larger(made):
    sizes, costs, memory = made
    windows = fitted(sizes, costs, memory)
    left = memory - costs.of_windows(windows)
    for layer, row in zip(costs.layers, windows, strict=True):
        for size in row:
            larger = [possible for possible in grid(layer.longest) if possible > size]
            assert not larger or (larger[0] - size) * layer.token > left


@given(worlds())
def test_windows_are_rounded_to_the_next_of_the_grid(made):
    sizes, costs, _ = made
    for layer, row, chosen in zip(costs.layers, sizes, fitted(sizes, costs), strict=True):
        for size, window in zip(row, chosen, strict=True):
            nearest = min(abs(math.log(size / possible)) for possible in grid(layer.longest))
            assert abs(math.log(size / window)) <= nearest + 1e-9


# --- What a byte is worth -------------------------------------------------------------------------------------


def limited_llama(rows=2, dtype=torch.float64):
    model = tiny("llama", dtype)
    blocks = torch.randint(3, 90, (rows, 40), generator=torch.Generator().manual_seed(0))
    return model, blocks, Limited(model, Costs.of(model, 40), blocks)


def test_the_divergence_is_that_of_a_model_with_these_windows():
    model, blocks, limited = limited_llama()
    windows = [[16, 42], [23, 16], [42, 42]]
    rnn = t2r.swap(copy.deepcopy(model), plan={"windows": windows, "sinks": SINKS, "states": [[False] * 2] * 3})
    with torch.no_grad():
        ours, theirs = (m(blocks).logits.log_softmax(-1) for m in (rnn, model))
    expected = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert limited.divergence(blocks, windows) == pytest.approx(float(expected), rel=1e-4)
    assert float(expected) > 1e-6


def test_the_worth_of_a_token_is_the_slope_of_the_divergence():
    _, blocks, limited = limited_llama()
    sizes = [torch.tensor([20.0, 25.0]), torch.tensor([30.0, 17.0]), torch.tensor([40.0, 22.0])]
    some = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    for where in (None, some):
        divergence, worth = limited.worth(blocks, sizes, where)
        assert divergence > 0
        for layer, head in ((0, 1), (1, 0)):
            moved = [[x.clone() for x in sizes] for _ in range(2)]
            for by, each in zip((-0.05, 0.05), moved, strict=True):
                each[layer][head] += by
            low, high = (limited.worth(blocks, each, where)[0] for each in moved)
            assert float(worth[layer][head]) == pytest.approx((low - high) / 0.1, rel=0.02)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_worth_is_the_same_on_a_gpu(family, monkeypatch):
    """There, all heads are computed at once, and the logits block by block."""
    model = tiny(family, torch.float64)
    blocks = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    limited = Limited(model, Costs.of(model, 40), blocks)
    sizes = [torch.linspace(0.31, 0.87, layer.heads) * layer.longest for layer in limited.costs.layers]
    divergence, worth = limited.worth(blocks, sizes)
    monkeypatch.delitem(soft_windows.BLOCK, "cpu")
    monkeypatch.setitem(logits.AT_ONCE, "cpu", 30 * model.config.vocab_size)
    again, same = limited.worth(blocks, sizes)
    assert again == pytest.approx(divergence, rel=1e-6)
    torch.testing.assert_close(torch.cat(same), torch.cat(worth), rtol=1e-5, atol=1e-12)
    assert torch.cat(worth).abs().max() > 1e-9


def test_the_longest_windows_lose_nothing():
    """With and without soft edges."""
    _, blocks, limited = limited_llama()
    whole = [[layer.longest] * layer.heads for layer in limited.costs.layers]
    assert limited.divergence(blocks, whole) == 0
    soft = [torch.tensor(row) / REACH for row in whole]
    assert limited.worth(blocks, soft)[0] == pytest.approx(0, abs=1e-9)


def test_a_window_of_the_base_model_stays_within_it():
    """Soft edges do not show a layer more than its own sliding window."""
    model = tiny("mistral", torch.float64)
    blocks = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    limited = Limited(model, Costs.of(model, 40), blocks)
    own = model.config.sliding_window
    assert own < 40
    assert {layer.longest for layer in limited.costs.layers} == {own}
    soft = [torch.full((layer.heads,), own / REACH) for layer in limited.costs.layers]
    hard = [torch.full((layer.heads,), own) for layer in limited.costs.layers]
    with torch.no_grad():
        found = []
        for windows in (soft, hard):
            with limited.within(windows):
                found.append(limited.readout.states({"input_ids": blocks}))
    torch.testing.assert_close(*found)


# --- The descent ----------------------------------------------------------------------------------------------


def descent_of(limited, blocks, ask=lambda step: None):
    return Descent(limited, blocks, ask, "a model", progress=False)


def test_a_damaged_path_is_made_again(caplog):
    """Whatever is in the file: the next process finds the windows that the first one did."""
    model, blocks = tiny("llama"), torch.randint(3, 90, (4, 40), generator=torch.Generator().manual_seed(0))
    limited = Limited(model, costs := Costs.of(model, 40), blocks)
    budget = (costs.least + costs.whole) // 2
    made = descent_of(limited, blocks)
    expected, good = made.windows(budget, costs), json.loads(made.file.read_text())
    path = good["path"]
    for number, damaged in enumerate((
        "", "{", "[]", "{}", "\ud800", "[" * 10_000,
        good | {"path": 3}, good | {"path": path * 99}, good | {"logs": None}, good | {"value": [[1.0]]},
        *(good | {"path": [*path[:-1], last]} for last in (
            [], "ab", [["x", "x"]] * len(path[0]), [row[1:] for row in path[0]], path[0][1:],
            [[math.nan for _ in row] for row in path[0]], [[0.0 for _ in row] for row in path[0]],
            [[1e9 for _ in row] for row in path[0]],
        )),
    )):  # fmt: skip
        text = damaged if isinstance(damaged, str) else json.dumps(damaged)
        made.file.write_text(text, errors="surrogatepass")
        caplog.clear()
        again = descent_of(limited, blocks)
        assert again.path == [], number
        assert again.windows(budget, costs) == expected
        (message,) = caplog.messages
        assert "is damaged" in message
        assert json.loads(made.file.read_text()) == good


@pytest.mark.parametrize("name", ["tokens", "windows"])
def test_a_cache_that_cannot_be_written_is_told(world, tmp_path, name):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / name).write_text("not a folder")
    with pytest.raises(T2RError, match="cannot be"):
        plan_memory(str(world / "llama"), [budget_of(0.5)], train=str(world / "train.txt"), progress=False)


def test_the_head_that_matters_keeps_its_window(monkeypatch):
    """Only one head of four has an output, and is worth its bytes."""
    monkeypatch.setitem(descent.STEPS, "cpu", 40)
    model = tiny("llama", torch.float32)
    for index, layer in enumerate(model.model.layers):
        weight = layer.self_attn.o_proj.weight.data
        own = weight.shape[1] // 2  # two key heads, each with its query heads
        for head in range(2):
            weight[:, head * own : (head + 1) * own] *= 20.0 * ((index, head) == (1, 0))
    blocks = torch.randint(3, 90, (8, 64), generator=torch.Generator().manual_seed(0))
    limited = Limited(model, Costs.of(model, 64), blocks)
    costs = limited.costs
    one_whole = costs.least + (costs.layers[1].longest - SMALLEST) * costs.layers[1].token
    windows = descent_of(limited, blocks).windows(one_whole, costs)
    assert windows[1][0] == max(size for row in windows for size in row)
    assert windows[1][0] >= 2 * max(windows[0][0], windows[0][1], windows[1][1])


def test_a_descent_is_resumed_and_kept(monkeypatch):
    monkeypatch.setitem(descent.STEPS, "cpu", 12)
    _, blocks, limited = limited_llama(dtype=torch.float32)
    costs, steps = limited.costs, []
    half = (costs.least + costs.whole) // 2

    def step(own, number, real=Descent.step):
        steps.append(number)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return real(own, number)

    monkeypatch.setattr(descent, "SAVE_EVERY", 1)
    monkeypatch.setattr(Descent, "step", step)
    with pytest.raises(KeyboardInterrupt):
        descent_of(limited, blocks).windows(costs.least, costs)
    resumed = descent_of(limited, blocks)
    assert len(resumed.path) == 3
    resumed.windows(half, costs)
    reached = len(resumed.path)
    assert 3 < reached < 12  # no further than it is asked for
    resumed.windows(costs.least, costs)
    assert sorted(set(steps)) == list(range(12))
    before = len(steps)
    again = descent_of(limited, blocks)
    assert again.path == resumed.path
    again.windows(half, costs)
    assert len(steps) == before
    # An uninterrupted descent takes the same path.
    again.file.unlink()
    whole = descent_of(limited, blocks)
    whole.windows(costs.least, costs)
    torch.testing.assert_close(torch.tensor(whole.path), torch.tensor(resumed.path), rtol=0.02, atol=0.2)


def test_two_processes_make_a_path_once(monkeypatch):
    """One waits for the other, and goes on as soon as the path is long enough for its own budget."""
    monkeypatch.setitem(descent.STEPS, "cpu", 12)
    _, blocks, limited = limited_llama(dtype=torch.float32)
    costs, taken, half_way = limited.costs, [], threading.Event()
    half = (costs.least + costs.whole) // 2

    def step(own, number, real=Descent.step):
        taken.append(threading.current_thread().name)
        divergence = real(own, number)
        if len(taken) == 10:
            half_way.wait(60)
        return divergence

    monkeypatch.setattr(descent, "SAVE_EVERY", 1)
    monkeypatch.setattr(descent, "POLL", 0.01)
    monkeypatch.setattr(Descent, "step", step)
    ways = [descent_of(limited, blocks), descent_of(limited, blocks)]
    first = threading.Thread(target=lambda: ways[0].windows(costs.least, costs), name="first")
    first.start()
    while not taken:
        time.sleep(0.01)
    windows = ways[1].windows(half, costs)  # which the other has reached before its tenth step
    assert first.is_alive()
    half_way.set()
    first.join()
    assert set(taken) == {"first"}
    assert len(taken) == len(ways[0].path) == 12
    assert windows == ways[0].windows(half, costs)


def test_questions_are_asked_if_the_model_can_answer(world, monkeypatch):
    monkeypatch.setattr(planning, "KNOWN", 0.0)
    monkeypatch.setitem(descent.STEPS, "cpu", 3)
    model, tokenizer = make_model("llama"), t2r.load_tokenizer(str(world / "llama"))
    blocks = torch.tensor(tokenizer((world / "train.txt").read_text()).input_ids[: 8 * CONTEXT]).view(8, CONTEXT)
    planner = Planner(model, tokenizer, blocks, progress=False)
    for step in range(4):
        ids, where = planner.ask_for(step)
        assert ids.shape == where.shape == (1, CONTEXT)
        assert where.any()
    seen = []
    monkeypatch.setattr(Limited, "worth", lambda own, ids, windows, where=None, real=Limited.worth: (
        seen.append(where is None), real(own, ids, windows, where))[1])  # fmt: skip
    planned = planner.plan(planner.costs.least, features=0)
    assert planned.recall is not None
    assert {True, False} == set(seen)
    monkeypatch.setattr(planning, "KNOWN", 1.1)
    assert Planner(model, tokenizer, blocks, progress=False).plan(planner.costs.least, features=0).recall is None


def test_the_base_model_is_not_modified():
    model, blocks = tiny("llama"), torch.randint(3, 90, (1, 40))
    before = model(blocks).logits
    Planner(model, None, blocks, progress=False).plan(Costs.of(model, 40).whole - 500, features=0)
    assert not isinstance(model, t2r.T2RForCausalLM)
    assert torch.equal(model(blocks).logits, before)


# --- Conversions ----------------------------------------------------------------------------------------------


def budget_of(share, nbits=8):
    costs = Costs.of(make_model("llama"), CONTEXT, nbits=nbits)
    return int(costs.least + share * (costs.whole - costs.least))


@pytest.mark.parametrize(("recipe", "nbits"), [(None, 16), ("none", 16), (None, 8)])
def test_a_conversion_to_a_budget(world, tmp_path, recipe, nbits):
    memory, out = budget_of(0.4, nbits), tmp_path / "rnn"
    results = convert(
        str(world / "llama"),
        str(out),
        train=str(world / "train.txt"),
        valid=str(world / "valid.txt"),
        memory=memory,
        nbits=nbits,
        recipe=recipe,
        overrides=SHORT if recipe is None else (),
        limit=2,
        progress=False,
    )
    rnn = AutoModelForCausalLM.from_pretrained(out)
    plan = rnn.t2r_config.memory_plan
    assert plan.nbits == nbits
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
        ({"memory": "4KiB", "nbits": 12}, "nbits must be 8 or 16; got 12"),
        ({"context": 64}, "context belongs to a memory budget"),
        ({"nbits": 8}, "nbits belongs to a memory budget"),
        ({"recipe": "none"}, "trains nothing: give memory"),
        ({"memory": "4KiB", "softmax_layers": [0]}, "do not give softmax_layers"),
    ],
)
def test_wrong_budgets_are_refused_and_leave_no_files(world, tmp_path, wrong, words):
    with pytest.raises(T2RError, match=words):
        convert(str(world / "llama"), str(tmp_path / "rnn"), train=str(world / "train.txt"), progress=False, **wrong)
    assert not list(tmp_path.glob("rnn*"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"memory": []}, "memory has no budget: give at least one"),
        ({"memory": "8KiB"}, "memory must be a list, each text or a whole number; got '8KiB'"),
        ({"memory": [2.5]}, "memory must be a list, each text or a whole number"),
        ({"memory": ["6KiB", None]}, "memory must be a list"),
        ({"model": 3}, "model must be text"),
        ({"train": 3}, "train must be text, a list, a mapping or None; got 3"),
        ({"tokenizer": 3}, "tokenizer must be"),
        ({"context": 40.0}, "context must be a whole number or None; got 40.0"),
        ({"states": "no"}, "states must be true or false"),
        ({"recurrent": "nonsense"}, "recurrent must be one of"),
        ({"recurrent": "both"}, "join, recurrent and languages are for parallel text"),
        ({"join": 3}, "join, recurrent and languages are for parallel text"),
        ({"source_language": "zh"}, "join, recurrent and languages are for parallel text"),
    ],
)
def test_wrong_arguments_of_a_plan(world, wrong, words):
    given = {"model": str(world / "llama"), "memory": ["6KiB"], "train": str(world / "train.txt"), "progress": False}
    with pytest.raises(T2RError, match=words):
        plan_memory(**given | wrong)


def test_what_a_plan_needs_is_said_before_anything_is_measured(world, tmp_path, monkeypatch):
    monkeypatch.setattr(Planner, "__init__", lambda *given, **how: pytest.fail("it is measured"))
    model, text, short = str(world / "llama"), str(world / "train.txt"), tmp_path / "short.txt"
    short.write_text("Too few words.")
    windows_only = budget_of(0.01)
    with pytest.raises(T2RError, match=r"not enough for states of 4 features: .* need [\d.]+ KiB. Plan windows only"):
        plan_memory(model, [budget_of(0.9), windows_only], train=text, progress=False)
    with pytest.raises(T2RError, match="less than the 64 that are planned for: give more text or a smaller context"):
        plan_memory(model, [windows_only], train=str(short), progress=False, states=False)


def test_plans_of_several_budgets(world):
    found = plan_memory(
        str(world / "llama"), [budget_of(0.2), budget_of(0.8)], train=str(world / "train.txt"), progress=False,
        states=False,
    )  # fmt: skip
    assert [each.features for each in found] == [0, 0]
    assert found[0].divergence >= found[1].divergence
    assert found[0].one_window_divergence >= found[1].one_window_divergence
    assert all(each.used <= each.memory for each in found)


def test_eight_bits_hold_almost_twice_the_tokens(world):
    """By the same descent."""
    rows = []
    for nbits in (16, 8):
        (found,) = plan_memory(
            str(world / "llama"), [budget_of(0.3)], train=str(world / "train.txt"), progress=False, nbits=nbits,
            states=False,
        )  # fmt: skip
        assert found.used <= found.memory
        rows.append(found)
    tokens = [sum(map(sum, each.plan.windows)) for each in rows]
    assert 1.3 * tokens[0] < tokens[1] < 2 * tokens[0]
    assert rows[1].divergence <= rows[0].divergence


def test_a_conversion_uses_the_descent_of_a_plan(world, tmp_path, monkeypatch):
    """Although the plan held out the end of the text, and the conversion measures on another one."""
    memory, text = budget_of(0.3), str(world / "train.txt")
    (planned,) = plan_memory(str(world / "llama"), [memory], train=text, progress=False, states=False)
    monkeypatch.setattr(Descent, "step", None)
    results = convert(
        str(world / "llama"), str(tmp_path / "rnn"), train=text, valid=str(world / "valid.txt"), memory=memory,
        recipe="none", limit=1, progress=False,
    )  # fmt: skip
    assert MemoryPlan.of(results["planned"]["plan"]) == planned.plan


def test_a_descent_is_that_of_one_model(world, tmp_path):
    """Not of one with the same weights and other positions; but of a copy elsewhere, in another dtype."""
    model = make_model("llama")
    blocks = torch.randint(3, 90, (2, CONTEXT))
    files = {"own": Planner(model, None, blocks, progress=False).descent.file}
    model.to(torch.float64).save_pretrained(tmp_path / "copy")
    copied = t2r.load(tmp_path / "copy", dtype="float32")
    files["copy"] = Planner(copied, None, blocks, progress=False).descent.file
    copied.config.rope_parameters["rope_theta"] = 5.0
    files["positions"] = Planner(copied, None, blocks, progress=False).descent.file
    assert files["own"] == files["copy"] != files["positions"]


def test_logits_that_are_not_finite_make_no_plan():
    model, blocks = tiny("llama", torch.float32), torch.randint(3, 90, (4, 40))
    model.model.norm.weight.data *= 1e38
    model.model.layers[0].input_layernorm.weight.data *= 1e38
    with pytest.raises(T2RError, match="are not finite on this text"):
        Planner(model, None, blocks, progress=False).plan(Costs.of(model, 40).least, features=0)


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
