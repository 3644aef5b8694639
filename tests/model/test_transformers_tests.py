r"""The model tests of transformers, run on swapped models.

They are not in its package. `T2R_TRANSFORMERS` names a checkout of the installed version, without which nothing here
runs; they need the packages `parameterized` and `timeout-decorator`:

    T2R_TRANSFORMERS=~/transformers HF_HUB_OFFLINE=1 python -m pytest -q -o addopts= -o xfail_strict=false \
        --import-mode=importlib tests/model/test_transformers_tests.py

What fails by design is in `REASONS`. A test that fails and is not there fails here.
"""

import importlib
import os
import re
import sys
from pathlib import Path

import pytest
import transformers

import t2r

CHECKOUT = os.environ.get("T2R_TRANSFORMERS")
if CHECKOUT is None:
    pytest.skip("T2R_TRANSFORMERS names no checkout of transformers", allow_module_level=True)
for name in ("parameterized", "timeout_decorator"):
    pytest.importorskip(name)
sys.path[:0] = [CHECKOUT, str(Path(CHECKOUT, "utils"))]
sys.modules.pop("tests", None)  # the folder of ours, which has the same name

MODELS = {
    "gpt2": ("GPT2ModelTest", "GPT2LMHeadModel"),
    "llama": ("LlamaModelTest", "LlamaForCausalLM"),
    "marian": ("MarianModelTest", "MarianMTModel"),
    "mistral": ("MistralModelTest", "MistralForCausalLM"),
    "opt": ("OPTModelTest", "OPTForCausalLM"),
    "qwen3": ("Qwen3ModelTest", "Qwen3ForCausalLM"),
    "t5": ("T5ModelTest", "T5ForConditionalGeneration"),
}
NO_KEYS = "a state has no keys and values to count"
REASONS = {
    r".*::test_assisted_decoding_.*": "sets another attention function, which would restore softmax attention",
    r".*::test_can_set_attention_dynamically": "sets another attention function, which would restore softmax attention",
    r".*::test_capture_outputs_decorator": "asks for attention weights, which recurrent layers do not compute",
    r".*::test_custom_4d_attention_mask": "recurrent layers support padding masks only",
    r".*::test_(beam_search|greedy)_generate_dict_outputs_use_cache": NO_KEYS,
    r".*::test_generate_compilation_all_outputs": NO_KEYS,
    r".*::test_past_key_values_format": NO_KEYS,
    r".*::test_generate(_from_inputs_embeds)?_with_static_cache": "its cache is of another class",
    r".*::test_generate_compile_model_forward_fullgraph": "its static cache is a DynamicCache, too",
    r".*::test_inherits_generation_mixin": "the bases of its class are in another order",
    r".*::test_cannot_load_with_meta_device_context_manager": "the error is a T2RError",
    r".*::test_model_weights_reload_no_missing_tied_weights": "loading is strict",
    r".*::test_correct_missing_keys": "a body without its head is not a saved model of t2r",
    r"marian::test_share_encoder_decoder_embeddings": "loading is strict",
    r".*::test_from_pretrained_no_checkpoint": "the configuration of the base model has no options of the swap",
    r"t5::test_training_gradient_checkpointing.*": "the relative bias has no effect if all layers are recurrent",
}
"""Regular expressions of `family::test`, and why they fail by design. Some do not fail for every family."""


def swapping(stock):
    """Return a class that makes swapped models of the given class, and loads them."""
    recurrent = []

    class Swapped(stock):
        def __new__(cls, *args, **options):
            model = t2r.swap(stock(*args, **options), feature_size=8)
            recurrent[:] = [type(model)]
            return model

        @classmethod
        def from_pretrained(cls, *args, **options):
            return (recurrent or [stock])[0].from_pretrained(*args, **options)

    Swapped.__name__ = stock.__name__
    return Swapped


def on_swapped_models(family, name, stock):
    """Return the tests of a model of transformers for its swapped form."""
    base = getattr(importlib.import_module(f"tests.models.{family}.test_modeling_{family}"), name)
    only = (swapping(stock),)

    def set_up(self):
        base.setUp(self)
        self.all_model_classes = only
        tester = self.model_tester
        tester.__class__ = type(type(tester).__name__, (type(tester),), {"all_model_classes": only})

    body = {"setUp": set_up, "all_generative_model_classes": only, "has_attentions": False}
    if base.all_model_classes is not None:
        body["all_model_classes"] = only
    for test in dir(base):
        reason = next((why for which, why in REASONS.items() if re.fullmatch(which, f"{family}::{test}")), None)
        if test.startswith("test_") and reason is not None:

            def method(self, test=test):
                return getattr(base, test)(self)

            body[test] = pytest.mark.xfail(reason=reason, strict=False)(method)
    return type(name, (base,), body)


for family, (name, stock) in MODELS.items():
    globals()[name] = on_swapped_models(family, name, getattr(transformers, stock))
