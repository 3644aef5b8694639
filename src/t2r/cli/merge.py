"""t2r merge"""

from typing import Annotated

import typer

from t2r.cli.common import Model, Out, Overwrite, Quiet, calm


def merge(
    source: Model,
    out: Out,
    force: Annotated[
        bool, typer.Option("--force", help="Merge even if it needs more operations per token than before.")
    ] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Fold the feature maps into the projections, for inference.

    The result computes the same function. Queries and keys are no longer formed, only their features.
    """
    from t2r.pipelines.merge import merge_folder

    with calm(quiet):
        cost = merge_folder(source, out, force=force, overwrite=overwrite)
    if not quiet:
        print(
            f"features of queries and keys: {cost.before:,} multiplications per token before, {cost.after:,} after "
            f"({cost.after / cost.before - 1:+.0%}); saved in {out}"
        )
