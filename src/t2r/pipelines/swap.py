"""Swaps a saved model and saves the result, not yet trained."""

from __future__ import annotations

import logging
from typing import Any

from t2r.errors import T2RError
from t2r.hub import copy_processor, load_model, load_tokenizer
from t2r.model.swap import swap
from t2r.options import SwapOptions, check
from t2r.pipelines.common import refuse_quantized
from t2r.pipelines.continuation import origin_of, remember_origin
from t2r.reporting.inspection import Inspection, inspect_model
from t2r.storage import refuse_deleting, refuse_replacing, whole_folder
from t2r.training.planning.plan import over
from t2r.training.recipes.recipe import load_recipe

logger = logging.getLogger(__name__)


def swap_folder(
    source: str,
    out: str,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    recipe: str | None = None,
    **options: Any,
) -> Inspection:
    """Swap the model in a folder or on the hub, and save it with its tokenizer in another folder.

    `options` are those of `swap`, and override those of the `recipe`, if one is given. Returns an inspection of the
    swapped model. Errors are raised before weights are loaded."""
    refuse_replacing(source, out)
    refuse_deleting([recipe], out)
    if recipe is not None:
        options = over(load_recipe(recipe).swap, options)
    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    check(SwapOptions, options)  # auto:N, which the inspection accepts, is for `convert`
    with whole_folder(out, overwrite=overwrite) as folder:
        inspection = inspect_model(source, dtype=dtype, **hub, **options)
        if inspection.swapped:
            raise T2RError(f"{source} is already a t2r model: give the base model")
        tokenizer = load_tokenizer(source, **hub)
        base = load_model(source, dtype=dtype, **hub)
        refuse_quantized(base)
        origin = origin_of(base)
        model = swap(base, **options)
        remember_origin(model.t2r_config, origin)
        model.save_pretrained(folder)
        copy_processor(source, folder, revision=revision)
        if tokenizer is None:
            logger.warning("%s has no tokenizer; none is saved in %s", source, out)
        else:
            tokenizer.save_pretrained(folder)
    return inspection
