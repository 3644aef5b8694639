"""t2r average"""

from typing import Annotated

import typer

from t2r.cli.common import Out, Overwrite, Quiet, calm


def average(
    models: Annotated[list[str], typer.Argument(help="Folders, or model names on the Hugging Face hub: at least two.")],
    out: Out,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Average the weights of models with the same configuration.

    The result has the tokenizer and the dtype of the first model. A stage of a recipe averages its own last weights
    (--set average=5).

    \b
    t2r average epoch-18 epoch-19 epoch-20 mean
    """
    from t2r.pipelines.average import average as run

    with calm(quiet):
        run(models, out, overwrite=overwrite)
    if not quiet:
        print(f"the mean of {len(models)} models; saved in {out}")
