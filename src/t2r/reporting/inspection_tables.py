"""What an inspection of a model says: tables of the layers and totals, and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from t2r.capacity import human
from t2r.ops.stored import EIGHT
from t2r.reporting.inspection import LENGTHS, Inspection, SiteReport, inspect_model

if TYPE_CHECKING:
    from rich.table import Table

EXACT_CROSS = (
    "cross attention stays exact, which loses nothing, and its keys and values do not grow with the target; "
    "--recurrent both replaces them by a state, as in the paper"
)


def tables(inspection: Inspection) -> list[Table | str]:
    """Return a table of the layers, one of the totals, and a summary."""
    from rich.table import Table

    shapes = dict.fromkeys((site.num_heads, site.num_key_value_heads, site.head_dim) for site in inspection.sites)
    heads = ", ".join(f"{n} heads of {dim}" + (f" in {kv} groups" if kv < n else "") for n, kv, dim in shapes)
    title = f"{inspection.model}: {inspection.model_type}, {inspection.dtype}, {heads}"
    layers = Table(box=None, padding=(0, 1, 0, 0))
    kv_headings = [f"KV {tokens(n)}" for n in LENGTHS]
    for heading in ("layer", "attention", "features", "added", "state", *kv_headings):
        layers.add_column(heading, justify="left" if heading == "attention" else "right", no_wrap=True)
    kind = "recurrent" if inspection.undecided is None else "undecided"
    for site in inspection.sites:
        layers.add_row(
            str(site.layer),
            f"{'cross ' if site.cross else ''}{described(site, kind)}",
            str(site.feature_size or "-"),
            f"{site.parameters_added:,}" if site.recurrent else "-",
            human(site.state_bytes) if site.state_bytes else "-",
            *(human(site.kv_bytes[n]) for n in LENGTHS),
        )
    whole = Table(box=None, padding=(0, 1, 0, 0))
    for heading in ("tokens", "KV cache of the base model", "state and KV of softmax layers", "ratio"):
        whole.add_column(heading, justify="right")
    for n in LENGTHS:
        before, after = inspection.kv_bytes[n], inspection.cache_bytes[n]
        whole.add_row(tokens(n), human(before), human(after), f"{before / after:.1f}×")
    return [title, "", layers, "", whole, "", *summary(inspection)]


def described(site: SiteReport, kind: str) -> str:
    """Return the kind of attention of a site, with the windows of its heads."""
    if site.windows is None or not site.recurrent:
        return kind if site.recurrent else "softmax"
    shown = " ".join(map(str, site.windows)) if len(set(site.windows)) > 1 else str(site.windows[0])
    return f"window {shown}" + (" + state" if site.state_bytes else "")


def summary(inspection: Inspection) -> list[str]:
    """Return a summary of the swap, one fact per line."""
    lines = []
    for cross, kind in ((False, "self"), (True, "cross")):
        sites = [site for site in inspection.sites if site.cross == cross]
        recurrent = sum(site.recurrent for site in sites)
        if recurrent and inspection.undecided is not None:
            recurrent -= inspection.undecided
        if sites:
            lines.append(
                f"{kind} attention: {recurrent} of {len(sites)} decoder layers recurrent, "
                f"{len(sites) - recurrent} softmax"
            )
    if inspection.undecided is not None:
        lines.append(
            f"softmax layers: t2r convert measures the sensitivity of all layers after the first stage, and keeps "
            f"softmax attention in {inspection.undecided} of them"
            + ("" if inspection.alike else "; bytes are those of the largest")
        )
    if inspection.encoder_layers:
        lines.append(f"encoder: all {inspection.encoder_layers} layers keep softmax attention")
    merged = " (feature maps are merged into the projections)" if inspection.merged else ""
    lines.append(
        f"parameters added: {inspection.parameters_added:,}{merged}, {inspection.share:.2%} of the base "
        f"model's {inspection.parameters:,}"
    )
    if sizes := [size for site in inspection.sites if site.recurrent for size in site.windows or []]:
        counts = ", ".join(f"{sizes.count(size)} of {size:,}" for size in sorted(set(sizes)))
        eight = any(site.window_nbits == EIGHT for site in inspection.sites)
        lines.append(f"windows of key-value heads: {counts} tokens{', keys and values of 8 bits' if eight else ''}")
    lines.append(
        f"per sequence: {human(inspection.state_bytes)} of state; at 4K tokens "
        f"{human(inspection.cache_bytes[4096])} in total, instead of {human(inspection.kv_bytes[4096])}"
    )
    if inspection.positions is not None and inspection.positions < max(LENGTHS):
        lines.append(f"positions are learned: {inspection.positions:,} tokens at most, also after a conversion")
    if inspection.exact_cross:
        lines.append(cross_line(inspection.exact_cross))
    if inspection.cross_saves_from is not None:
        lines.append(
            f"cross attention: its state takes less memory than keys and values for sources of "
            f"{inspection.cross_saves_from:,} tokens or more"
        )
    if inspection.ungrouped is not None:
        lines.append(
            f"with --no-grouped: {human(inspection.ungrouped.state_bytes)} of state and "
            f"{inspection.ungrouped.parameters_added:,} parameters added"
        )
    return lines


def cross_line(sites: Sequence[SiteReport]) -> str:
    """Say why cross attention stays exact, and what it costs."""
    length = next(iter(sites[0].kv_bytes))
    return f"{EXACT_CROSS} ({human(sum(site.kv_bytes[length] for site in sites) // length)} for each source token)"


def state_lines(model: PreTrainedModel) -> list[str]:
    """Describe the state of a swapped model: feature sizes and bytes."""
    found = inspect_model(model)
    sizes = sorted({site.feature_size for site in found.sites if site.feature_size is not None})
    recurrent = sum(site.recurrent for site in found.sites)
    lines = [
        f"feature size: {', '.join(map(str, sizes))} ({recurrent} of {len(found.sites)} attention modules recurrent)",
        f"state of a sequence: {found.state_bytes:,} bytes in {found.dtype}",
    ]
    if any(site.windows for site in found.sites if site.recurrent):
        longest = max(found.cache_bytes)
        lines.append(f"state and windows of a sequence: {found.cache_bytes[longest]:,} bytes in {found.dtype}")
    return lines


def tokens(number: int) -> str:
    return f"{number // 1024}K" if number >= 1024 else str(number)
