"""t2r merge"""

from typing import Annotated

import typer

from t2r.cli.common import Model, Quiet, calm


def merge(
    source: Model,
    out: Annotated[str, typer.Argument(help="The folder to make.")],
    force: Annotated[bool, typer.Option("--force", help="Even if it costs more operations than it saves.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that OUT holds already.")] = False,
    quiet: Quiet = False,
) -> None:
    """Fold the feature maps into the projections, exactly: for inference, q and k are never formed."""
    from t2r.pipelines.merge import merge_folder

    with calm(quiet):
        cost = merge_folder(source, out, force=force, overwrite=overwrite)
    if not quiet:
        saved = 1 - cost.after / cost.before
        print(
            f"features of queries and keys: {cost.before:,} multiplications per token before, {cost.after:,} after "
            f"({saved:+.0%} saved); saved in {out}"
        )
