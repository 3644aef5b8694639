"""A model that is prepared for a stage."""

import pytest
import torch

from families import FAMILIES, batch, named, real_positions, tiny
from t2r import swap
from t2r.tasks.language_modeling import LanguageModeling
from t2r.training.loop.preparation import (
    compile_layers,
    disable_dropout,
    many_compilations,
    prepared,
    restore_layers,
    with_lora,
)
from t2r.training.recipes.stage import Stage
from t2r.training.steps.arithmetic import sound_gradients
from t2r.training.steps.job import Job, Settings


def with_dropout(model_type: str):
    """Return a small model with all kinds of dropout of its family, and softmax attention in its first layer."""
    model_class, config_class, fields = FAMILIES[model_type][:3]
    config = named(config_class)(**fields)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for name, value in part.to_dict().items():
            if "drop" in name and isinstance(value, float | int) and name != "classifier_dropout":
                setattr(part, name, 0.5)
    torch.manual_seed(0)
    return swap(named(model_class)(config), softmax_layers=[0], recurrent="both")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_disable_dropout(model_type):
    model, inputs = with_dropout(model_type), batch(model_type)

    def logits():
        torch.manual_seed(1)
        return model(**inputs, use_cache=False).logits[real_positions(inputs)]

    with torch.no_grad():
        expected = model.eval() and logits()
        model.train()
        noisy = logits()
        before = disable_dropout(model)
        torch.testing.assert_close(logits(), expected)
        for owner, name, share in before:
            setattr(owner, name, share)
        torch.testing.assert_close(logits(), noisy)
    if any(share for *_, share in before):
        assert (noisy - expected).abs().max() > 0.01


@pytest.mark.parametrize("model_type", ["gpt2", "marian"])
def test_dropout_is_restored_after_an_error(model_type):
    model = with_dropout(model_type)
    stage = Stage("distill", "distill", steps=1, dropout=False)

    def probabilities():
        modules = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        return modules + [x for name, x in model.config.to_dict().items() if "drop" in name and x is not None]

    def fail():
        with prepared(Job(LanguageModeling(None, [])), model, stage):
            assert not any(probabilities())
            raise ZeroDivisionError

    before = probabilities()
    assert 0.5 in before
    with pytest.raises(ZeroDivisionError):
        fail()
    assert probabilities() == before


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name, row in FAMILIES.items() if row.seq2seq])
def test_layers_are_compiled_once_for_all_shapes(monkeypatch, model_type):
    """For the first shape, then for all; those with softmax and with recurrent attention, and those of the encoder."""
    model_class, config_class, fields = FAMILIES[model_type][:3]
    torch.manual_seed(0)
    model = swap(
        named(model_class)(named(config_class)(**fields)).double().eval(), softmax_layers=[0], recurrent="both"
    )
    shapes = [(4, 9), (3, 12), (6, 7), (2, 16)]

    def results(shape):
        torch.manual_seed(0)
        inputs = {name: torch.randint(3, 90, shape) for name in ("input_ids", "decoder_input_ids")}
        inputs["attention_mask"] = (torch.arange(shape[1]) < torch.arange(3, 3 + shape[0])[:, None]).long()
        logits = model(**inputs, use_cache=False).logits
        trained = [p for p in model.parameters() if p.requires_grad]
        return logits, *torch.autograd.grad(logits.square().sum(), trained, allow_unused=True)

    expected = [results(shape) for shape in shapes]
    graphs, compiled, backend = [], torch.nn.Module.compile, torch._dynamo.lookup_backend("aot_eager")

    def count(graph, inputs):
        graphs.append(graph)
        return backend(graph, inputs)

    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: compiled(layer, backend=count, **how))
    torch.compiler.reset()
    with many_compilations():
        compile_layers(model, one_shape=False)
        for shape, values in zip(shapes, expected, strict=True):
            torch.testing.assert_close(results(shape), values)
        restore_layers(model)
    torch.compiler.reset()
    assert len(graphs) <= 2 * 4  # the first layers of T5 and FSMT differ from the others
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.parametrize(
    ("budget", "one_shape", "expected"),
    [
        ({"steps": 10}, True, True),
        ({"steps": 10}, False, False),
        ({"tokens": 10**9}, False, True),
        ({"minutes": 1}, False, False),
        ({"minutes": 60}, False, True),
        ({"epochs": 1}, False, False),
    ],
)
def test_layers_are_compiled_for_several_shapes_only_in_long_stages(monkeypatch, budget, one_shape, expected):
    monkeypatch.setattr(LanguageModeling, "one_shape", one_shape)
    model, stage = with_dropout("gpt2"), Stage("finetune", "task", **budget)
    with prepared(Job(LanguageModeling(None, []), settings=Settings(compiled=True)), model, stage):
        assert any(module._compiled_call_impl is not None for module in model.modules()) == expected
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.parametrize("documents", [False, True])
def test_masked_attention_is_not_trained_with_cudnn(documents):
    model, stage = with_dropout("gpt2"), Stage("finetune", "task", steps=1)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with prepared(Job(LanguageModeling(None, [], documents=documents)), model, stage):
        assert torch.backends.cuda.cudnn_sdp_enabled() == (before and not documents)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("length", [64, 192])
def test_gradients_of_masked_attention_are_finite_where_scores_are_far_below_zero(length):
    size = 64
    q, k, v = torch.randn(3, 1, 1, length, size, device="cuda", dtype=torch.bfloat16, requires_grad=True).unbind()
    low = torch.zeros_like(q)
    low[..., 0] = 31.0  # scores of about -120
    mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()[None, None]
    with sound_gradients():
        attend = torch.nn.functional.scaled_dot_product_attention
        out = attend(0.1 * q + low, 0.1 * k - low, v, attn_mask=mask)
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "adaptive_lm", "marian", "t5"])
def test_merged_adapters_are_the_trained_model(model_type):
    """Adapters of tied layers would also change the others when they are merged."""
    model = swap(tiny(model_type), feature_size=4, recurrent="both").eval()
    adapted = with_lora(model, Stage(name="a", objective="distill", steps=1, train="lora", lora_rank=2), 0).eval()
    for name, x in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(x, std=0.3)
    given = batch(model_type)
    with torch.no_grad():
        before = adapted(**given).logits
        after = adapted.merge_and_unload()(**given).logits
    torch.testing.assert_close(after, before)
