"""The benchmarks of translation and memory, and the analytic model: correctness of the measurements, not speed."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import t2r
from families import tiny
from t2r.bench import memory, translating
from t2r.bench.analytic import step_cost
from t2r.bench.figures import memory_page, translating_page
from t2r.bench.models import add_feature_sizes, load_models
from t2r.bench.readers import EngineReader, Reader
from t2r.bench.summary import place
from t2r.errors import T2RError
from t2r.generation.engine.softmax import on_the_engine
from t2r.generation.engine.step import DecodeStep
from t2r.generation.state import check_vocabulary
from t2r.model.windows import with_windows


def built(*names):
    return load_models(names, dtype="float32", device="cpu")


def test_translation_with_the_models_of_the_paper():
    models = built(*translating.paper_models("tiny-mt"))
    add_feature_sizes(models, [4, 8])
    report = translating.run(models, [12, 4], batch=2, repeats=1, generate=True)
    assert [point.length for point in report.points] == [4] * 12 + [12] * 12
    held = {(point.model, point.length): point.cache_bytes for point in report.points}
    # Keys and values of the source and of all target tokens that were read, in 2 layers of width 64.
    assert held["softmax", 12] == held["softmax, generate()", 12] == 2 * (12 + 12) * 2 * 2 * 64 * 4
    heads, head = 2, 32
    assert held["T2R 32-4", 4] == held["T2R 32-4", 12] == 2 * (32 + 4) * (head + 1) * 2 * heads * 4
    assert held["T2R 32-4, generate()", 12] == held["T2R 32-4", 12]
    assert report.features["T2R 32-4"] == [32, 4]
    assert report.features["softmax"] is None
    notes = " ".join(translating.notes(report))
    for words in ("T2R 4 is smaller than softmax", "constant memory", "against ELU 64-64", "the paper's 15 %"):
        assert words in notes
    assert "Speed by feature size, at 12 tokens" in translating_page(report).html()
    assert json.loads(json.dumps(asdict(report)))["settings"]["batch"] == 2


def test_what_the_engine_does_not_support_is_measured_with_generate(caplog):
    """Softmax layers of T5 have a relative bias. FSMT has two vocabularies."""
    report = translating.run({"t5": tiny("t5")}, [4], batch=2, repeats=1)
    assert [point.model for point in report.points] == ["t5, generate()"]
    assert "t5 is measured with generate(), not with the engine" in caplog.text
    model = tiny("fsmt")
    model.set_input_embeddings(torch.nn.Embedding(7, 32, padding_idx=1))  # of the sources
    assert translating.Translator(model, 2).source(64).max() == 6
    with pytest.raises(T2RError, match="ends at 6"):
        check_vocabulary(model, [7])
    check_vocabulary(model, [6])


def test_a_window_of_equal_memory_takes_the_same_for_any_number_of_steps():
    models = built("softmax=random:tiny-lm", "T2R 8=random:tiny-lm,feature_size=8,merged")
    rows = [memory.run(models, context=64, steps=steps, repeats=1, memory=0.02).rows for steps in (1, 8)]
    assert [row.batch for row in rows[0][1:]] == [row.batch for row in rows[1][1:]]
    reader = EngineReader(Reader("teacher", with_windows(models["softmax"], 5), 2, 0))
    reader.read_until(32)
    reader.milliseconds(4)
    assert reader.decode.max_length is None
    assert int(reader.decode.own.lengths.max()) == 32 + 1 + 4  # every step reads a token
    assert {layer.window.keys.shape[1] for layer in reader.decode.own.layers} == {2 * 5}  # of two heads


def test_a_softmax_model_in_the_engine_computes_the_same():
    for family in ("gpt2", "llama", "marian"):
        model = tiny(family, torch.float64)
        ids = torch.arange(3, 9)[None]
        expected = model.generate(ids, max_new_tokens=12, num_beams=2)
        weights = [x.clone() for x in model.parameters()]
        shared = on_the_engine(model)
        assert torch.equal(t2r.Engine(shared)._attempt(ids, max_new_tokens=12, num_beams=2).result(), expected)
        assert all(a is b for a, b in zip(model.parameters(), shared.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
        assert not isinstance(model, type(shared))


def test_the_largest_batch_is_computed_from_counted_bytes():
    models = built(*memory.paper_models("tiny-lm"))
    report = memory.run(models, context=64, memory=0.004, steps=2, repeats=1)
    softmax, recurrent, window = report.rows
    weights = sum(x.nbytes for x in models["softmax"].parameters())
    token = 2 * 2 * 64 * 4
    assert softmax.sequence_bytes == 64 * token
    logits = memory.LOGITS * 4 * 200
    assert softmax.batch == (int(0.004 * 2**30) - weights) // ((64 + 2 + 1) * token + logits)
    assert not softmax.limited
    assert recurrent.tokens_per_second == pytest.approx(1e3 * recurrent.batch / recurrent.milliseconds)
    size = recurrent.sequence_bytes // token
    assert window.model == f"softmax, window of {size}"
    assert window.sequence_bytes == size * token
    assert memory.run(models, context=64, memory=0.004, most=2, steps=1, repeats=1).rows[0].limited
    assert "times the batch of softmax" in memory_page(report).html()
    half = memory.run(models, context=64, memory=0.004, most=1, steps=1, repeats=1, state_dtype=torch.bfloat16).rows[1]
    assert 2 * half.sequence_bytes == recurrent.sequence_bytes
    with pytest.raises(T2RError, match="more than 0 GiB"):
        memory.run(models, context=64, memory=0)
    with pytest.raises(T2RError, match="memory must be given"):
        memory.run(models, context=64)


def test_the_search_for_the_largest_batch():
    """Batches grow, and are then bisected, until the limit is known to a part in 32."""
    for limit, first in ((0, 1), (1, 1), (2, 1), (3, 9), (100, 75), (1000, 800), (1000, 1200)):
        tried = []

        class Pretended(memory.Search):
            def fits(self, rows, limit=limit, tried=tried):
                tried.append(rows)
                return rows <= limit

        batch, limited = Pretended(None, 1, 1, 0, False).measured(None, first)
        assert limit - limit // memory.PRECISION <= batch <= limit
        assert not limited
        assert len(tried) <= 8
    assert Pretended(None, 1, 1, 0, False).measured(64, 48) == (64, True)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", None),
        ("gpt2", {"feature_size": 4, "decay": True}),
        ("llama", {"rotary": False, "feature_size": 8, "grouped": False, "key_weights": True, "softmax_layers": [1]}),
        ("marian", {"feature_size": 4, "cross_feature_size": 8, "recurrent": "both", "merged": True}),
        ("marian", {"feature_size": 4, "recurrent": "both", "softmax_layers": [0]}),
        ("marian", {"feature_size": 4}),
    ],
)
def test_the_analytic_model_counts_operations_and_bytes(family, options):
    model, given = tiny(family, torch.float32), dict(options or {})
    merged = given.pop("merged", False)
    model = t2r.swap(model, **given) if given else model
    model = t2r.merge(model, force=True) if merged else model
    swapped, length, source = on_the_engine(model), 16, 12
    kept = bool(swapped.kept_layers())
    step = DecodeStep(swapped, 1, length + 1 if kept else None, source if kept and family == "marian" else None)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        step.forward()
    cost = step_cost(model, length, source)
    # Older versions of transformers compute the angles of rotary positions as a matrix product.
    angles = model.config.hidden_size // model.config.num_attention_heads if family == "llama" else 0
    assert counter.get_total_flops() - (cost.projections + cost.attention) in (0, angles)
    assert cost.cache_bytes == step.row_bytes(length, source)


def test_a_shape_of_the_other_task_is_refused_by_its_name():
    message = "is a language model; this benchmark requires an encoder-decoder: choose paper-mt, small-mt or tiny-mt"
    with pytest.raises(T2RError, match=message):
        translating.paper_models("tiny-lm")
    with pytest.raises(T2RError, match="gpt2-tiny is a language model"):
        translating.paper_models("gpt2-tiny")
    message = "is an encoder-decoder; this benchmark requires a language model: choose paper-lm, small-lm or tiny-lm"
    with pytest.raises(T2RError, match=message):
        memory.paper_models("tiny-mt")
    with pytest.raises(T2RError, match="no shape 'huge'"):
        translating.paper_models("huge")


def test_models_with_random_weights():
    models = built("random:tiny-lm", "k 8=random:tiny-lm,feature_size=8,decay=true")
    assert list(models) == ["random:tiny-lm", "k 8"]
    assert models["k 8"].t2r_config.decay
    for wrong, message in (
        ("random:huge", "no shape 'huge'"),
        ("random:tiny-lm,features=8", "no swap option 'features=8'"),
        ("random:tiny lm", "write random:SHAPE"),
    ):
        with pytest.raises(T2RError, match=message):
            built(wrong)
    assert built("random:marian-tiny")["random:marian-tiny"].config.model_type == "marian"
    with pytest.raises(T2RError, match="two models"):
        built("random:tiny-lm", "random:tiny-lm")
    with pytest.raises(T2RError, match="not an encoder-decoder"):
        translating.run(models, [8])
    with pytest.raises(T2RError, match="swapped already"):
        add_feature_sizes({"a": models["k 8"]}, [4])


def test_folders_may_have_labels(tmp_path):
    for name in ("one", "a=b"):
        tiny("gpt2", torch.float32).save_pretrained(tmp_path / name)
    given = [f"first={tmp_path / 'one'}", str(tmp_path / "one"), str(tmp_path / "a=b"), f"c={tmp_path / 'a=b'}"]
    models = load_models(given, dtype="float32", device="cpu")
    assert list(models) == ["first", given[1], given[2], "c"]
    with pytest.raises(T2RError, match=rf"two models have the name first: give one of them a label, LABEL={given[1]}"):
        load_models([given[0], given[0]], dtype="float32", device="cpu")
    with pytest.raises(T2RError, match="nowhere"):
        load_models([f"x={tmp_path / 'nowhere'}"], dtype="float32", device="cpu")


def test_one_thread_is_singular():
    settings = SimpleNamespace(dtype="float32", device="cpu", threads=1)
    assert place(settings) == "float32 on cpu (1 thread)"
    settings.threads = 2
    assert place(settings) == "float32 on cpu (2 threads)"


def test_values_that_are_no_yaml_are_refused():
    with pytest.raises(T2RError, match="the value of feature_size is not valid YAML"):
        built("random:tiny-lm,feature_size=[")
