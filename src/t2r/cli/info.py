"""t2r info"""

import json

from t2r.cli.common import AsJson, show


def info(as_json: AsJson = False) -> None:
    """Show versions, devices, and which backends run here."""
    from t2r.reporting import environment

    facts = environment.describe()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        show(environment.tables(facts))
