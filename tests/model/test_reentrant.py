"""Calls do not modify modules, configurations or tensors, so that one model serves many threads."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch

import t2r
from families import FAMILIES, batch, is_seq2seq, some_slow, tiny
from t2r.attention.recurrence import recurrent_sites

family = pytest.mark.parametrize("model_type", sorted(FAMILIES))
OPTIONS = {"feature_size": 8, "recurrent": "both", "softmax_layers": [1]}
FORGETS = {"decay": True, "rotary": False, "feature_map": "t2r", "activation": "softmax", "shared": False}


def swapped(model_type, dtype=torch.float64, **options):
    return t2r.swap(tiny(model_type, dtype), **(OPTIONS | options)).eval()


def in_threads(functions):
    """Return the results of functions that run concurrently, each in its own thread."""
    results, start = [None] * len(functions), threading.Barrier(len(functions))

    def work(i):
        start.wait()
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("model_type", some_slow())
def test_eight_threads_generate_what_each_generates_alone(model_type):
    model = swapped(model_type)
    prompts = [batch(model_type, seed=i) for i in range(8)]
    prompts = [{k: v for k, v in p.items() if not k.startswith("decoder")} for p in prompts]

    def generate(inputs):
        return model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)

    alone = [generate(inputs) for inputs in prompts]
    together = in_threads([lambda inputs=inputs: generate(inputs) for inputs in prompts])
    assert all(map(torch.equal, alone, together))


def test_a_thread_that_computes_exactly_does_not_disturb_the_others():
    model, inputs = swapped("llama", **FORGETS), batch("llama")
    with torch.no_grad():
        recurrent = model(**inputs, use_cache=False).logits
        with t2r.exact_attention(model):
            exact = model(**inputs, use_cache=False).logits
    assert not torch.allclose(recurrent, exact)

    def forward(mode):
        with torch.no_grad():
            if not mode:
                return [model(**inputs, use_cache=False).logits for _ in range(10)]
            with t2r.exact_attention(model):
                return [model(**inputs, use_cache=False).logits for _ in range(10)]

    for i, logits in enumerate(in_threads([lambda i=i: forward(i % 2) for i in range(6)])):
        assert all(torch.equal(x, exact if i % 2 else recurrent) for x in logits)


def tensors_of(model):
    """Return all tensors that are reachable from the attributes of the model's modules and configuration."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                found[name, key] = value
    return {k: type(v) for k, v in found.items()}, set(vars(model.config))


@family
@pytest.mark.parametrize("options", [{}, FORGETS], ids=["plain", "forgets"])
def test_a_forward_leaves_nothing_behind(model_type, options):
    model, inputs = swapped(model_type, torch.float32, **options), batch(model_type)
    for key, value in inputs.items():
        value.untouched = key
    before, attributes = tensors_of(model), {key: set(vars(value)) for key, value in inputs.items()}
    model(**inputs, use_cache=False).logits.sum().backward()
    with torch.no_grad(), t2r.exact_attention(model, observer=lambda *_: None):
        model(**inputs, use_cache=False)
    model.zero_grad()
    assert tensors_of(model) == before
    assert {key: set(vars(value)) for key, value in inputs.items()} == attributes


@family
def test_it_can_be_copied_pickled_and_saved_after_a_forward_with_gradients(model_type):
    model, inputs = swapped(model_type, torch.float32), batch(model_type)
    model(**inputs, use_cache=False).logits.sum().backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        for other in copies:
            assert type(other) is type(model)
            assert torch.equal(other(**inputs, use_cache=False).logits, expected)


@family
def test_no_state_is_alive_after_generate(model_type):
    model, inputs = swapped(model_type), batch(model_type)
    inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    made, make_cache = [], model.make_cache

    def noted():
        cache = make_cache()
        made.append(weakref.ref(cache))
        return cache

    model.make_cache = noted
    model.generate(**inputs, max_new_tokens=3, pad_token_id=0)
    del model.make_cache
    gc.collect()
    assert made
    assert not any(ref() is not None for ref in made)


def test_a_transfer_projects_queries_and_keys_once_per_site():
    model, inputs, seen = swapped("llama", torch.float32, softmax_layers=None, **FORGETS), batch("llama"), []
    for site in recurrent_sites(model):
        for part in (site.q_proj, site.k_proj):
            part.register_forward_hook(lambda *_: seen.append(1))
    observed = []
    with torch.no_grad(), t2r.exact_attention(model, observer=lambda site, inputs, exact: observed.append(exact)):
        model(**inputs, use_cache=False)
    assert len(observed) == len(recurrent_sites(model))
    assert len(seen) == 2 * len(observed)


def test_a_forward_takes_no_surplus_and_no_duplicate_arguments():
    model, inputs = swapped("gpt2"), batch("gpt2")
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(inputs["input_ids"], input_ids=inputs["input_ids"])
    with pytest.raises(TypeError, match="positional arguments"):
        model(*[None] * 40)


def test_the_class_of_a_swapped_model_builds_another_one():
    model = swapped("gpt2", torch.float32)
    again = type(model)(model.config)
    assert {name: x.shape for name, x in again.state_dict().items()} == {
        name: x.shape for name, x in model.state_dict().items()
    }
    assert again.t2r_config.softmax_layers == [1]


@pytest.mark.parametrize("model_type", ["gpt2", "marian"])
def test_its_family_is_found_once(model_type, monkeypatch):
    model, inputs = swapped(model_type), batch(model_type)
    inputs = {k: v for k, v in inputs.items() if not k.startswith("decoder")}

    def found_again(*args):
        raise AssertionError("the family is looked for at a call")

    monkeypatch.setattr("t2r.model.modeling.family_of", found_again)
    model.generate(**inputs, max_new_tokens=2, pad_token_id=0)
    assert is_seq2seq(model_type) == model.config.is_encoder_decoder
