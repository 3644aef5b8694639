"""The experiment `larger`, with tiny models of both families."""

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig, Qwen2Config, Qwen2ForCausalLM

from repository import ROOT
from t2r.experiments.run import reproduce
from t2r.experiments.tables import record_tables

SHAPE = {
    "vocab_size": 3584,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""As many bytes of keys and values for each token as examples/teacher has, so that the same budgets are possible."""


def tiny(folder: Path) -> dict[str, str]:
    """Save tiny models with the tokenizer of examples/teacher. That of Gemma begins every text with BOS."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/teacher")
    models = {
        "qwen": Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "gemma": Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=64, sliding_window_pattern=2)),
    }
    for name, model in models.items():
        model.save_pretrained(folder / name)
        if name == "gemma":
            bos = tokenizer.bos_token
            begun = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
            tokenizer.backend_tokenizer.post_processor = begun
        tokenizer.save_pretrained(folder / name)
    return {name: str(folder / name) for name in models}


@pytest.mark.slow
def test_the_smallest_scale_runs_from_end_to_end(tmp_path):
    record = reproduce("larger", scale="smoke", models=tiny(tmp_path), out=tmp_path / "out")
    assert record["complete"]
    assert all("failed" not in part for part in record["steps"])
    chat = next(part["result"] for part in record["steps"] if part["name"] == "chat-plan")
    assert [each["new_tokens"] for each in chat] == [4, 4, 4, 4]
    tables = record_tables(record)
    assert sum(table.startswith("| prompt |") for table in tables) == 1
    assert len(tables[0].splitlines()) == 2 + 10  # conversions
