"""Trains a language or translation model from random weights, with its tokenizer, as a teacher or a baseline.

With `continued`, training starts from the weights of a trained model: a baseline for a conversion on the same text."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.table import Table
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from t2r._version import __version__
from t2r.config import T2RConfig
from t2r.data.fingerprint import of_model, of_tokenizer
from t2r.data.languages import set_languages
from t2r.data.mixture import parse_sources
from t2r.data.parallel.lines import parse_pairs
from t2r.data.parallel.vocabulary import target_size, train_pair_tokenizer
from t2r.data.vocabulary import train_tokenizer
from t2r.errors import T2RError
from t2r.hub import auto_class, choose_device, explained, load_model, load_tokenizer
from t2r.model.modeling import T2RModel
from t2r.model.proof import check_causal
from t2r.model.swap import swap
from t2r.options import Pretraining, SwapOptions
from t2r.options.calls import flat
from t2r.pipelines.common import Texts, complete, frozen_copy
from t2r.reporting.inspection_tables import state_lines
from t2r.storage import check_destination, kind_of, refuse_deleting, refuse_replacing
from t2r.surgery.adapters import repaired
from t2r.tasks.translation import TEACHER
from t2r.training.loop import processes
from t2r.training.planning.plan import check_report_to, over, within
from t2r.training.recipes.preset import Preset, load_preset, of_folder, shipped_presets
from t2r.training.recipes.recipe import Recipe
from t2r.training.sessions.run import run_folder
from t2r.training.sessions.session import Session, as_table, as_yaml, caching, table_of
from t2r.training.steps.arithmetic import without_denormals
from t2r.training.steps.job import Settings
from t2r.training.steps.optimizers import embeddings

SOFTMAX = "softmax"
"""As a feature map: no swap, the model keeps its softmax attention."""


@flat(Pretraining)
@without_denormals()
def pretrain(given: Pretraining) -> dict[str, Any]:
    """Train a language model, or with `source` a translation model, from random weights, and its tokenizer. Returns the
    results, which are also saved.

    An interrupted run is resumed by the same call.

    Args:
        config: the name of a shipped preset, a YAML file, or a model folder, whose configuration and tokenizer are
            used.
        out: the output folder. The unfinished run is kept in `out.run`.

    Without options of the swap, or with `feature_map="softmax"`, the attention stays softmax. The random weights depend
    only on the seed.
    """
    began = time.monotonic()
    # Check everything that can be checked before a model is loaded.
    config, out, minutes, seed = given.config, given.out, given.minutes, given.seed
    continued, tokenizer, options = given.continued, given.tokenizer, given.swap()
    check_report_to(given.report_to)
    check_destination(out, given.overwrite)
    for folder in (out, run_folder(out)):
        refuse_replacing(config if continued else None, folder)
    texts = Texts(**given.part(Texts))
    refuse_deleting([*texts.names(), given.recipe, tokenizer, config], out, run_folder(out))
    if (given.source_language or given.target_language) and not texts.translates:
        raise T2RError("languages are for translation: give parallel text (--src and --tgt)")
    if continued and (options or given.model_overrides or tokenizer is not None):
        raise T2RError("continued training does not change the model: give no tokenizer, model or swap options")
    if continued and config in shipped_presets() and kind_of(config) != "folder":
        raise T2RError(f"--continued requires a model folder or a hub name; {config} is a preset, which has no weights")
    preset = of_folder(config) if continued else load_preset(config, given.model_overrides)
    if given.recipe is not None:
        preset = dataclasses.replace(preset, recipe=given.recipe)
    check_kind(preset, texts)
    plan = within(make_plan(preset, given.overrides), minutes)
    if not plan.stages:
        raise T2RError(f"recipe {plan.name} trains nothing: choose another one")
    chosen = attention(preset.swap | plan.swap, options, seed)
    if chosen and preset.translates:
        chosen = {"recurrent": SwapOptions.recurrent} | chosen
    place = processes.join(choose_device(given.device))
    settings = Settings.on(place, **given.part(Settings))
    sources, targets = files_of(texts, plan)
    by_itself = TEACHER in targets
    if by_itself and not continued:
        raise T2RError("a model from random weights has no teacher: name files of targets")
    if not texts.translates and TEACHER in sources:
        raise T2RError(
            "pretraining has no teacher that generates text: name files to train on (--train); only convert trains on "
            "text by its teacher"
        )
    with caching():
        tokens = make_tokenizer(preset, config, tokenizer, sources, targets, given.progress, continued)
    shape = preset.make_config(tokens)
    if continued:
        model = load_model(config, dtype="float32", device="cpu")
    else:
        model = make_model(shape, chosen, seed, preset.init)
    check_reading(model)
    if texts.translates:
        set_languages(model, tokens, given.source_language, given.target_language)
    facts = {"config": shape.to_dict(), "tokenizer": of_tokenizer(tokens), "swap": chosen}
    if preset.init:
        facts["init"] = preset.init
    if continued:
        facts["weights"] = of_model(model)
    plan = texts.fitted(plan, model)
    sizes = [stage.block_size for stage in plan.stages]
    # The model is not trained on longer sequences, and so not measured on them.
    task = texts.task(plan, tokens, given, longest=max(sizes))
    task.check(model, sizes)

    with Session(
        out, plan, task, settings, place, facts, minutes=minutes, began=began, restart=given.restart
    ) as session:
        model.to(place)  # type: ignore[arg-type]
        # The author is as the teacher of a conversion: the same translations are cached.
        session.prepare(model, author=frozen_copy(model, settings) if by_itself else None)
        vocabularies = {"vocabulary": len(tokens)}
        if preset.separate:
            vocabularies["target_vocabulary"] = target_size(tokens)
        model, results = train_stages(session, model, vocabularies)
        results = complete(results, session)
        model.eval()
        done = dataclasses.replace(preset, recipe=session.plan.to_dict(), swap=chosen)  # with all overrides
        card = model_card(model, preset, chosen, results, continued)
        files = {"README.md": card, "preset.yaml": as_yaml(done.to_dict())}
        state = state_lines(model) if isinstance(model, T2RModel) else ()
        session.save(model, tokens, results, compared=False, overwrite=given.overwrite, files=files, state=state)
    return results


def train_stages(
    session: Session, model: PreTrainedModel, vocabularies: dict[str, int]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train all stages and measure the model before and after each. Returns the trained model and the results."""
    results: dict[str, Any] = {
        "task": session.task.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        **vocabularies,
        "tokens": session.task.tokens,
        "untrained": session.measure("untrained", model),  # of a continued model, before this training
        "stages": {},
    }
    for stage in session.plan.stages:
        model = session.train(model, stage)
        results["stages"][stage.name] = session.measure(stage, model)
    return model, results


def check_kind(preset: Preset, texts: Texts) -> None:
    """Raise T2RError if the model and the texts are not for the same task."""
    if texts.translates != preset.translates:
        raise T2RError(
            f"{preset.name} is an encoder-decoder: give it parallel text (--src, --tgt)"
            if preset.translates
            else f"{preset.name} is a language model: train it on text (--train), not on pairs (--src, --tgt)"
        )


def files_of(texts: Texts, plan: Recipe) -> tuple[list[str], list[str]]:
    """Return the training texts, or the sources and the targets of parallel text."""
    if not texts.translates:
        return [entry.source for entry in parse_sources(texts.sources(plan))], []
    pairs = parse_pairs(texts.source, texts.target, for_all=(TEACHER,))
    return [pair.source for pair in pairs], [pair.target for pair in pairs]


def make_plan(preset: Preset, overrides: Sequence[str]) -> Recipe:
    plan = preset.plan(overrides)
    for stage in plan.stages:
        if stage.objective != "task":
            raise T2RError(
                f"stage {stage.name!r} of recipe {plan.name} has the objective {stage.objective}, which requires a "
                "teacher: pretrain supports only the objective task"
            )
    return plan


def attention(planned: dict[str, Any], options: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the options of the swap: the caller's, over those of the preset and its recipe. Empty: softmax."""
    if options.get("feature_map") == SOFTMAX:
        if others := sorted(set(options) - {"feature_map"}):
            raise T2RError(f"feature_map softmax does not use {', '.join(others)}: choose another feature_map")
        return {}
    chosen = over(planned, options)
    return chosen | {"seed": seed} if chosen else {}


def make_tokenizer(
    preset: Preset,
    config: str,
    tokenizer: PreTrainedTokenizerBase | str | None,
    sources: list[str],
    targets: list[str],
    progress: bool,
    continued: bool = False,
) -> PreTrainedTokenizerBase:
    """Return the given tokenizer, the one in the model folder, or one trained on the text. `targets` are those of
    parallel text."""
    if isinstance(tokenizer, str):
        with explained(tokenizer, "the tokenizer of "):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    elif tokenizer is None and (continued or Path(config).is_dir()):
        tokenizer = load_tokenizer(config)
    if continued and tokenizer is None:
        raise T2RError(f"{config} has no tokenizer: save the model's tokenizer in that folder")
    if tokenizer is not None:
        return tokenizer
    wanted = preset.tokenizer or {"kind": "bpe", "vocab_size": preset.model["vocab_size"]}
    if preset.translates:
        return train_pair_tokenizer(sources, targets, wanted["vocab_size"], separate=preset.separate, progress=progress)
    return train_tokenizer(sources, **wanted, progress=progress)


def make_model(shape: PreTrainedConfig, options: dict[str, Any], seed: int, init: str = "") -> PreTrainedModel:
    """Make a model with random weights, drawn on the CPU: they depend only on the seed. `init` is that of a preset."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = auto_class(shape).from_config(shape, dtype=torch.float32)
            if init == "xavier":
                initialize_as_fairseq(model)
        except (ValueError, RuntimeError) as error:
            raise T2RError(f"this configuration of {shape.model_type} is not valid: {error}") from error
    return swap(model, T2RConfig(**options)) if options else repaired(model)


def check_reading(model: PreTrainedModel) -> None:
    """Raise T2RError unless the model has layers, and reads only what is before a position."""
    counts = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")
    for name in counts:
        if (count := getattr(model.config, name, None)) is not None and count < 1:
            raise T2RError(f"{name} must be at least 1; got {count}: the model would have nothing to train")
    if not model.config.is_encoder_decoder:
        check_causal(model)


def initialize_as_fairseq(model: PreTrainedModel) -> None:
    """Give linear layers the random weights of fairseq's transformer, by the names of its attention modules.

    With one standard deviation of 1 / sqrt(d_model) for all matrices, the output of a feed-forward layer would have six
    times the variance of fairseq's."""
    tables = embeddings(model)  # tied to the output layer
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in tables:
            narrow = name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj")
            nn.init.xavier_uniform_(module.weight, gain=2**-0.5 if narrow else 1.0)


# --- Results ------------------------------------------------------------------------------------------------


def summary(results: dict[str, Any]) -> Table:
    """Return the table of the results, in the order in which they were measured."""
    return as_table(*table_of(results, compared=False))


def model_card(
    model: PreTrainedModel, preset: Preset, options: dict[str, Any], results: dict[str, Any], continued: bool
) -> str:
    recurrent, translates = isinstance(model, T2RModel), model.config.is_encoder_decoder
    metadata = {
        "library_name": "t2r" if recurrent else "transformers",
        "pipeline_tag": "translation" if translates else "text-generation",
        "tags": ["t2r", "linear-attention", "rnn"] if recurrent else ["t2r"],
    }
    made = T2RConfig(**options).feature_map if recurrent else SOFTMAX
    start = f"the weights of {preset.name}" if continued else "random initialization"
    needs_us = recurrent or not type(model).__module__.startswith("transformers.")
    auto = "AutoModelForSeq2SeqLM" if translates else "AutoModelForCausalLM"
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False).strip()}
---

# {preset.name}

A {"translation" if translates else "language"} model ({model.config.model_type}, {made} attention, \
{results["parameters"]:,} parameters)
trained from {start} by t2r {__version__}, on {results["tokens"]:,} tokens with a vocabulary of
{results["vocabulary"]:,}. See preset.yaml and recipe.yaml.

```python
{"import t2r" + chr(10) if needs_us else ""}from transformers import {auto}

model = {auto}.from_pretrained("this-folder")
```
"""
