"""The decoding benchmark: correctness of the measurements, not speed."""

import copy
import io
import json
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from transformers import GptOssConfig, GptOssForCausalLM, OpenAIGPTConfig, OpenAIGPTLMHeadModel

import t2r
from families import DECODER, POSITIONS, tiny
from t2r.bench import decoding
from t2r.bench.analytic import step_cost
from t2r.bench.models import with_positions
from t2r.bench.readers import CapturedReader, EngineReader, Reader, windowed
from t2r.bench.summary import crossover
from t2r.errors import T2RError

SHORT = {"steps": 2, "repeats": 2}


def pair(model_type="gpt2", **options):
    """Return a teacher and its swapped model."""
    teacher = tiny(model_type, torch.float32)
    return {"teacher": teacher, "RNN": t2r.swap(copy.deepcopy(teacher), feature_map="hedgehog", **options)}


def test_the_cache_of_a_teacher_grows_and_the_state_does_not():
    models = pair(feature_size=4, decay=True)
    config = models["teacher"].config
    report = decoding.run(models, [40, 10], **SHORT)  # in any order
    assert [(p.model, p.length) for p in report.points] == [("teacher", 10), ("RNN", 10), ("teacher", 40), ("RNN", 40)]
    keys_and_values = 2 * config.n_layer * config.n_embd * 4
    assert [p.cache_bytes for p in report.of("teacher")] == [10 * keys_and_values, 40 * keys_and_values]
    head = config.n_embd // config.n_head
    state = config.n_layer * config.n_head * 4 * (head + 1) * 4
    assert [p.cache_bytes for p in report.of("RNN")] == [state, state]
    for point in report.points:
        assert point.milliseconds > 0
        assert point.tokens_per_second == pytest.approx(1e3 / point.milliseconds)
    assert report.extended == []
    assert json.loads(json.dumps(asdict(report)))["settings"]["repeats"] == 2


def test_tokens_of_a_batch_are_counted():
    report = decoding.run({"teacher": tiny("llama", torch.float32)}, [8], batch=3, **SHORT)
    (point,) = report.points
    assert point.tokens_per_second == pytest.approx(3e3 / point.milliseconds)
    assert (
        point.cache_bytes == 3 * decoding.run({"x": tiny("llama", torch.float32)}, [8], **SHORT).points[0].cache_bytes
    )


def test_timed_steps_have_the_whole_context_in_the_cache():
    """Every forward of a timed round gets one token, with the whole context in the cache."""
    model, seen = tiny("gpt2", torch.float32), []

    def note(module, args, kwargs):
        seen.append((kwargs["input_ids"].shape[1], kwargs["past_key_values"]))

    lengths = []
    model.register_forward_pre_hook(note, with_kwargs=True)
    model.transformer.wpe.register_forward_hook(lambda m, args, out: lengths.append(int(args[0].max())))
    decoding.run({"teacher": model}, [20], steps=3, repeats=1)
    assert [tokens for tokens, _ in seen] == [20] + [1] * 8
    assert lengths == [19, 20, 21, 22, 23, 20, 21, 22, 23]  # each round starts from the same length


@pytest.mark.parametrize("model_type", ["gpt2", "opt"])
def test_learned_positions_are_repeated_in_a_copy(model_type):
    model = tiny(model_type, torch.float32)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    longer = with_positions(model, 3 * POSITIONS - 5)
    assert longer is not model
    assert longer.config.max_position_embeddings == 3 * POSITIONS
    assert model.config.max_position_embeddings == POSITIONS
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])
    # The same tokens give the same output at position 0 and where the repeated positions start again.
    ids = torch.arange(5, 15)[None]
    again = torch.arange(POSITIONS, POSITIONS + 10)[None]
    with torch.no_grad():
        torch.testing.assert_close(longer(ids, position_ids=again).logits, model(ids).logits)
    assert with_positions(model, POSITIONS) is model


def test_measuring_beyond_the_positions_is_reported():
    models = pair(feature_size=4)
    t2r.merge(models["RNN"], force=True)
    report = decoding.run(models, [3 * POSITIONS], **SHORT)
    assert report.extended == ["teacher", "RNN"]
    assert "only time and memory are measured" in decoding.notes(report)[-1]
    assert decoding.run(pair("llama"), [3 * POSITIONS], **SHORT).extended == []  # rotary positions do not end


@pytest.mark.parametrize(
    ("reference", "times", "expected"),
    [
        ([1, 2, 3], [2, 2, 2], 200),  # equal there, faster after it
        ([1, 1, 3], [2, 2, 2], 250),
        ([1, 1, 1], [2, 2, 2], None),
        ([3, 3, 3], [2, 2, 2], 100),
        ([3, 1, 3], [2, 2, 2], 250),  # a single faster measurement is not a crossover
    ],
)
def test_crossover(reference, times, expected):
    assert crossover([100, 200, 300], reference, times) == expected


def test_tables_and_notes():
    settings = decoding.DecodingSettings(1, 16, 5, "float32", "cpu", 2)
    points = [decoding.Point("teacher", 512, 2.0, 500.0, 1 << 20), decoding.Point("RNN", 512, 4.0, 250.0, 1 << 19)]
    points += [decoding.Point("teacher", 2048, 8.0, 125.0, 1 << 22), decoding.Point("RNN", 2048, 4.0, 250.0, 1 << 19)]
    points += [decoding.Point("other", length, 9.0, 111.0, 1 << 22) for length in (512, 2048)]
    report = decoding.Report(settings, points, {"RNN": 1024.0, "other": None}, [])
    console = Console(file=io.StringIO(), width=120)
    console.print(*decoding.tables(report))
    text = console.file.getvalue()
    for words in ("2,048", "8.00", "250", "4.00 MiB", "RNN is faster than teacher from about 1,024 tokens on"):
        assert words in text
    assert "other is not faster than teacher up to 2,048 tokens" in text


def test_invalid_benchmarks_are_refused():
    model = tiny("gpt2", torch.float32)
    with pytest.raises(T2RError, match="at least one model"):
        decoding.run({}, [8])
    with pytest.raises(T2RError, match="steps must be at least 1"):
        decoding.run({"a": model}, [8], steps=0)
    with pytest.raises(T2RError, match="encoder-decoder"):
        decoding.run({"a": tiny("bart", torch.float32)}, [8])
    with pytest.raises(T2RError, match="give one for all, for example --dtype float32"):
        decoding.run({"a": model, "b": tiny("gpt2", torch.float64)}, [8])
    config = OpenAIGPTConfig(vocab_size=97, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    without_cache = {"a": OpenAIGPTLMHeadModel(config).eval()}
    with pytest.raises(T2RError, match="has no cache"):
        decoding.run(without_cache, [8], **SHORT)


def test_the_engine_and_a_window_of_the_same_memory():
    models = pair("llama", feature_size=8)
    report = decoding.run(models, [2, 40], engine=True, window=True, **SHORT)
    last = {point.model: point for point in report.points if point.length == 40}
    names = list(last)
    assert names[:4] == ["teacher", "RNN", "teacher, engine", "RNN, engine"]
    size = int(names[4].removeprefix("teacher, window of "))
    assert names[5:] == [f"teacher, window of {size}, engine"]
    per_token = last["teacher"].cache_bytes // 40
    assert last["RNN, engine"].cache_bytes == last["RNN"].cache_bytes
    assert last["teacher, engine"].cache_bytes == last["teacher"].cache_bytes
    assert size * per_token <= last["RNN"].cache_bytes < (size + 1) * per_token
    counts = 8 * 3  # the number of tokens of each of three layers
    assert last[names[4]].cache_bytes == last[names[5]].cache_bytes + counts == size * per_token + counts
    assert report.references == {
        "RNN": "teacher",
        "teacher, engine": "teacher",
        "RNN, engine": "teacher, engine",
        names[4]: "teacher",
        names[5]: "teacher, engine",
    }
    assert set(report.crossovers) == set(report.smaller) == set(names[1:])
    assert 2 < report.smaller["RNN, engine"] < 40
    assert last["teacher, engine"].bytes_moved == last["teacher"].bytes_moved > last["RNN"].bytes_moved
    assert last["RNN"].bound == pytest.approx(1e3 * last["RNN"].bytes_moved / report.bandwidth)
    assert last["teacher"].launches is None
    assert all(20 < last[name].launches < 400 for name in ("teacher, engine", "RNN, engine", names[5]))
    assert f"A step of RNN, engine has {last['RNN, engine'].launches} operations." in decoding.notes(report)


def test_the_window_has_the_memory_of_a_model_without_softmax_layers():
    """Keys and values of kept layers are few after one token, but grow."""
    teacher = tiny("llama")
    pure, kept = (t2r.swap(tiny("llama"), feature_size=8, softmax_layers=layers) for layers in ([], [0, 1]))
    made = [Reader(name, model, 1, 0) for name, model in {"t": teacher, "kept": kept, "pure": pure}.items()]
    window, of_kept = windowed(made), windowed(made[:2])
    size = made[2].held_bytes() // made[0].held_bytes()
    assert window is not None
    assert window.name == f"t, window of {size}"
    assert of_kept is not None
    assert int(of_kept.name.split()[-1]) < size


def test_models_that_the_engine_does_not_support_are_named():
    kinds = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2}
    teacher = GptOssForCausalLM(GptOssConfig(**DECODER | {"num_hidden_layers": 2}, head_dim=8, **kinds)).eval()
    report = decoding.run({"teacher": teacher}, [6], engine=True, **SHORT)
    assert [point.model for point in report.points] == ["teacher"]
    words = "teacher is not measured in the engine: the attention of gpt_oss, an untested model type"
    assert words in decoding.notes(report)[0]


def test_softmax_layers_in_the_engine():
    models = pair("llama", feature_size=8, softmax_layers=[1])
    report = decoding.run(models, [6, 20], engine=True, **SHORT)
    held = {(p.model, p.length): p.cache_bytes for p in report.points}
    assert held["RNN, engine", 20] > held["RNN, engine", 6]


def test_the_engine_alone_does_not_read_the_context():
    models = pair("llama", feature_size=8)
    calls = []
    models["teacher"].register_forward_pre_hook(lambda module, args: calls.append(args))
    report = decoding.run(models, [6, 20], engine=True, own=False, **SHORT)
    assert {point.model for point in report.points} == {"teacher, engine", "RNN, engine"}
    both = decoding.run(models, [6, 20], engine=True, **SHORT)
    held = {(p.model, p.length): p.cache_bytes for p in both.points}
    assert all(held[point.model, point.length] == point.cache_bytes for point in report.points)
    assert report.references == {"RNN, engine": "teacher, engine"}
    with pytest.raises(T2RError, match="nothing would be measured"):
        decoding.run(models, [6], own=False)


def test_a_model_that_does_not_fit_is_left_out(monkeypatch):
    measure = EngineReader.milliseconds

    def limited(self, steps):
        if self.name == "teacher, engine" and self.length > 6:
            raise torch.OutOfMemoryError
        return measure(self, steps)

    monkeypatch.setattr(EngineReader, "milliseconds", limited)
    report = decoding.run(pair("llama", feature_size=8), [6, 20, 30], engine=True, own=False, **SHORT)
    assert report.out_of_memory == {"teacher, engine": 20}
    assert [p.length for p in report.of("teacher, engine")] == [6]
    assert [p.length for p in report.of("RNN, engine")] == [6, 20, 30]
    assert "teacher, engine does not fit into memory at 20 tokens." in decoding.notes(report)
    assert [row[0] for row in decoding.cells(report)] == ["6", "", "20", "30"]  # also without the first model
    report.crossovers["RNN, engine"] = None
    assert "RNN, engine is not faster than teacher, engine up to 6 tokens." in decoding.notes(report)
    monkeypatch.setattr(EngineReader, "milliseconds", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(T2RError, match="no model fits into memory at 6 tokens"):
        decoding.run(pair("llama", feature_size=8), [6, 20], engine=True, own=False, **SHORT)


def test_the_window_has_the_memory_of_states_in_half_precision():
    models = pair("llama", feature_size=8)
    whole, half = (
        decoding.run(models, [30], engine=True, window=True, own=False, state_dtype=dtype, **SHORT)
        for dtype in (None, torch.bfloat16)
    )
    sizes = [int(r.points[-1].model.split()[3].strip(",")) for r in (whole, half)]
    assert sizes[1] == sizes[0] // 2
    assert half.of("RNN, engine")[0].cache_bytes * 2 == whole.of("RNN, engine")[0].cache_bytes


def test_a_captured_step_computes_what_the_model_computes():
    """It may be repeated any number of times: it always goes on from the context."""
    with torch.no_grad():
        own = CapturedReader(Reader("llama", tiny("llama", torch.float64).eval(), 2, 0))
        own.read_until(12)
        own.allocate(14)
        for _ in range(3):
            own.fill()
            own.go_to(12)
            cache = copy.deepcopy(own.cache)
            for _ in range(2):
                expected = own.model(input_ids=own.token, past_key_values=cache, use_cache=True).logits
                torch.testing.assert_close(own.forward(), expected)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama"])
def test_the_bytes_of_sliding_windows(family):
    """Layers with a window read and hold its tokens only."""
    model = tiny(family, torch.float32).eval()
    reader = Reader(family, model, 1, 0)
    with torch.no_grad():
        reader.read_until(16)
    cost = step_cost(model, 16)
    assert cost.cache_bytes == reader.held_bytes()
    window = model.config.sliding_window if family != "llama" else 17
    layers, token = model.config.num_hidden_layers, cost.cache_written // model.config.num_hidden_layers
    types = getattr(model.config, "layer_types", None) or ["sliding_attention"] * layers
    assert cost.cache_read == token * sum(window if kind == "sliding_attention" else 17 for kind in types)


def test_the_bytes_of_states_in_half_precision():
    model = t2r.swap(tiny("gpt2", torch.float32), feature_size=4)
    full, half = step_cost(model, 16), step_cost(model, 16, state_dtype=torch.bfloat16)
    assert (half.cache_bytes, half.cache_read, half.cache_written) == (full.cache_bytes // 2,) * 3
    report = decoding.run({"RNN": model}, [8], engine=True, state_dtype=torch.bfloat16, **SHORT)
    moved = {point.model: point.bytes_moved for point in report.points}
    assert moved["RNN"] - moved["RNN, engine"] == full.moved(1) - half.moved(1) == full.cache_bytes
