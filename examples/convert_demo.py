"""A transformer becomes an RNN while you watch: what that costs in quality, and what it gains in speed and memory.

The teacher is a small GPT-2 that was trained on novels with `t2r pretrain`; it lies beside this file, with an excerpt of
its text. No GPU, no network: about five minutes on two cores, or twenty with --full. Stop it anywhere; the same command
goes on where it was.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

import t2r
from t2r import environment
from t2r.adapters import family_of
from t2r.bench import decoding
from t2r.cli.common import calm
from t2r.evaluation import encode, perplexity, read_text
from t2r.generation.text import complete
from t2r.loading import choose_device, load_model, load_tokenizer
from t2r.page import COLORS, Page, bars, lines
from t2r.pipelines.convert import HEADER, rows
from t2r.pipelines.training import as_table, max_positions
from t2r.training.recipe import load_recipe

HERE = Path(__file__).parent

# The conversion. The maps learn first, alone, to give each layer's own attention outputs; then everything learns to
# give the teacher's distribution. Small batches: in minutes, the number of steps counts for more than their size.
RNN = {"feature_map": "hedgehog", "feature_size": 32, "shared": False, "decay": True}
BATCH_TOKENS = 1024
TRANSFER = ("transfer.learning_rate=1e-2", "transfer.warmup_steps=10")
DISTILL = ("distill.learning_rate=1e-3", "distill.warmup_steps=20")


@dataclass(frozen=True)
class Budget:
    """How long each stage is, and on how many windows of 512 tokens perplexity is measured."""

    transfer_steps: int
    distill_steps: int
    windows: int


SHORT = Budget(transfer_steps=150, distill_steps=400, windows=40)
FULL = Budget(transfer_steps=250, distill_steps=1200, windows=80)

PROMPT = "She opened the letter, and"
NEW_TOKENS, TEMPERATURE, SEED = 120, 0.8, 0
LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True)
class Student:
    """One way to convert the teacher."""

    name: str
    folder: str
    recipe: str = "distill-lm"
    options: dict[str, Any] = field(default_factory=lambda: RNN)


STUDENTS = [Student("RNN", "rnn")]
MORE = [
    Student("T2R-75%", "t2r-75", options=RNN | {"softmax_every": 4}),  # every fourth layer stays softmax attention
    Student("ELU", "elu", str(HERE / "distill-only.yaml"), {"feature_map": "elu"}),  # nothing to transfer to
]
