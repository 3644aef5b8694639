"""The page of supported models, made from the registry: `python -m t2r.surgery.adapters.table > docs/models.md`."""

from __future__ import annotations

from collections.abc import Iterator

from t2r.surgery.adapters import FAMILIES, Family, family
from t2r.surgery.adapters.registry import module_of

POSITIONS = {
    "learned": "learned: as many as its table has",
    "sinusoidal": "sinusoidal: no limit",
    "rotary": "rotary: no limit",
    "relative": "relative: lost in recurrent layers",
}

PAGE = """# Models

Made from the registry by `python -m t2r.surgery.adapters.table > docs/models.md`; a test keeps it so.

{table}

**Swapped by**: with its *own module*, t2r takes over the projections of the attention; by the *attention
interface* of transformers, the stock module stays, rotary positions and all, and only what it does with
queries, keys and values changes. **Merge**: can the feature maps be folded into the projections? **Cross
attention**: does it become a state of fixed size that is read once from the source? **Tested**: *the
matrix* is `tests/surgery/test_families.py`, which every family runs on a tiny random model: exact softmax attention
in the swapped modules equals the base model, generation equals recomputation, padding on both sides, beams,
packing, gradients, saving and loading, compilation. What the base model itself cannot do is left out, as
said.

Sliding windows (Mistral, Gemma 2 and 3) are kept in layers that stay softmax attention. A recurrent layer
has no window: it remembers from the beginning. The same is true of Gemma 2's cap on attention scores and of
T5's relative position bias, which recurrent layers have no scores for. `t2r.swap` says so for the layers
that it concerns.

## Any other model

A language model of another type is swapped too if it is on the attention interface of transformers and has
one causal attention in each layer. That is found by looking, so it is proved on the very model: exact
softmax attention in the swapped layers must give the logits of the untouched model, on a small random batch
with left padding, and the recurrence must continue from its state. Otherwise the model is left as it was,
and the reason is said. A notice tells you that such a model is not among the tested families.
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
            description(found),
            "attention interface" if found.recurrent is None else "own module",
            merge_of(found),
            "" if found.cross_attention is None else "yes",
            POSITIONS[found.positions],
            "the matrix" + "".join(f", without {name}" for name in sorted(found.lacks)),
        )


def merge_of(found: Family) -> str:
    if found.merges:
        return "yes"
    return "with `rotary=False`" if found.plain_projections else "no: queries and keys are changed in between"


def description(found: Family) -> str:
    """The first sentence of its file."""
    text = module_of(found.model_type).__doc__ or ""
    return text.split(". ")[0].strip().rstrip(".")


if __name__ == "__main__":
    print(page(), end="")
