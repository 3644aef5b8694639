"""Check that what cannot be served is refused before anything is loaded, in one line that names it:

    python refusals.py MODEL

MODEL is a folder of a model that can be served; models that cannot are made beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig, GPT2Config, LlamaConfig

import t2r
from kinds import SIZES, plan, save_tokenizer
from t2r.errors import T2RError

TINY: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 512}


def refusal(model: Path, **options: Any) -> str:
    """Return what vLLM says about a model and its options, or that it accepts them."""
    from vllm.engine.arg_utils import EngineArgs

    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024} | options
    try:
        EngineArgs(str(model), **options).create_engine_config()
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, T2RError):
            # pydantic has errors of its own, with the first one inside
            inner = [e["ctx"]["error"] for e in getattr(found, "errors", list)() if "error" in e.get("ctx", {})]
            found = inner[0] if inner else found.__cause__
        return str(error if found is None else found)
    return "accepted"


def main(model: Path) -> None:
    beside = model.parent / "refused"
    gpt2 = t2r.swap(AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=512)))
    bart = t2r.swap(AutoModelForSeq2SeqLM.from_config(BartConfig(**TINY)))
    one = LlamaConfig(**SIZES | {"num_key_value_heads": 1})
    shared = t2r.swap(AutoModelForCausalLM.from_config(one), **plan([[8]] * 4))
    for name, made in (("gpt2", gpt2), ("bart", bart), ("shared", shared)):
        made.save_pretrained(beside / name)
        save_tokenizer(beside / name)
    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    cases: list[tuple[str, Path, dict[str, Any]]] = [
        ("accepted", model, {}),
        ("of type 'gpt2'", beside / "gpt2", {}),
        ("is an encoder-decoder", beside / "bart", {}),
        ("speculative decoding is not supported", model, {"speculative_config": draft}),
        ("pipeline parallelism is not supported", model, {"pipeline_parallel_size": 2}),
        ("adapters (LoRA) are not supported", model, {"enable_lora": True}),
        ("4 query heads and 2 key heads cannot be divided among 3", model, {"tensor_parallel_size": 3}),
        ("4 query heads and 1 key heads cannot be divided among 2", beside / "shared", {"tensor_parallel_size": 2}),
    ]
    failed = False
    for expected, folder, options in cases:
        said = refusal(folder, **options)
        wrong = expected not in said or "\n" in said
        failed = failed or wrong
        print(f"refusals, {folder.name} {options or ''}: {'WRONG' if wrong else 'equal'}: {said}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
