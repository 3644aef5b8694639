"""The model card that is saved with a swapped model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from t2r._version import __version__
from t2r.config import OPTIONS, T2RConfig
from t2r.errors import T2RError
from t2r.storage import LARGEST_YAML, parse_yaml, read_text


def model_card(model: Any) -> str:
    """Return the Hugging Face model card of a swapped model."""
    config: T2RConfig = model.t2r_config
    base, license_ = origin(model.config.name_or_path)
    metadata: dict[str, Any] = {"library_name": "t2r", "base_model": base, "tags": ["t2r", "linear-attention", "rnn"]}
    metadata["pipeline_tag"] = pipeline_tag(model)
    if license_:
        metadata["license"] = license_
    chosen = {name: getattr(config, name) for name in OPTIONS if getattr(config, name) is not None}
    if config.merged:
        chosen["merged"] = True
    task = model.auto_class
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False).strip()}
---

# {base.split("/")[-1]} as an RNN

`{base}` ({model.config.model_type}) with its softmax attention swapped for a recurrence by t2r {__version__}:
{growth(model)}

```python
import t2r
from transformers import {task}

model = {task}.from_pretrained("this-folder")
```

The license of the base model applies to this one: {metadata.get("license", "see the base model's page")}.

## Options

| option | value |
| --- | --- |
{chr(10).join(f"| {name} | {value} |" for name, value in chosen.items())}
"""


def growth(model: Any) -> str:
    """Return how time and memory of generation grow with the length."""
    if not model.kept_layers():
        return "it generates in time linear in the length and with a state of fixed size."
    if not (kept := model.kept_sites(cross=False)):
        return (
            "it generates in time linear in the length of the target, with a state of fixed size.\n"
            "Cross attention stays exact: it keeps the keys and values of the source."
        )
    return (
        "its recurrent attention takes time linear in the length and has a state of fixed size.\n"
        f"Softmax attention remains in {len(kept)} of {model.count_layers()} layers: keys and values, and the time per "
        "token, grow with the length there."
    )


def pipeline_tag(model: Any) -> str:
    """Return the pipeline tag from the base model's card, or that of the model class if the card has none."""
    source = model.config.name_or_path
    named = front_matter(Path(source) / "README.md").get("pipeline_tag") if source else None
    if isinstance(named, str):
        return named
    return "text2text-generation" if model.config.is_encoder_decoder else "text-generation"


def origin(source: str) -> tuple[str, str | None]:
    """Return the base model's name and license. If the source is a t2r model, both come from its own card."""
    if not source:
        return "unknown", None
    folder = Path(source)
    card = front_matter(folder / "README.md")
    name = folder.resolve().name if folder.is_dir() else source
    if card.get("library_name") == "t2r":
        name = str(card.get("base_model") or name)
    return name, str(card["license"]) if card.get("license") else None


def front_matter(card: Path) -> dict[str, Any]:
    """Return the metadata of a model card; empty if there is none."""
    try:
        text = read_text(card, LARGEST_YAML) if card.is_file() else ""
        metadata = parse_yaml(text.split("---")[1], str(card)) if text.startswith("---") else None
    except T2RError:  # a card may be written in any way
        return {}
    return metadata if isinstance(metadata, dict) else {}
