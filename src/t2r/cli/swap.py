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


@swap_options()
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
    """Replace softmax attention by linear attention.

    Saves the swapped model and its tokenizer. The new feature maps are not trained: see convert.
    """
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
        print("\n".join([*inspection.summary(done), f"saved in {out}; its feature maps are not trained yet"]))
