"""Generate the page of supported models: `python -m t2r.surgery.adapters.table > docs/models.md`."""

from __future__ import annotations

from collections.abc import Iterator

from t2r.surgery.adapters import FAMILIES, Family, family

POSITIONS = {
    "learned": "learned: limited to the table",
    "sinusoidal": "sinusoidal: no limit",
    "rotary": "rotary: no limit",
    "relative": "relative: not used by recurrent layers",
}

PAGE = """# Models

Generated from the registry by `python -m t2r.surgery.adapters.table > docs/models.md`. A test checks that it is up to
date.

{table}

**Swapped by**: with *own module*, t2r computes the projections of the attention itself. With *attention interface*,
the stock module of transformers computes the projections and the rotation, and t2r replaces only the attention
function. **Merge**: whether feature maps can be merged into the projections, which requires that queries and keys are
not rotated, normalized or clipped in between. **Cross attention**: whether cross attention becomes a state of fixed
size, computed once from the source. **Tested**: *family tests* are those in
`tests/surgery/test_families.py`, which run for every family on a tiny random model. They check that exact softmax
attention in the swapped modules matches the base model, that generation matches recomputation, and they cover padding
on both sides, beam search, packing, gradients, saving and loading, and compilation. Features that the base model does
not support are excluded, as listed.

Sliding windows (Mistral, Gemma 2 and 3) apply in softmax layers only. Recurrent layers have no window and process the
whole sequence. The cap on attention scores of Gemma 2 and the relative position bias of T5 also apply in softmax layers
only, because recurrent layers have no attention scores. `t2r.swap` prints a notice about the affected layers.

## Other models

A language model of another type can be swapped if it uses the attention interface of transformers and has one causal
attention in each layer. Its attention is detected automatically, and the swap is checked on the model itself. On a
small random batch with left padding, exact softmax attention in the swapped layers must give the logits of the base
model, and the recurrence must continue from its state. If the check fails, the model is restored and the error gives
the reason. A notice says that the model type is not tested.
"""

COLUMNS = ("type", "what it is", "swapped by", "merge", "cross attention", "positions", "tested")


def page() -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows()]
    return PAGE.format(table="\n".join(f"| {' | '.join(line)} |" for line in lines))


def rows() -> Iterator[tuple[str, ...]]:
    for model_type in FAMILIES:
        found = family(model_type)
        yield (
            f"`{model_type}`",
            found.about,
            "attention interface" if found.recurrent is None else "own module",
            merge_of(found),
            "" if found.cross_attention is None else "yes",
            POSITIONS[found.positions],
            "family tests" + "".join(f", without {name}" for name in sorted(found.lacks)),
        )


def merge_of(found: Family) -> str:
    if found.merges:
        return "yes"
    return "with `rotary=False`" if found.plain_projections else "no"


if __name__ == "__main__":
    print(page(), end="")
