"""Merges a saved swapped model and saves the result."""

from __future__ import annotations

from os.path import realpath

from t2r.errors import T2RError
from t2r.hub import copy_processor, load_model, load_tokenizer
from t2r.model.merge import MergeCost, merge, merge_cost
from t2r.model.modeling import T2RModel
from t2r.storage import kind_of, refuse_replacing, whole_folder


def merge_folder(source: str, out: str, *, force: bool = False, overwrite: bool = False) -> MergeCost:
    """Merge the model in a folder and save it in another. Returns the cost before and after."""
    if kind_of(source) == "folder" and realpath(source) == realpath(out):
        raise T2RError(f"merging cannot be undone: keep {source} and choose another folder")
    refuse_replacing(source, out)
    with whole_folder(out, overwrite=overwrite) as folder:
        model = load_model(source)
        if not isinstance(model, T2RModel):
            raise T2RError(f"{source} is not a t2r model: swap and train it first")
        cost = merge_cost(model)
        merge(model, force=force)
        model.save_pretrained(folder)
        copy_processor(source, folder)
        tokenizer = load_tokenizer(source)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return cost
