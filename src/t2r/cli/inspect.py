"""t2r inspect"""

from dataclasses import asdict
from typing import Any

from t2r.cli.common import RUN, AsJson, Dtype, Model, Revision, TrustRemoteCode, calm, print_json, show, swap_options
from t2r.storage import kind_of


@swap_options
def inspect(
    model: Model,
    options: dict[str, Any],
    revision: Revision = None,
    dtype: Dtype = RUN["dtype"].default,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what is recurrent in a swapped model, or would be in another: layers, parameters, bytes.

    No weights are loaded. Of a state file (see generate --save-state), show what it holds.
    """
    if kind_of(model) == "file":
        from t2r.generation.state import describe_state

        facts = describe_state(model)
        if as_json:
            print_json(facts)
        else:
            show(f"{name:12} {value}" for name, value in facts.items())
        return
    from t2r.reporting import inspection

    with calm(as_json):
        found = inspection.inspect_model(
            model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, **options
        )
    if as_json:
        print_json(asdict(found))
    else:
        show(inspection.tables(found))
