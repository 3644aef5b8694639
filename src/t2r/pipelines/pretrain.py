"""A tokenizer and a model of any attention, trained on some text from random weights. For baselines, and for teachers.

A model that is trained already can be trained on (`continued`): what its text alone teaches it, beside a conversion."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from t2r import __version__
from t2r.config import T2RConfig
from t2r.data.fingerprint import of_model, of_tokenizer
from t2r.data.mixture import Sources, parse_sources
from t2r.data.vocabulary import train_tokenizer
from t2r.errors import T2RError
from t2r.hub import choose_device, explained, load_model, load_tokenizer
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap
from t2r.reporting.inspection import state_lines
from t2r.storage import check_destination
from t2r.tasks import LanguageModeling
from t2r.tasks.language_modeling import max_positions
from t2r.training import processes
from t2r.training.arithmetic import without_denormals
from t2r.training.plan import check_options, check_report_to, over, within
from t2r.training.preset import Preset, load_preset, of_folder
from t2r.training.recipe import Recipe
from t2r.training.session import Session, as_table, as_yaml, caching, finite, table_of
from t2r.training.trainer import Settings

SOFTMAX = "softmax"
"""As a feature map: none, the attention that the model has anyway."""


@without_denormals()
def pretrain(
    config: str,
    out: str,
    *,
    train: Sources | None = None,
    valid: str | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    model_overrides: Sequence[str] = (),
    minutes: float | None = None,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    continued: bool = False,
    documents: bool = False,
    seed: int = 0,
    device: str = "auto",
    bf16: bool | None = None,
    compiled: bool | None = None,
    gradient_checkpointing: bool = False,
    limit: int | None = None,
    save_steps: int | None = None,
    report_to: str = "none",
    overwrite: bool = False,
    restart: bool = False,
    progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Train a language model from random initialization, and its tokenizer. Returns what was measured.

    Args:
        config: the name of a shipped preset, a YAML file, or the folder of a model, whose shape alone is taken (and its
            tokenizer).
        out: the folder to make. While it works, `out.run` beside it holds the unfinished run; the same call goes on.
        train: text files, globs, JSONL or `datasets:` names, with weights or without, as for `convert`. None: the texts
            that the recipe names.
        valid: a text to measure perplexity on, before and after.
        recipe: in place of the preset's own: a shipped recipe or a YAML file; `overrides` are `stage.field=value`.
        model_overrides: `field=value` of the model's configuration.
        minutes: time for all of it, loading and measuring included. What is left for the stages is shared in proportion
            to their tokens or steps; where it is short, the teacher writes less, fewer windows are measured, and a step
            has fewer tokens. None: as long as it takes.
        tokenizer: in place of the preset's own, which is trained on the text: one, or the folder of one.
        continued: start from the weights of `config`, a folder or a hub name, instead of random ones.
        seed: of the weights, the order of the text, and dropout. The weights are the same on every machine.
        bf16: train in bfloat16. None: on a GPU.
        compiled: compile layers and losses. None: on a GPU.
        gradient_checkpointing: less memory for activations, which are computed twice.
        limit: evaluate on so many windows only.
        save_steps: optimizer steps between checkpoints. None: a checkpoint every three minutes.
        restart: begin anew, where otherwise an unfinished run would go on.
        options: of the swap. With none of them the attention stays softmax, as it does with `feature_map="softmax"`.
    """
    began = time.monotonic()
    # What will be done, and everything that can be refused at once.
    check_options(options)
    check_report_to(report_to)
    check_destination(Path(out), overwrite)
    if continued and (options or model_overrides or tokenizer is not None):
        raise T2RError("continued training keeps the model as it is: give no tokenizer and no options of model or swap")
    preset = of_folder(config) if continued else load_preset(config, model_overrides)
    if recipe is not None:
        preset = dataclasses.replace(preset, recipe=recipe)
    plan = within(make_plan(preset, overrides), minutes)
    chosen = attention(preset.swap | plan.swap, options, seed)
    place = processes.join(choose_device(device))
    on_gpu = place.type == "cuda"
    settings = Settings(
        seed=seed,
        bf16=on_gpu if bf16 is None else bf16,
        compiled=on_gpu if compiled is None else compiled,
        gradient_checkpointing=gradient_checkpointing,
        save_steps=save_steps,
        report_to=report_to,
        progress=progress,
    )
    sources = parse_sources(plan.train if train is None else train)
    with caching():
        texts = [entry.source for entry in sources]
        tokens = make_tokenizer(preset, config, tokenizer, texts, progress, continued)
    shape = preset.make_config(tokens)
    facts = {"config": shape.to_dict(), "tokenizer": of_tokenizer(tokens), "swap": chosen}
    if continued:
        model = load_model(config, dtype="float32", device="cpu")
        facts["weights"] = of_model(model)
    else:
        model = make_model(shape, chosen, seed)
    plan = plan.for_positions(max_positions(model))
    sizes = [stage.block_size for stage in plan.stages]
    task = LanguageModeling(
        tokens,
        sources,
        valid,
        documents=documents,
        limit=limit,
        longest=max(sizes),  # a model from scratch has never read more
        seed=seed,
        progress=progress,
        caching=caching,
    )
    task.check(model, sizes)

    with Session(out, plan, task, settings, place, facts, minutes=minutes, began=began, restart=restart) as session:
        model.to(place)  # type: ignore[arg-type]
        session.prepare(model)
        results: dict[str, Any] = {
            "task": task.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "vocabulary": len(tokens),
            "tokens": task.tokens,
            "untrained": session.measure("untrained", model),  # if it is continued: as it was
            "stages": {},
        }
        for stage in plan.stages:
            model = session.train(model, stage)
            results["stages"][stage.name] = session.measure(stage.name, model)
        results["log"] = session.logs()
        results |= session.pace() | {"mixture": session.mixture()}
        results = finite(results)

        model.eval()
        done = dataclasses.replace(preset, recipe=plan.to_dict(), swap=chosen)  # with all that was changed on the way
        card = model_card(model, preset, chosen, results, continued)
        files = {"README.md": card, "preset.yaml": as_yaml(done.to_dict())}
        state = state_lines(model) if isinstance(model, T2RModel) else ()
        session.save(model, tokens, results, compared=False, overwrite=overwrite, files=files, state=state)
    return results


def make_plan(preset: Preset, overrides: Sequence[str]) -> Recipe:
    plan = preset.plan(overrides)
    for stage in plan.stages:
        if stage.objective != "task":
            raise T2RError(
                f"stage {stage.name!r} of recipe {plan.name} is a {stage.objective}, which needs a teacher: pretrain "
                "has none, and runs stages of the objective task"
            )
    return plan


def attention(planned: dict[str, Any], options: dict[str, Any], seed: int) -> dict[str, Any]:
    """The options of the swap: what the caller says over what the preset and its recipe say. None: softmax."""
    if options.get("feature_map") == SOFTMAX:
        if others := sorted(set(options) - {"feature_map"}):
            raise T2RError(f"softmax attention has no {', '.join(others)}: choose another feature_map")
        return {}
    chosen = over(planned, options)
    return chosen | {"seed": seed} if chosen else {}


def make_tokenizer(
    preset: Preset,
    config: str,
    tokenizer: PreTrainedTokenizerBase | str | None,
    sources: list[str],
    progress: bool,
    continued: bool = False,
) -> PreTrainedTokenizerBase:
    """The one that was given, the one in the folder of the model, or one that is trained on the text."""
    if isinstance(tokenizer, str):
        with explained(tokenizer, "the tokenizer of "):
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    elif tokenizer is None and (continued or Path(config).is_dir()):
        tokenizer = load_tokenizer(config)
    if continued and tokenizer is None:
        raise T2RError(f"{config} has no tokenizer: save the one it was trained with into that folder")
    if tokenizer is not None:
        return tokenizer
    wanted = preset.tokenizer or {"kind": "bpe", "vocab_size": preset.model["vocab_size"]}
    return train_tokenizer(sources, **wanted, progress=progress)


def make_model(shape: PreTrainedConfig, options: dict[str, Any], seed: int) -> PreTrainedModel:
    """Random weights, drawn on the CPU: the same on every machine, and whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        except (ValueError, RuntimeError) as error:
            raise T2RError(f"this configuration of {shape.model_type} makes no model: {error}") from error
    return swap(model, T2RConfig(**options)) if options else model


# --- What came of it ----------------------------------------------------------------------------------------


def summary(results: dict[str, Any]) -> Table:
    """What was measured, in the order in which it came about."""
    return as_table(*table_of(results, compared=False))


def model_card(
    model: PreTrainedModel, preset: Preset, options: dict[str, Any], results: dict[str, Any], continued: bool
) -> str:
    recurrent = isinstance(model, T2RModel)
    metadata = {
        "library_name": "t2r" if recurrent else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["t2r", "linear-attention", "rnn"] if recurrent else ["t2r"],
    }
    made = T2RConfig(**options).feature_map if recurrent else SOFTMAX
    start = f"the weights of {preset.name}" if continued else "random initialization"
    needs_us = recurrent or not type(model).__module__.startswith("transformers.")
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False).strip()}
---

# {preset.name}

A language model ({model.config.model_type}, {made} attention, {results["parameters"]:,} parameters)
trained from {start} by t2r {__version__}, on {results["tokens"]:,} tokens with a vocabulary of
{results["vocabulary"]:,}: preset.yaml and recipe.yaml say how.

```python
{"import t2r" + chr(10) if needs_us else ""}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("this-folder")
```
"""
