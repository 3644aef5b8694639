"""t2r swap"""

from dataclasses import asdict
from typing import Any

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


@swap_options
def swap(
    source: Model,
    out: Out,
    options: dict[str, Any],
    revision: Revision = None,
    dtype: Dtype = RUN["dtype"].default,
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Overwrite = False,
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
        print_json(asdict(done))
    elif not quiet:
        print("\n".join([*inspection.summary(done), f"saved in {out}: its maps are new, so train it next"]))
