"""t2r info"""

from t2r.cli.common import AsJson, print_json, show


def info(as_json: AsJson = False) -> None:
    """Show versions, devices and available backends."""
    from t2r.reporting import environment

    facts = environment.describe()
    if as_json:
        print_json(facts)
    else:
        show(environment.tables(facts))
