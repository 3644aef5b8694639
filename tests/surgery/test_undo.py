"""A swap that is refused leaves the model as it was."""

import pytest
import torch

import t2r
from families import DIFFERENT, FAMILIES, batch, tiny
from t2r.surgery.undo import undoing


class Refused(Exception):
    pass


def described(model):
    """Return what a swap changes: the class and the attributes of each module, by identity, and the configuration."""
    modules = {}
    for name, module in model.named_modules():
        modules[name] = (
            type(module),
            {
                key: {inner: id(x) for inner, x in value.items()} if isinstance(value, dict) else id(value)
                for key, value in vars(module).items()
            },
        )
    learning = {name: p.requires_grad for name, p in model.named_parameters()}
    configs = [str((type(m.config), vars(m.config))) for m in model.modules() if hasattr(m, "config")]
    return modules, learning, configs


@pytest.mark.parametrize("model_type", sorted({*DIFFERENT, "opt", "fsmt", "gptj", "gemma3", "umt5"}))
def test_a_swap_is_undone(model_type):
    model, stock = tiny(model_type, FAMILIES[model_type].dtype), tiny(model_type, FAMILIES[model_type].dtype)
    model.train()
    next(model.parameters()).requires_grad_(False)
    before = described(model)

    def refuse():
        with undoing(model):
            t2r.swap(model)
            model.eval().requires_grad_(True)
            raise Refused

    with pytest.raises(Refused):
        refuse()
    assert described(model) == before
    inputs = batch(model_type, padding="right") | dict(FAMILIES[model_type].call)
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, stock(**inputs).logits)
    assert t2r.swap(model).t2r_config is not None


def test_what_is_kept_is_not_undone():
    model = tiny("llama")

    def refuse():
        with undoing(model) as swapped:
            t2r.swap(model)
            swapped.keep()
            raise Refused

    with pytest.raises(Refused):
        refuse()
    assert isinstance(model, t2r.T2RForCausalLM)
