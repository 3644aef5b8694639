"""Checks from the model tests of transformers that other tests do not cover, on swapped models.

Features that swapped models do not support are in `test_expected_refusals.py`.
"""

import copy
import io
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    GenerationConfig,
    WatermarkingConfig,
)

import t2r
from families import FAMILIES as ALL
from families import PAD, VOCABULARY, batch, is_seq2seq, tiny

FAMILIES = ["gpt2", "llama", "marian"]
KINDS = {"pure": {}, "kept": {"softmax_layers": [1]}}
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": PAD}


def swapped(model_type, dtype=torch.float64, layers=None, **options):
    return t2r.swap(
        tiny(model_type, dtype, layers=layers), **({"feature_size": 8, "recurrent": "both"} | options)
    ).eval()


def prompt(model_type, **options):
    return {name: x for name, x in batch(model_type, **options).items() if not name.startswith("decoder")}


def targets(inputs):
    return inputs.get("decoder_input_ids", inputs["input_ids"])


# --- Generation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_way_to_run_the_same_generation(model_type, kind):
    """The tokens do not depend on the cache, its kind, prefill chunks, or low-memory options."""
    model, inputs = swapped(model_type, **KINDS[kind]), prompt(model_type)
    expected = model.generate(**inputs, **GREEDY)
    ways = [{"use_cache": False}, {"low_memory": True}]
    ways += [{"cache_implementation": name} for name in ("dynamic", "static", "hybrid")]
    ways += [{"past_key_values": model.make_cache()}, {"past_key_values": model.make_static_cache(3, 32)}]
    if not is_seq2seq(model_type):
        ways.append({"prefill_chunk_size": 4})
    for way in ways:
        assert torch.equal(model.generate(**inputs, **GREEDY, **way), expected), way


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_batch_without_padding_on_a_static_cache(model_type):
    """GPT-2 reshapes its mask to the batch size, so a mask that is the same for all rows must have all rows."""
    model, inputs = swapped(model_type, **KINDS["kept"]), prompt(model_type, padding=None, size=2)
    how = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **how, use_cache=False)
    got = model.generate(**inputs, **how, cache_implementation="static")
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.logits, expected.logits)


@pytest.mark.parametrize(("model_type", "kind"), [("gpt2", "pure"), ("llama", "kept"), ("marian", "pure")])
def test_a_generation_on_a_static_cache_compiles_one_step_once(model_type, kind):
    """`generate` compiles the step on a GPU. A change of the shape or stride of an input would recompile it for each
    token."""
    torch._dynamo.reset()
    model, inputs, graphs = swapped(model_type, torch.float32, layers=2, **KINDS[kind]), prompt(model_type), []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    how = CompileConfig(fullgraph=True, dynamic=False, backend=count, mode=None)
    how._compile_all_devices = True
    for seed in range(2):
        inputs = prompt(model_type, seed=seed)
        got = model.generate(**inputs, **GREEDY, cache_implementation="static", compile_config=how)
        assert torch.equal(got, model.generate(**inputs, **GREEDY))
    assert len(graphs) == 1


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 3}], ids=["one", "beams", "many"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_sampling_is_the_same_on_every_cache(model_type, options):
    model, inputs, drawn = swapped(model_type), prompt(model_type), []
    for way in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        torch.manual_seed(1)
        drawn.append(model.generate(**inputs, **(GREEDY | {"do_sample": True}), **options, **way))
    assert all(torch.equal(drawn[0], other) for other in drawn)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_dictionary_has_scores_logits_and_hidden_states_of_every_step(model_type, beams):
    model, inputs = swapped(model_type), prompt(model_type)
    want = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
    out = model.generate(**inputs, **GREEDY, num_beams=beams, return_dict_in_generate=True, **want)
    bare = model.generate(**inputs, **GREEDY, num_beams=beams, return_dict_in_generate=True, use_cache=False, **want)
    assert torch.equal(out.sequences, bare.sequences)
    assert len(out.scores) == len(out.logits) == 5
    for one, other in zip(out.logits, bare.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    of_step = out.decoder_hidden_states if is_seq2seq(model_type) else out.hidden_states
    assert len(of_step) == 5
    assert all(len(layers) == model.count_layers() + 1 for layers in of_step)
    assert of_step[1][0].shape == (3 * beams, 1, 32)
    assert out.past_key_values.is_recurrent
    transitions = model.compute_transition_scores(out.sequences, out.scores, getattr(out, "beam_indices", None))
    assert bool(transitions.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_generation_goes_on_from_the_cache_that_it_returned(model_type, kind):
    model, inputs = swapped(model_type, **KINDS[kind]), prompt(model_type)
    how = GREEDY | {"eos_token_id": -1, "return_dict_in_generate": True}
    whole = model.generate(**inputs, **(how | {"max_new_tokens": 8, "min_new_tokens": 8}))
    first = model.generate(**inputs, **how)
    rest = how | {"max_new_tokens": 3, "min_new_tokens": 3}
    if is_seq2seq(model_type):
        given = inputs | {"decoder_input_ids": first.sequences}
    else:
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 5, dtype=torch.long)], 1)
        given = {"input_ids": first.sequences, "attention_mask": mask}
    second = model.generate(**given, past_key_values=first.past_key_values, **rest)
    assert torch.equal(second.sequences, whole.sequences)
    for part, layers in second.past_key_values.parts().items():
        for layer, other in zip(layers, whole.past_key_values.parts()[part], strict=True):
            assert layer.get_seq_length() == other.get_seq_length()
            if part == "self" and layer.state is not None:
                torch.testing.assert_close(layer.state.s, other.state.s, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "opt"])
@torch.no_grad()
def test_padding_on_the_left_changes_no_logits(model_type):
    model, ids = swapped(model_type), batch(model_type, padding=None)["input_ids"]
    plain = model(ids, attention_mask=torch.ones_like(ids)).logits[:, -1]
    padded = torch.nn.functional.pad(ids, (7, 0), value=PAD)
    mask = (torch.arange(16) >= 7).long().expand(3, -1)
    inputs = {"input_ids": padded, "attention_mask": mask}
    if "position_ids" in model._forward_names:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    torch.testing.assert_close(model(**inputs).logits[:, -1], plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_an_early_exit_guesses_for_the_whole_model(model_type, kind):
    """The layers after the exit have read no tokens, so there is nothing to crop."""
    model, inputs = swapped(model_type, **KINDS[kind]), {k: x[:1] for k, x in prompt(model_type).items()}
    layers = model.config.num_hidden_layers
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_early_exit=1), expected)
    assert model.config.num_hidden_layers == layers


@pytest.mark.parametrize("model_type", FAMILIES)
def test_assisted_sampling_and_guesses_by_another_model(model_type):
    model, assistant = swapped(model_type), t2r.swap(tiny(model_type, seed=1), feature_size=8, recurrent="both").eval()
    inputs = {k: x[:1] for k, x in prompt(model_type).items()}
    out = model.generate(**inputs, **(GREEDY | {"do_sample": True}), assistant_model=assistant)
    assert bool((out[:, -1] < VOCABULARY).all())
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=assistant), expected)
    stock = tiny(model_type, seed=1)
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=stock), expected)
    if not is_seq2seq(model_type):  # the other direction: a small RNN is the assistant of a transformer
        teacher = tiny(model_type)
        assert torch.equal(
            teacher.generate(**inputs, **GREEDY, assistant_model=model), teacher.generate(**inputs, **GREEDY)
        )


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_guidance_and_watermarks(model_type):
    model, inputs = swapped(model_type), prompt(model_type)
    for options in ({"guidance_scale": 1.5}, {"watermarking_config": WatermarkingConfig()}):
        cached, bare = (model.generate(**inputs, **GREEDY, **options, use_cache=cache) for cache in (True, False))
        assert torch.equal(cached, bare)


# --- Weights and configurations -----------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_embeddings_are_resized_and_saved(model_type, tmp_path):
    model, inputs = swapped(model_type, torch.float32), batch(model_type)
    before = model(**inputs).logits
    model.resize_token_embeddings(VOCABULARY + 5)
    after = model(**inputs).logits
    assert after.shape[-1] == VOCABULARY + 5
    torch.testing.assert_close(after[..., :VOCABULARY], before)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.vocab_size == VOCABULARY + 5
    assert torch.equal(loaded(**inputs).logits, after)


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_the_state_dict_is_the_model(model_type):
    """With torch.save, with load_state_dict into another object, and with the state_dict of `from_pretrained`."""
    model, inputs = swapped(model_type, torch.float32), batch(model_type)
    expected = model(**inputs).logits
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = t2r.swap(tiny(model_type, torch.float32, seed=1), feature_size=8, recurrent="both").eval()
    other.load_state_dict(state)
    assert torch.equal(other(**inputs).logits, expected)
    built = type(model).from_pretrained(None, config=model.config, state_dict=state)
    assert torch.equal(built(**inputs).logits, expected)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_keys_of_a_saved_file_are_those_of_the_model(model_type, tmp_path):
    model = swapped(model_type, torch.float32)
    model.save_pretrained(tmp_path)
    saved, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert saved.keys() <= state.keys()
    tied = {x.data_ptr() for name, x in state.items() if name in saved}
    derived = {name for name in state.keys() - saved.keys() if state[name].data_ptr() not in tied}
    assert all("embed_positions" in name for name in derived), derived  # computed sinusoidal positions
    before = next(name for name in saved if "feature_map" in name)
    assert torch.equal(saved[before], state[before])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_half_precision_after_the_swap(model_type, dtype):
    model, inputs = swapped(model_type, torch.float32), batch(model_type)
    expected = model(**inputs).logits
    half = copy.deepcopy(model).to(dtype)
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    logits = half(**inputs).logits
    assert logits.dtype == dtype
    error = (logits.float() - expected).abs().mean() / expected.abs().mean()
    assert error < (0.01 if dtype == torch.float16 else 0.08)  # mantissas of ten and seven bits, three layers
    assert half.generate(**prompt(model_type), **GREEDY).shape[0] == 3


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_outputs_as_a_tuple_and_as_embeddings(model_type):
    model, inputs = swapped(model_type), batch(model_type)
    expected = model(**inputs, output_hidden_states=True)
    as_tuple = model(**inputs, output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], expected.logits)
    embedded = dict(inputs)
    ids = embedded.pop("input_ids")
    embeds = model.get_input_embeddings()(ids)
    if is_seq2seq(model_type):
        embeds = embeds * model.get_encoder().embed_scale
    torch.testing.assert_close(model(inputs_embeds=embeds, **embedded).logits, expected.logits)


@pytest.mark.parametrize("family", ALL)
@torch.no_grad()
def test_hidden_states_are_those_that_the_base_model_returns(family):
    """transformers records them by the classes of modules, and returns None for a class that it does not know."""
    base, inputs = tiny(family, ALL[family].dtype, layers=2), batch(family) | {"output_hidden_states": True}
    expected = base(**inputs)
    found = t2r.swap(base, feature_size=4)(**inputs)
    for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states"):
        states = [getattr(out, name, None) for out in (expected, found)]
        shapes = [None if each is None else [x.shape for x in each] for each in states]
        assert shapes[0] == shapes[1], name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_hidden_states_keep_their_gradients(model_type):
    model, inputs = swapped(model_type).train(), batch(model_type)
    out = model(**inputs, labels=targets(inputs), output_hidden_states=True)
    hidden = (out.decoder_hidden_states if is_seq2seq(model_type) else out.hidden_states)[0]
    hidden.retain_grad()
    out.loss.backward()
    assert hidden.grad is not None
    assert bool(hidden.grad.abs().sum() > 0)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_it_is_exported_as_one_graph(model_type):
    model, inputs = swapped(model_type, torch.float32), batch(model_type)
    with torch.no_grad():
        program = torch.export.export(model, (), inputs | {"use_cache": False}, strict=False)
        got = program.module()(**inputs, use_cache=False).logits
        torch.testing.assert_close(got, model(**inputs, use_cache=False).logits)


def test_a_field_of_the_base_model_can_be_set_by_either_name_when_loading(tmp_path):
    """`num_hidden_layers`, an alias of GPT-2's `n_layer`, is passed from an Auto class to the base model."""
    model = swapped("gpt2", torch.float32)
    model.save_pretrained(tmp_path)
    config = t2r.T2RConfig.from_pretrained(tmp_path)
    config.num_hidden_layers = 2
    assert config.base_config.n_layer == 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, layer_norm_epsilon=1e-3)
    assert loaded.config.layer_norm_epsilon == 1e-3


def test_a_generation_configuration_is_saved_beside_the_model(tmp_path):
    model = swapped("llama", torch.float32)
    model.generation_config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=3, pad_token_id=PAD)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["top_k"] == 3
    assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.max_new_tokens == 7
