"""Every family, and every choice of its recurrent attention, chooses the same tokens in the engine as in `generate`.

Models whose positions depend on more than their own row join a running batch only if that changes nothing."""

import copy
import inspect
import logging

import pytest
import torch

import t2r
from engines import alone, prompts
from families import DECODER, FAMILIES, PAD, SEQ2SEQ, batch, is_seq2seq, named, tiny
from t2r import Engine, T2RError

CHOICES = [
    (family, choice)
    for family in FAMILIES
    if FAMILIES[family].generates
    for choice in (("causal,cross", "causal", "cross") if is_seq2seq(family) else ("causal,cross",))
]
GREEDY = {"do_sample": False, "max_new_tokens": 4}


def ready(model):
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.eval()


def larger(model):
    """Return the model with weights whose errors show in the tokens."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return ready(model.double())


def joined(model, lengths=(5, 9, 2), options=GREEDY):
    """Return the tokens of prompts that join a running batch one after the other, and what `generate` adds to each."""
    given, engine = prompts(lengths), Engine(model)
    expected = [alone(model, prompt, **options) for prompt in given]
    sequences = []
    for prompt in given:
        sequences.append(engine.submit(prompt, **options))
        engine.step()
    list(engine.run())
    return [sequence.tokens for sequence in sequences], expected, engine


@pytest.mark.parametrize(("family", "choice"), CHOICES)
def test_every_choice_of_recurrent_attention(family, choice):
    model = ready(t2r.swap(tiny(family, FAMILIES[family].dtype, layers=1), feature_size=4, recurrent=choice))
    given = batch(family, padding="right" if is_seq2seq(family) else "left", size=2, length=5)
    given = {name: x for name, x in given.items() if not name.startswith("decoder")}
    engine = Engine(model)
    for options in (GREEDY, GREEDY | {"num_beams": 2})[: 2 if is_seq2seq(family) else 1]:
        assert torch.equal(engine.generate(**given, **options), model.generate(**given, **options))
    if family.endswith("t5") and choice == "cross":  # its causal attention has a relative bias
        with pytest.raises(T2RError, match="relative bias"):
            engine.submit(prompts([3])[0])
        return
    found, expected, _ = joined(model)
    assert found == expected


@pytest.mark.parametrize("name", ["Marian", "Pegasus", "Bart", "Blenderbot"])
@pytest.mark.parametrize("swapped", [True, False])
def test_decoders_that_count_the_tokens_of_their_cache(name, swapped, caplog):
    fields = SEQ2SEQ | {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "dropout": 0.0,
        "is_decoder": True,
        "is_encoder_decoder": False,
    }
    model = larger(named(f"{name}ForCausalLM")(named(f"{name}Config")(**fields)))
    model = t2r.swap(model, feature_size=4) if swapped else model
    found, expected, engine = joined(model)
    assert found == expected
    assert not any(message.startswith("falling back") for message in caplog.messages)
    given = batch("gpt2", padding="left")
    assert torch.equal(engine.generate(**given, **GREEDY), model.generate(**given, **GREEDY))
    assert "prompts have padding, which this model counts as positions" in caplog.text


SCALED = {
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}}),
    "longrope": (
        "Phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 12,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 12,
            },
        },
    ),
}


def scaled(kind):
    name, fields = SCALED[kind]
    torch.manual_seed(0)
    fields = DECODER | {"max_position_embeddings": 12, "num_hidden_layers": 2} | fields
    return larger(named(f"{name}ForCausalLM")(named(f"{name}Config")(**fields)))


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("options", [None, {}, {"softmax_layers": [1]}], ids=["softmax", "recurrent", "kept"])
def test_rotations_that_depend_on_the_longest_sequence(kind, options, caplog):
    """Up to the original length, sequences join. Longer ones would change those beside them."""
    model = scaled(kind)
    model = model if options is None else t2r.swap(model, feature_size=4, **options)
    fresh = copy.deepcopy(model)
    found, expected, engine = joined(model, lengths=(5, 8, 2))
    assert found == expected
    for length in (7, 20):
        (prompt,) = prompts([length])
        given = {"attention_mask": torch.ones_like(prompt), **GREEDY, "max_new_tokens": 6}
        own, other = copy.deepcopy(fresh), copy.deepcopy(fresh)  # transformers' modules remember what they have read
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert torch.equal(Engine(own).generate(prompt, **given), other.generate(prompt, **given))
        assert "depends on the longest sequence of a batch" in caplog.text
        with pytest.raises(T2RError, match="cannot join a running batch: beyond 12 tokens, the rotation"):
            engine.submit(prompt, max_new_tokens=6)


@pytest.mark.parametrize("kind", SCALED)
def test_a_model_without_a_rotation_has_no_such_limit(kind):
    stock = scaled(kind)
    prepare = inspect.getsource(type(stock).prepare_inputs_for_generation)
    if "past_key_values = None" in prepare and "next_sequence_length" not in prepare:
        pytest.skip(
            "generate() of this transformers drops the cache at the original length and reads the last token only"
        )
    model = t2r.swap(stock, feature_size=4, rotary=False)
    found, expected, _ = joined(model, lengths=(5, 20, 9), options=GREEDY | {"max_new_tokens": 8})
    assert found == expected


def test_a_step_that_reads_values_is_not_recorded(caplog):
    """JetMoE reads the number of tokens of each expert as a list."""
    fields = {"num_experts_per_tok": 1, "num_local_experts": 3, "kv_channels": 8, "num_key_value_heads": 4}
    fields["num_hidden_layers"] = 1
    model = larger(named("JetMoeForCausalLM")(named("JetMoeConfig")(**(DECODER | fields))))
    found, expected, engine = joined(model, options=GREEDY | {"max_new_tokens": 8})
    assert found == expected
    assert engine.rows.step.captured_as is None
    assert "runs eagerly: tolist reads the values of a tensor" in caplog.text
