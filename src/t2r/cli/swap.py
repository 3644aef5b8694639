"""t2r swap"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from t2r.cli.common import (
    RUN,
    AsJson,
    Dtype,
    Model,
    Out,
    Overwrite,
    Quiet,
    Revision,
    TrustRemoteCode,
    calm,
    print_json,
    swap_options,
)


@swap_options()
def swap(
    source: Model,
    out: Out,
    options: dict[str, Any],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Use the swap options of this recipe, as convert does with distill-lm (distill-mt for an "
            "encoder-decoder). [default: the paper's map, as t2r.swap]"
        ),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = RUN["dtype"].default,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Replace softmax attention by linear attention.

    Saves the swapped model and its tokenizer. The new feature maps are not trained: see convert, whose recipe has
    other defaults than those shown here.

    \b
    t2r swap gpt2 swapped                        the paper's map, as t2r.swap in Python
    t2r swap gpt2 swapped --recipe distill-lm    the model that convert trains
    """
    from t2r.pipelines.swap import swap_folder
    from t2r.reporting.inspection_tables import summary

    with calm(quiet or as_json):
        done = swap_folder(
            source,
            out,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            overwrite=overwrite,
            recipe=recipe,
            **options,
        )
    if as_json:
        print_json(asdict(done))
    elif not quiet:
        lines = [*summary(done), f"saved in {out}; its feature maps are not trained yet"]
        if recipe is None:
            lines.append("these are the defaults of t2r.swap; with --recipe distill-lm, those of t2r convert")
        print("\n".join(lines))
