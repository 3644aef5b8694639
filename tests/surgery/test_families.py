"""Tests that every family of models must pass after a swap."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DataCollatorWithFlattening,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    Trainer,
    TrainingArguments,
)
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.streamers import BaseStreamer
from transformers.pytorch_utils import Conv1D

import t2r
from families import FAMILIES, PAD, POSITIONS, VOCABULARY, batch, is_seq2seq, real_positions, some_slow, tiny
from t2r.attention.cache import cache_bytes
from t2r.attention.recurrence import recurrent_sites
from t2r.feature_maps import FEATURE_MAPS
from t2r.surgery.adapters import FAMILIES as SUPPORTED
from t2r.surgery.adapters import family as registered

# The output of every layer is rounded once. Logits are of order one to ten.
LOGITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.15}

family = pytest.mark.parametrize("model_type", FAMILIES)
family_or_slow = pytest.mark.parametrize("model_type", some_slow())
decoder = pytest.mark.parametrize("model_type", [f for f in FAMILIES if not is_seq2seq(f)])
seq2seq = pytest.mark.parametrize("model_type", [f for f in FAMILIES if is_seq2seq(f)])
kept = pytest.mark.parametrize("softmax_layers", [None, [1]], ids=["pure", "kept"])


def swapped(model_type, dtype=torch.float64, layers=None, **options):
    options = {"feature_size": 8, "recurrent": "both", "init": "identity"} | options
    return t2r.swap(tiny(model_type, dtype, layers=layers), **options)


def test_every_supported_family_has_a_row():
    assert set(SUPPORTED) == set(FAMILIES)


def projections(site):
    """Return the projections of an attention module by name, for every family."""
    return {name: m for name, m in site.named_children() if isinstance(m, nn.Linear | Conv1D)}


# --- The swap -----------------------------------------------------------------------------------------------


@family
@pytest.mark.parametrize("padding", ["left", "right"])
@kept
def test_exact_attention_in_the_swapped_modules_matches_the_teacher(model_type, padding, softmax_layers):
    dtype = FAMILIES[model_type].dtype
    teacher, model = tiny(model_type, dtype), swapped(model_type, dtype, softmax_layers=softmax_layers)
    inputs = batch(model_type, padding=padding)
    real = real_positions(inputs)
    with torch.no_grad():
        expected = teacher(**inputs, **FAMILIES[model_type].call).logits[real]
        recurrent = model(**inputs).logits[real]
        with t2r.exact_attention(model):
            actual = model(**inputs).logits[real]
    assert (actual - expected).abs().max() < LOGITS[dtype]
    assert (recurrent - expected).abs().max() > 1e-2  # the recurrence computes a different function


@family
def test_exact_attention_generates_what_the_teacher_generates(model_type):
    dtype = FAMILIES[model_type].dtype
    teacher, model = tiny(model_type, dtype), swapped(model_type, dtype)
    inputs = {k: v for k, v in batch(model_type).items() if k != "decoder_input_ids"}
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    with t2r.exact_attention(model):
        actual = model.generate(**inputs, **options)
        if not FAMILIES[model_type].generates:
            assert torch.equal(actual, model.generate(**inputs, **options, use_cache=False))
            return
    assert torch.equal(actual, teacher.generate(**inputs, **options))


@family
def test_the_model_stays_what_it_was(model_type):
    teacher, model = tiny(model_type), swapped(model_type)
    assert isinstance(model, type(teacher))
    assert type(model).__name__ == "T2R" + type(teacher).__name__
    before, after = set(teacher.state_dict()), set(model.state_dict())
    assert before <= after
    assert all(".feature_map." in name for name in after - before)
    assert model._no_split_modules == teacher._no_split_modules
    sites = recurrent_sites(model)
    assert len(sites) == (6 if is_seq2seq(model_type) else 3)
    assert not any(site.exact for site in sites)
    assert model.get_input_embeddings().num_embeddings == VOCABULARY
    if "resizing its embeddings" not in registered(model_type).lacks:
        model.resize_token_embeddings(VOCABULARY + 3)
        assert model(**batch(model_type)).logits.shape[-1] == VOCABULARY + 3


@family
@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_every_map_generates_the_same_with_and_without_a_cache(model_type, feature_map):
    model = t2r.swap(tiny(model_type), feature_map=feature_map, recurrent="both")
    assert_generates_like_recomputation(model, model_type, do_sample=False)


@decoder
@pytest.mark.parametrize(("shared", "grouped"), [(False, True), (True, False), (False, False)])
def test_separate_and_ungrouped_maps(model_type, shared, grouped):
    model = swapped(model_type, shared=shared, grouped=grouped)
    assert_generates_like_recomputation(model, model_type, do_sample=False)
    cache = model(**batch(model_type), past_key_values=model.make_cache()).past_key_values
    shape = registered(model_type).shape(recurrent_sites(model)[0])
    assert cache.layers[0].state.s.shape[1] == (shape.num_key_value_heads if grouped else shape.num_heads)


# --- Decay --------------------------------------------------------------------------------------------------

DECAY = {"decay": True, "rotary": False, "feature_map": "hedgehog", "feature_size": 8, "key_weights": True}


@family
@kept
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"do_sample": False}, id="greedy"),
        pytest.param({"num_beams": 3}, id="beams", marks=pytest.mark.slow),
    ],
)
def test_with_decay_it_generates_like_recomputation(model_type, softmax_layers, options):
    model = swapped(model_type, **DECAY, softmax_layers=softmax_layers)
    assert_generates_like_recomputation(model, model_type, **options)


@decoder
def test_padding_does_not_decay_the_state(model_type):
    model = swapped(model_type, **DECAY)
    for padding in ("left", "right"):
        inputs = batch(model_type, padding=padding)
        mask = inputs["attention_mask"].bool()
        with torch.no_grad():
            together = model(**inputs, position_ids=position_ids(mask)).logits
            for row, real in enumerate(mask):
                alone = model(inputs["input_ids"][row : row + 1, real]).logits[0]
                assert (together[row, real] - alone).abs().max() < LOGITS[torch.float64]


@decoder
def test_without_rotation_only_order_and_distance_matter(model_type):
    """The rotation affects exact attention but not the recurrence."""
    if registered(model_type).positions != "rotary":
        pytest.skip("it has no rotary positions")
    model, inputs = swapped(model_type, **DECAY), batch(model_type, padding=None)
    dtype = FAMILIES[model_type].dtype
    with torch.no_grad():
        here = model(**inputs).logits
        later = model(**inputs, position_ids=torch.arange(9)[None] * 3 + 7).logits
        assert torch.equal(here, later)
        teacher, exact = tiny(model_type, dtype), swapped(model_type, dtype, **DECAY)
        with t2r.exact_attention(exact):
            assert (exact(**inputs).logits - teacher(**inputs).logits).abs().max() < LOGITS[dtype]


@family
def test_with_decay_it_learns_from_exact_attention(model_type):
    """The transfer stage compares the outputs that the model computes later, from the same inputs of its maps."""
    model = swapped(model_type, **DECAY)
    inputs = batch(model_type, padding=None) | FAMILIES[model_type].call
    site, seen = recurrent_sites(model)[0], {}  # the inputs of the first site are the same in both cases

    def observe(observed, inputs, exact):
        if observed is site:
            seen.update(ours=site.imitate(inputs), exact=exact)

    with torch.no_grad(), t2r.exact_attention(model, observer=observe):
        model(**inputs)
    assert not torch.allclose(seen["ours"], seen["exact"], atol=1e-3)
    heard = []
    for projection in projections(site).values():
        projection.register_forward_pre_hook(lambda module, args: heard.append(args[0]))
    with torch.no_grad():
        model(**inputs)
    ours = seen["ours"].transpose(1, 2).flatten(2)
    assert torch.allclose(heard[-1].reshape(ours.shape), ours, atol=1e-9)  # the last one is the output projection's


# --- Generation = full recomputation ------------------------------------------------------------------------


def prompts(model_type, **options):
    return {k: v for k, v in batch(model_type, **options).items() if k != "decoder_input_ids"}


def assert_generates_like_recomputation(model, model_type, **options):
    inputs = prompts(model_type)
    # M2M100 derives positions from padding tokens, so a sampled padding token would change them, swapped or not.
    options = {"max_new_tokens": 7, "suppress_tokens": [PAD]} | options
    torch.manual_seed(0)
    cached = model.generate(**inputs, **options)
    torch.manual_seed(0)
    recomputed = model.generate(**inputs, **options, use_cache=False)
    assert torch.equal(cached, recomputed)


GENERATION = {
    "greedy": {"do_sample": False},
    "several samples": {"do_sample": True, "top_k": 20, "temperature": 0.8, "num_return_sequences": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True},
    "several beams": {"num_beams": 4, "num_return_sequences": 3, "do_sample": False},
    "length penalty": {"num_beams": 3, "length_penalty": 0.6, "early_stopping": True, "do_sample": False},
    "processors": {"do_sample": False, "min_new_tokens": 6, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@family
@kept
@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
def test_generates_like_recomputation(model_type, softmax_layers, options):
    model = swapped(model_type, softmax_layers=softmax_layers)
    assert_generates_like_recomputation(model, model_type, **options)


@family
@kept
@pytest.mark.parametrize("dtype", list(LOGITS))
def test_logits_of_every_step_equal_recomputation(model_type, softmax_layers, dtype):
    """Single steps, and chunks of several tokens, match one parallel forward."""
    model = swapped(model_type, dtype, softmax_layers=softmax_layers)
    inputs = batch(model_type)
    with torch.no_grad():
        positions = {} if is_seq2seq(model_type) else {"position_ids": position_ids(inputs["attention_mask"])}
        whole = model(**inputs, **positions, use_cache=False).logits
        pieces = in_pieces(model, inputs, [4, 1, 1, 2, 1])
    real = real_positions(inputs)
    assert (pieces - whole)[real].abs().max() < LOGITS[dtype]


def position_ids(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def in_pieces(model, inputs, lengths):
    """Return the logits of a sequence processed in parts with a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    cache, outputs, done = model.make_cache(), [], 0
    for length in lengths:
        now = slice(done, done + length)
        done += length
        piece = dict(inputs) | {name: inputs[name][:, now]}
        if name == "input_ids":
            mask = inputs["attention_mask"][:, :done]
            piece |= {"attention_mask": mask, "position_ids": position_ids(mask)[:, now]}
        out = model(**piece, past_key_values=cache, use_cache=True)
        outputs.append(out.logits)
    return torch.cat(outputs, dim=1)


@decoder
@kept
def test_a_padded_batch_equals_each_sequence_alone(model_type, softmax_layers):
    model = swapped(model_type, softmax_layers=softmax_layers)
    inputs = prompts(model_type)
    together = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    for row in range(len(together)):
        real = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
        alone = model.generate(real, attention_mask=torch.ones_like(real), max_new_tokens=6, do_sample=False)
        new = alone[0, real.shape[1] :]
        assert torch.equal(together[row, inputs["input_ids"].shape[1] :][: len(new)], new)


@seq2seq
@kept
def test_a_padded_source_equals_each_source_alone(model_type, softmax_layers):
    model = swapped(model_type, softmax_layers=softmax_layers)
    inputs = prompts(model_type, padding="right")
    together = model.generate(**inputs, max_new_tokens=6, num_beams=3, do_sample=False)
    for row in range(len(together)):
        real = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
        alone = model.generate(real, max_new_tokens=6, num_beams=3, do_sample=False)[0]
        assert torch.equal(together[row][: len(alone)], alone)


@family
@kept
def test_continuing_from_a_returned_or_saved_cache(model_type, softmax_layers, tmp_path):
    model = swapped(model_type, softmax_layers=softmax_layers)
    inputs = prompts(model_type, padding=None)
    options = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    whole = model.generate(**inputs, **options, max_new_tokens=10).sequences
    first = model.generate(**inputs, **options, max_new_tokens=4)
    if is_seq2seq(model_type):
        more = {**inputs, "decoder_input_ids": first.sequences}
    else:
        # With a mask, because a generated pad token would otherwise count as padding.
        more = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    first.past_key_values.save(tmp_path / "state")
    for cache in (first.past_key_values, model.load_state(tmp_path / "state")):
        again = model.generate(**more, **options, max_new_tokens=6, past_key_values=cache)
        assert torch.equal(again.sequences, whole)


@family
def test_stopping_criteria_processors_and_streamers(model_type):
    class Forbid(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.masked_fill(torch.arange(VOCABULARY) % 2 == 0, -float("inf"))

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), seen.count >= 5)

    class Seen(BaseStreamer):
        count = -1  # the prompt comes first

        def put(self, value):
            self.count += 1

        def end(self):
            self.ended = True

    seen, model = Seen(), swapped(model_type)
    inputs = {k: v[:1] for k, v in prompts(model_type, padding=None).items()}
    out = model.generate(
        **inputs,
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        streamer=seen,
        stopping_criteria=StoppingCriteriaList([After()]),
        logits_processor=LogitsProcessorList([Forbid()]),
    )
    new = out[0, 1:] if is_seq2seq(model_type) else out[0, inputs["input_ids"].shape[1] :]
    assert (new % 2 == 1).all()
    assert seen.ended
    assert 5 <= len(new) <= 6


# --- The state ----------------------------------------------------------------------------------------------


@family
def test_the_cache_is_recurrent_where_it_should_be(model_type):
    model = swapped(model_type, softmax_layers=[1])
    out = model(**batch(model_type), use_cache=True)
    caches = [out.past_key_values]
    if is_seq2seq(model_type):
        caches = [out.past_key_values.self_attention_cache, out.past_key_values.cross_attention_cache]
    for cache in caches:
        assert [layer.state is not None for layer in cache.layers] == [True, False, True]
        assert cache.get_seq_length() == 9
        assert cache.layers[0].state.s.dtype == torch.float64


@family
def test_any_dynamic_cache_will_do(model_type):
    """The base model and users create caches for softmax attention, which also work."""
    model, inputs = swapped(model_type), batch(model_type)
    stock = DynamicCache()
    if is_seq2seq(model_type):
        stock = EncoderDecoderCache(DynamicCache(), DynamicCache())
    out = model(**inputs, past_key_values=stock)
    assert torch.equal(out.logits, model(**inputs, use_cache=False).logits)
    assert cache_bytes(stock) == cache_bytes(model(**inputs, use_cache=True).past_key_values)
    hidden = model.base_model(**inputs, use_cache=True)
    assert torch.equal(hidden[0], model.base_model(**inputs, use_cache=False)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_state_is_float32_for_every_model_dtype(dtype):
    model = swapped("llama", dtype)
    out = model(**batch("llama"), use_cache=True)
    assert out.past_key_values.layers[0].state.s.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = swapped("llama", torch.float32)(**batch("llama"), use_cache=True)
    assert out.past_key_values.layers[0].state.s.dtype == torch.float32


# --- Refusals -----------------------------------------------------------------------------------------------


@decoder
def test_a_mask_that_is_not_padding_is_refused(model_type):
    model = swapped(model_type)
    ids = batch(model_type)["input_ids"]
    with pytest.raises(t2r.T2RError, match="4-D attention mask"):
        model(ids, attention_mask=torch.ones(3, 1, 9, 9, dtype=torch.float64))


@family
def test_refusals(model_type):
    model, inputs = swapped(model_type), prompts(model_type)
    with pytest.raises(t2r.T2RError, match="do not compute attention weights"):
        model(**batch(model_type), output_attentions=True)
    with pytest.raises(t2r.T2RError, match="is for caches of keys and values"):
        model.generate(**inputs, max_new_tokens=3, cache_implementation="offloaded")
    with pytest.raises(t2r.T2RError, match="would restore softmax attention"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(t2r.T2RError, match="already swapped"):
        t2r.swap(model)
    full = DynamicCache()
    full.update(torch.zeros(3, 4, 1, 8), torch.zeros(3, 4, 1, 8), 0)
    if not is_seq2seq(model_type):
        longer = {"input_ids": inputs["input_ids"], "attention_mask": torch.ones(3, 10)}
        with pytest.raises(t2r.T2RError, match="filled by a model with other attention"):
            model(**longer, past_key_values=full)


@family
def test_generating_past_the_positions(model_type):
    model, inputs = swapped(model_type), batch(model_type, padding=None, length=POSITIONS - 4)
    options = {"max_length": POSITIONS + 20, "do_sample": False, "eos_token_id": None}
    if registered(model_type).positions == "learned":
        with pytest.raises(t2r.T2RError, match=f"beyond the {POSITIONS} positions"):
            model.generate(**inputs, **options)
    else:
        assert model.generate(**inputs, **options).shape[1] == POSITIONS + 20


# --- Packed documents ---------------------------------------------------------------------------------------


@decoder
@kept
def test_packed_documents_equal_separate_ones(model_type, softmax_layers):
    model = swapped(model_type, softmax_layers=softmax_layers)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in (5, 1, 8)]
    collate = DataCollatorWithFlattening(return_tensors="pt")
    packed = collate([{"input_ids": d.tolist()} for d in documents])
    with torch.no_grad():
        together = model(input_ids=packed["input_ids"], position_ids=packed["position_ids"]).logits[0]
        separate = torch.cat([model(input_ids=d[None]).logits[0] for d in documents])
    assert (together - separate).abs().max() < LOGITS[torch.float64]
    with pytest.raises(t2r.T2RError, match="require use_cache=False"):
        model(input_ids=packed["input_ids"], position_ids=packed["position_ids"], use_cache=True)


# --- Training -----------------------------------------------------------------------------------------------


@family
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_reach_everything(model_type, autocast):
    model = swapped(model_type, torch.float32, softmax_layers=[1]).train()
    inputs = batch(model_type, padding="right")
    labels = inputs.get("decoder_input_ids", inputs["input_ids"])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = model(**inputs, labels=labels)
    assert out.past_key_values is None
    out.loss.backward()
    base = tiny(model_type, torch.float32).train()  # some parts get no gradient from text in the base model either
    base(**inputs, labels=labels, **FAMILIES[model_type].call).loss.backward()
    reached = {name for name, parameter in base.named_parameters() if parameter.grad is not None}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (name in reached or ".feature_map." in name):
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    maps = [p for n, p in model.named_parameters() if ".feature_map." in n]
    assert maps
    assert all(p.grad.abs().sum() > 0 for p in maps)


@family
def test_gradient_checkpointing_changes_nothing(model_type):
    if "gradient checkpointing" in registered(model_type).lacks:
        with pytest.raises(ValueError, match="does not support gradient checkpointing"):
            swapped(model_type).gradient_checkpointing_enable()
        return
    gradients = []
    for checkpointing in (False, True):
        model = swapped(model_type).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        inputs = batch(model_type, padding="right")
        labels = inputs.get("decoder_input_ids", inputs["input_ids"])
        model(**inputs, labels=labels).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys()
    for name in plain:
        assert torch.allclose(plain[name], checkpointed[name]), name


@family_or_slow
def test_the_real_trainer_trains_it(model_type, tmp_path):
    model = swapped(model_type, torch.float32)
    inputs = batch(model_type, padding="right", size=4)
    rows = [
        {k: v[i] for k, v in inputs.items()} | {"labels": inputs.get("decoder_input_ids", inputs["input_ids"])[i]}
        for i in range(4)
    ]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=12, learning_rate=1e-2, per_device_train_batch_size=4, report_to=[],
        use_cpu=True, bf16=True, save_strategy="no", logging_steps=1, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    auto = AutoModelForSeq2SeqLM if is_seq2seq(model_type) else AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@family
def test_a_peft_adapter_attaches(model_type):
    peft = pytest.importorskip("peft")
    model = swapped(model_type)
    targets = projections(recurrent_sites(model)[0])
    transposed = any(isinstance(module, Conv1D) for module in targets.values())
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(r=2, target_modules=list(targets), modules_to_save=None, fan_in_fan_out=transposed),
    )
    inputs = batch(model_type, padding="right")
    adapted(**inputs, labels=inputs.get("decoder_input_ids", inputs["input_ids"])).loss.backward()
    trained = [n for n, p in adapted.named_parameters() if p.grad is not None]
    assert trained
    assert all("lora" in n for n in trained)
    out = adapted.generate(**prompts(model_type), max_new_tokens=3, do_sample=False)
    assert out.shape[0] == 3


# --- Compilation --------------------------------------------------------------------------------------------


compiles_or_slow = pytest.mark.parametrize(
    "model_type", [pytest.param(f, marks=() if f in ("llama", "marian") else pytest.mark.slow) for f in FAMILIES]
)


def compiled_layers(model_type):
    """Return how many layers are compiled, which takes the time: in two families, the first layer differs."""
    return 2 if model_type in ("gemma2", "t5") else 1


@compiles_or_slow
def test_the_forward_compiles_to_one_graph(model_type):
    torch._dynamo.reset()
    model = swapped(model_type, torch.float32, layers=compiled_layers(model_type))
    inputs = batch(model_type, padding="right")
    # Families differ in Python code, which every backend traces. Two families are also traced down to operations with
    # gradients, which takes four times as long.
    whole = model_type in ("llama", "marian")
    with torch.set_grad_enabled(whole):
        expected = model(**inputs, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if whole else "eager")
        actual = compiled(**inputs, use_cache=False).logits
    assert torch.allclose(actual, expected, atol=1e-4)


@compiles_or_slow
def test_the_decoding_step_compiles_to_one_graph(model_type):
    torch._dynamo.reset()
    model = swapped(model_type, torch.float32, layers=compiled_layers(model_type))
    inputs = prompts(model_type, padding=None)
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        cache, again = model.make_cache(), None
        extra = {}
        if is_seq2seq(model_type):
            extra = {
                "encoder_outputs": model.get_encoder()(**inputs),
                "attention_mask": inputs["attention_mask"],
            }
        name = "decoder_input_ids" if is_seq2seq(model_type) else "input_ids"
        tokens = torch.randint(3, VOCABULARY, (3, 12))
        model(**{name: tokens[:, :4]}, **extra, past_key_values=cache)
        again = copy.deepcopy(cache)
        compiled = torch.compile(model, fullgraph=True, backend=count)
        for t in range(4, 12):
            step = {name: tokens[:, t : t + 1], **extra}
            expected = model(**step, past_key_values=cache).logits
            actual = compiled(**step, past_key_values=again).logits
            assert torch.allclose(actual, expected, atol=1e-4)
    assert len(graphs) <= 3, f"{len(graphs)} graphs for 8 steps: it recompiles as the sequence grows"


@family
@pytest.mark.slow
def test_four_thousand_tokens_in_constant_memory(model_type):
    """No cache layer grows: the cache has the same size after 4,096 tokens as after 64."""
    if registered(model_type).positions == "learned":
        pytest.skip("its table of learned positions is shorter")
    model = swapped(model_type, torch.float32)
    inputs = {k: v[:1] for k, v in prompts(model_type, padding=None).items()}
    held = []
    for tokens in (64, 4096):
        out = model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, return_dict_in_generate=True
        )
        held.append(cache_bytes(out.past_key_values))
        assert out.past_key_values.get_seq_length() >= tokens
    assert held[0] == held[1]


@decoder
def test_the_loss_is_the_loss_of_the_logits(model_type):
    model, inputs = swapped(model_type), batch(model_type, padding=None)
    labels = inputs["input_ids"]
    loss, logits = model(**inputs, labels=labels).loss, model(**inputs).logits
    expected = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    assert torch.allclose(loss.float(), expected, atol=1e-5)
