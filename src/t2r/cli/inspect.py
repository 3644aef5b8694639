"""t2r inspect"""

import json
from dataclasses import asdict
from typing import Any

from t2r.cli.common import AsJson, Dtype, Model, Revision, TrustRemoteCode, calm, show, swap_options


@swap_options
def inspect(
    model: Model,
    options: dict[str, Any],
    revision: Revision = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what is recurrent in a swapped model, or would be in another: layers, parameters, bytes.

    No weights are loaded.
    """
    from t2r import inspection

    with calm(as_json):
        found = inspection.inspect_model(
            model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, **options
        )
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(inspection.tables(found))
