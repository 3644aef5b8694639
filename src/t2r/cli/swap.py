"""t2r swap"""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from t2r.cli.common import AsJson, Dtype, Model, Quiet, Revision, TrustRemoteCode, calm, swap_options


@swap_options
def swap(
    source: Model,
    out: Annotated[str, typer.Argument(help="The folder to make.")],
    options: dict[str, Any],
    revision: Revision = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that OUT holds already.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Make a transformer's attention recurrent, and save it: weights, tokenizer and all."""
    from t2r.pipelines.swap import swap_folder
    from t2r.reporting import inspection

    with calm(quiet or as_json):
        done = swap_folder(
            source,
            out,
            dtype=dtype,
            revision=revision,
            trust_remote_code=trust_remote_code,
            overwrite=overwrite,
            **options,
        )
    if as_json:
        print(json.dumps(asdict(done), indent=2))
    elif not quiet:
        print("\n".join([*inspection.summary(done), f"saved in {out}: its maps are new, so train it next"]))
