"""Families that require no code of their own: a row each."""

from __future__ import annotations

import functools
from typing import Any

from t2r.surgery.adapters.bart import BartRecurrence
from t2r.surgery.adapters.base import Family
from t2r.surgery.adapters.marian import SinusoidalTableFamily
from t2r.surgery.adapters.t5 import T5Recurrence, t5_like

LLAMA = functools.partial(Family, plain_projections=True)
BART: dict[str, Any] = {"layers": "decoder.layers", "cross_attention": "encoder_attn", "recurrent": BartRecurrence}

ROWS = (
    Family(
        "adaptive_lm",
        "The language model of the paper (adaptive LM, Baevski and Auli): BART's projections, sinusoidal positions",
        recurrent=BartRecurrence,
        positions="sinusoidal",
        lacks=frozenset({"resizing its embeddings"}),
    ),
    Family(
        "blenderbot",
        "Blenderbot: conversational BART with normalization before each layer",
        **BART,
        positions="learned",
        positions_by_row=True,
    ),
    Family(
        "blenderbot-small",
        "Blenderbot Small: the 90M Blenderbot, with normalization after each layer",
        **BART,
        positions="learned",
        positions_by_row=True,
    ),
    LLAMA("gemma", "Gemma: Llama with a head size that is independent of the hidden size"),
    Family("gemma3_text", "Gemma 3 text models: sliding windows in most layers, normalized queries and keys"),
    LLAMA("granite", "Granite: Llama with multipliers, including one for the attention scores"),
    LLAMA(
        "llama",
        "Llama and models with its architecture (SmolLM, TinyLlama, Vicuna): rotary positions, grouped-query attention",
    ),
    Family("m2m_100", "M2M100 and NLLB: sinusoidal positions, computed as needed", **BART, positions="sinusoidal"),
    Family("mbart", "mBART: multilingual BART with normalization before each layer", **BART, positions="learned"),
    LLAMA("mistral", "Mistral: Llama with a sliding window"),  # recurrent layers have none: they read everything
    t5_like("mt5", T5Recurrence, about="mT5: multilingual T5 with gated feed-forward layers"),
    Family("olmo", "OLMo: Llama with layer norms without weights, and optional clipping of queries, keys and values"),
    Family("olmo2", "OLMo 2: normalized queries and keys, and normalization after each layer"),
    SinusoidalTableFamily(
        "pegasus",
        "Pegasus: BART with sinusoidal positions and normalization before each layer",
        **BART,
        positions="sinusoidal",
        positions_by_row=True,
    ),
    LLAMA("phi", "Phi 1, 1.5 and 2: attention parallel to the feed-forward, rotary positions in part of each head"),
    Family("phi3", "Phi 3 and 3.5 mini: Llama with fused projections and a sliding window"),
    Family("plbart", "PLBART: BART for programming languages", **BART, positions="learned"),
    LLAMA("qwen2", "Qwen 2 and 2.5: Llama with biases in the query, key and value projections"),
    Family("qwen3", "Qwen 3: queries and keys are normalized and then rotated, before the feature map"),
    LLAMA("stablelm", "StableLM: Llama with layer norms and rotary positions in part of each head"),
)
FAMILIES = {row.model_type: row for row in ROWS}
