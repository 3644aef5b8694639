"""A model continues only from states that it could have made. States of files and of callers pass the same check."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

import t2r
from engines import words
from families import batch, tiny
from t2r.attention.contents import LONGEST, Contents
from t2r.attention.masks import Padding
from t2r.attention.state_file import FORMAT, fingerprint

OPTIONS = {
    "recurrent": ("gpt2", {}),
    "kept": ("gpt2", {"softmax_layers": [1]}),
    "window": ("mistral", {"softmax_layers": [1]}),
}


def swapped(name="recurrent", **options):
    model_type, own = OPTIONS[name]
    return t2r.swap(tiny(model_type, torch.float32), **({"feature_size": 8} | own | options)).eval()


def read(model, padding=None):
    cache, given = model.make_cache(), batch("gpt2", padding=padding, size=2)
    with torch.no_grad():
        model(**given, past_key_values=cache, use_cache=True)
    return cache


def state_of(cache, layer=0):
    return cache.layers[layer].recurrence.state


def spoil(value):
    def change(cache):
        state_of(cache, 2).s[1, 0, 3, 0] = value

    return change


def longer(cache):
    cache.layers[1].length += 1


def endless(cache):
    for layer in cache.layers:
        layer.length = 2 * LONGEST


def fewer_rows(cache):
    cache.layers[2].batch_select_indices(torch.tensor([0]))


def missing_layer(cache):
    del cache.layers[2]


def missing_state(cache):
    cache.layers[2].recurrence.state = None


def half_missing(cache):
    cache.layers[2].recurrence.state = state_of(cache, 2)._replace(z=None)


def narrower(cache):
    cache.layers[2].recurrence.state = state_of(cache, 2).map(lambda x: x[:, :, :4])


def whole_numbers(cache):
    cache.layers[2].recurrence.state = state_of(cache, 2).map(lambda x: x.long())


def too_much_padding(cache):
    cache.padding = Padding(torch.tensor([0, 0]), torch.tensor([0, 10]))


def padding_of_one_row(cache):
    cache.padding = Padding(torch.tensor([0]), torch.tensor([1]))


def lost_key(cache):
    layer = cache.layers[1]
    layer.memories[0].keys = layer.keys[:, :, 1:]
    layer.memories[0].values = layer.values[:, :, 1:]


def spoiled_key(cache):
    cache.layers[1].keys[0, 0, 0, 0] = torch.nan


def window_of_other_tokens(cache):
    cache.layers[1].window.seen[0] += 1


DAMAGES = {
    "nan": ("recurrent", spoil(torch.nan), "self.2.s has values that are not finite"),
    "infinity": ("recurrent", spoil(torch.inf), "not finite"),
    "minus infinity": ("recurrent", spoil(-torch.inf), "not finite"),
    "uneven lengths": ("recurrent", longer, "its layers have read 9, 10 tokens"),
    "endless": ("recurrent", endless, "its layers have read"),
    "fewer rows": ("recurrent", fewer_rows, "layer self.2 is invalid"),
    "missing layer": ("recurrent", missing_layer, "it has other layers"),
    "missing state": ("recurrent", missing_state, "layer self.2 is invalid"),
    "half missing": ("recurrent", half_missing, "layer self.2 is invalid"),
    "narrower": ("recurrent", narrower, "layer self.2 has other memories"),
    "whole numbers": ("recurrent", whole_numbers, "layer self.2 is invalid"),
    "too much padding": ("recurrent", too_much_padding, "its padding does not match 2 sequences of 9 tokens"),
    "padding of one row": ("recurrent", padding_of_one_row, "its padding does not match 2 sequences of 9 tokens"),
    "lost key": ("kept", lost_key, "layer self.1 is invalid"),
    "spoiled key": ("kept", spoiled_key, "self.1.keys has values that are not finite"),
    "window": ("window", window_of_other_tokens, "its windows have not read 9 tokens"),
}


def entrances(model, state):
    """Return what continues from a state, or saves it."""
    ids = torch.tensor([[5, 6], [7, 8]])
    return {
        "generate": lambda: t2r.Engine(model).generate(ids, state=state, max_new_tokens=2),
        "submit": lambda: t2r.Engine(model).submit(ids[:1], state=state, max_new_tokens=2),
        "stream": lambda: list(t2r.Engine(model).stream(ids, state=state, max_new_tokens=2)),
        "each": lambda: list(t2r.Engine(model).generate_each([{"input_ids": ids, "state": state}])),
        "continue_from": lambda: model.continue_from(state, ids, max_new_tokens=2),
        "model.generate": lambda: model.generate(
            torch.ones(2, 12, dtype=torch.long), past_key_values=state, max_new_tokens=2
        ),
        "read_document": lambda: t2r.read_document(model, words(), "a text", state=state),
        "complete": lambda: t2r.generate(model, ["a", "b"], tokenizer=words(), state=state, max_new_tokens=2),
    }


def write(cache, model, path, **header):
    """Save a state without a check."""
    rows, lengths, tensors = Contents.of(cache)
    known = {"format": FORMAT, "fingerprint": fingerprint(model), "lengths": lengths, "rows": rows}
    tensors = {name: x.contiguous().clone() for name, x in tensors.items() if x is not None}
    save_file(tensors, path, metadata={"t2r_state": json.dumps(known | header)})


@pytest.mark.parametrize("name", DAMAGES)
def test_what_no_model_has_made_is_refused(name, tmp_path):
    kind, damage, message = DAMAGES[name]
    model = swapped(kind)
    state = read(model)
    damage(state)
    with pytest.raises(t2r.T2RError, match=message) as caught:
        state.checked(model)
    assert "\n" not in str(caught.value)
    if name != "half missing":  # a file without a tensor that the header does not promise
        with pytest.raises(t2r.T2RError, match=message):
            state.save(tmp_path / "state")
        assert not (tmp_path / "state").exists()
    write(state, model, tmp_path / "state")
    with pytest.raises(t2r.T2RError, match=message):
        model.load_state(tmp_path / "state")


@pytest.mark.parametrize("entrance", entrances(None, None))
@pytest.mark.parametrize("how", ["nan", "another model"])
def test_every_entrance_checks_a_state(entrance, how):
    model = swapped()
    if how == "nan":
        state, message = read(model), "not finite"
        state_of(state).z[0, 0, 0] = torch.nan
    else:
        state, message = read(swapped(feature_size=16)), "the state is of another model"
    with pytest.raises(t2r.T2RError, match=message):
        entrances(model, state)[entrance]()


def test_a_state_belongs_to_the_weights_that_made_it():
    """A copy of the model has the same weights; a model that only looks alike has not."""
    model, ids = swapped(), torch.tensor([[5, 6], [7, 8]])
    state = read(model)
    expected = model.continue_from(state, ids, max_new_tokens=3, do_sample=False)
    other = copy.deepcopy(model)
    assert torch.equal(other.continue_from(state, ids, max_new_tokens=3, do_sample=False), expected)
    with torch.no_grad():
        other.transformer.h[0].mlp.c_fc.weight.add_(1e-3)
    with pytest.raises(t2r.T2RError, match="of another model: the weights differ"):
        t2r.Engine(other).generate(ids, state=state, max_new_tokens=3)


@pytest.mark.parametrize("number", [0, -1, True, 1.0, "2", None])
def test_a_format_is_a_positive_number(number, tmp_path):
    model = swapped()
    write(read(model), model, tmp_path / "state", format=number)
    with pytest.raises(t2r.T2RError, match="its header is damaged"):
        model.load_state(tmp_path / "state")


def test_tensors_of_no_layer_are_refused(tmp_path):
    model = swapped()
    state = Contents.of(read(model))
    state.tensors["self.7.s"] = torch.zeros(2)
    header = {"format": FORMAT, "fingerprint": fingerprint(model), "lengths": state.lengths, "rows": state.rows}
    save_file({n: x.clone() for n, x in state.tensors.items()}, tmp_path / "state", {"t2r_state": json.dumps(header)})
    with pytest.raises(t2r.T2RError, match="it has tensors of no layer"):
        model.load_state(tmp_path / "state")


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_states_of_padded_prompts_are_whole(kind, padding):
    model = swapped(kind)
    state = read(model, padding)
    assert state.checked(model).rows == 2
    assert state.take(1).checked(model).rows == 1
    assert t2r.T2RCache.stack([state.take(0), state.take(1)]).checked(model).rows == 2
