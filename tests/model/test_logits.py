"""Body and head, run separately, reproduce the logits of every family, swapped or not, from any thread."""

import threading

import pytest
import torch

import t2r
from families import FAMILIES, VOCABULARY, batch, tiny
from t2r.model.logits import AT_ONCE, LinearHead, Readout


def gives_whole_logits(model):
    """T5 and derived models have no body without a head, and FSMT's decoder returns logits."""
    return model.base_model is model or model.config.model_type == "fsmt"


def inputs_of(model_type):
    inputs = batch(model_type, padding="right" if FAMILIES[model_type].seq2seq else None)
    return inputs if FAMILIES[model_type].seq2seq else {"input_ids": inputs["input_ids"]}


def special(model_type):
    """Return a model whose operations after the head have an effect."""
    model = tiny(model_type, FAMILIES[model_type].dtype)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    if hasattr(model.config, "final_logit_softcapping"):
        model.config.final_logit_softcapping = 1.5
    return model


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_body_and_head_give_the_logits(model_type, swapped):
    model, inputs = special(model_type), inputs_of(model_type)
    if swapped:
        model = t2r.swap(model, feature_map="elu")
    readout = Readout(model, inputs)
    assert readout.split == (not gives_whole_logits(model))
    assert readout.out_features == VOCABULARY
    with torch.no_grad():
        states = readout.states(inputs)
        pieces = torch.cat([readout(piece) for piece in states.split(4, dim=1)], dim=1)
        torch.testing.assert_close(pieces, model(**inputs, use_cache=False).logits)
    assert states.shape[-1] == (VOCABULARY if gives_whole_logits(model) else 32)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("llama", LinearHead), ("gemma2", Readout), ("marian", LinearHead), ("bart", LinearHead), ("granite", LinearHead)],
)
def test_a_head_alone_is_a_projection(model_type, kind):
    readout = Readout(special(model_type), inputs_of(model_type))
    head = readout.projection
    assert type(head) is kind
    assert head.out_features == VOCABULARY
    states = torch.randn(3, 32, dtype=readout.model.dtype)
    torch.testing.assert_close(head(states), readout(states))


def test_an_unknown_head_gives_whole_logits():
    """If the head does not reproduce the logits, whole logits are computed for a few rows at a time."""
    model, inputs = tiny("llama"), inputs_of("llama")
    forward = model.forward
    model.forward = lambda **inputs: doubled(forward(**inputs))
    readout = Readout(model, inputs)
    assert not readout.split
    assert readout.projection is None
    with torch.no_grad():
        torch.testing.assert_close(readout(readout.states(inputs)), model(**inputs, use_cache=False).logits)
    assert readout.rows_at_once(torch.empty(10, 1 << 20, device="cpu")) == 1
    assert readout.rows_at_once(torch.empty(10, 64)) == AT_ONCE["cpu"] // (64 * VOCABULARY)


def doubled(out):
    out.logits = 2 * out.logits
    return out


def test_random_state_and_training_modes_are_unchanged():
    model = tiny("gpt2", torch.float32).train()
    model.transformer.h[0].eval()
    before, modes = torch.get_rng_state(), [m.training for m in model.modules()]
    Readout(model, inputs_of("gpt2"))
    assert torch.equal(before, torch.get_rng_state())
    assert modes == [m.training for m in model.modules()]


def test_several_threads_read_one_model():
    model = t2r.swap(tiny("llama"), feature_map="elu").eval()
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCABULARY, (2, 5 + i), generator=generator) for i in range(8)]
    with torch.no_grad():
        alone = [model(input_ids=ids, use_cache=False).logits for ids in texts]
    found: dict[int, torch.Tensor] = {}

    def read(i):
        readout = Readout(model, {"input_ids": texts[i]})
        with torch.no_grad():
            found[i] = readout(readout.states({"input_ids": texts[i]}))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, logits in enumerate(alone):
        torch.testing.assert_close(found[i], logits)
    graphs = []
    torch.compile(lambda x: x + 1, backend=lambda graph, _: graphs.append(graph) or graph.forward)(torch.zeros(1))
    assert graphs  # the threads have not left compiling disabled
