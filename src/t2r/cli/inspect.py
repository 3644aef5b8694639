"""t2r inspect"""

import json
from dataclasses import asdict
from pathlib import Path
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

    No weights are loaded. Of a state file (see generate --save-state), show what it holds.
    """
    if Path(model).is_file():
        from t2r.generation.state import describe_state

        facts = describe_state(model)
        print(json.dumps(facts, indent=2) if as_json else "\n".join(f"{k:12} {v}" for k, v in facts.items()))
        return
    from t2r.reporting import inspection

    with calm(as_json):
        found = inspection.inspect_model(
            model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, **options
        )
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(inspection.tables(found))
