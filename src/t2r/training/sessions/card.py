"""The sections that training adds to a model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from t2r.words import counted


def completed(card: str, metadata: Mapping[str, str]) -> str:
    """Add metadata to the header of a model card. Existing fields are kept."""
    _, head, body = card.split("---\n", 2) if card.startswith("---\n") else ("", "", f"\n{card}")
    known = yaml.safe_load(head) or {}
    if known.get("pipeline_tag") == "text2text-generation":  # what any encoder-decoder is listed under
        del known["pipeline_tag"]
    return f"---\n{yaml.safe_dump(dict(metadata) | known, sort_keys=False)}---\n{body}"


def training_section(
    data: str, mixture: Sequence[Mapping[str, Any]], read: Mapping[str, int], state: Sequence[str]
) -> str:
    """Return a section on the training text, the tokens that each stage read, and the state of the model. Several
    sources are listed in a table."""
    lines = ["", "## Training", ""]
    if data:
        lines.append(f"- text: {data}")
    lines += [f"- {stage}: {tokens:,} tokens read" for stage, tokens in read.items()]
    lines += [f"- {line}" for line in state]
    if len(mixture) > 1:
        lines += ["", "| source | tokens | tokens read | share of tokens read |", "| --- | --- | --- | --- |"]
        for source in mixture:
            count, share = sum(source["read"].values()), source["share_read"]
            told = "" if share is None else f"{share:.1f} %"
            lines.append(f"| {Path(source['source']).name} | {source['tokens']:,} | {count:,} | {told} |")
    return "\n".join([*lines, ""])


def recall_lines(rows: Sequence[Mapping[str, Any]], teacher: Sequence[Mapping[str, Any]] = ()) -> list[str]:
    """Describe how often a word is recalled at each distance, in one line, and in another how often by the teacher."""
    if not rows:
        return []
    trials = counted(rows[0]["trials"], "trial")
    lines = [f"recall of a word mentioned once: {recalled(rows)} ({trials}, chance {rows[0]['chance']:.1%})"]
    return [*lines, f"recall of the teacher: {recalled(teacher)}"] if teacher else lines


def recalled(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(f"{100 * row['accuracy']:.0f} % after {row['distance']:,} tokens" for row in rows)
