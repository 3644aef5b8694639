"""t2r serve"""

import sys
from typing import Annotated, Any

import typer

from t2r.cli.common import RUN, Device, Dtype, Model, Quiet, Revision, TrustRemoteCode, calm, takes
from t2r.errors import T2RError
from t2r.options import options_of
from t2r.options.serving import ServeOptions

EXTRA = ("fastapi", "prometheus_client", "pydantic", "uvicorn")
"""Modules of the extra `serve`."""


@takes("options", options_of(ServeOptions).values())
def serve(
    model: Model,
    options: dict[str, Any],
    teacher: Annotated[
        str | None, typer.Option(help="A second model beside it, such as its teacher: a folder or a hub name.")
    ] = None,
    dtype: Dtype = RUN["dtype"].default,
    device: Device = RUN["device"].default,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
) -> None:
    """Serve a model over HTTP, with the API of OpenAI.

    A conversation is continued from its state, and a document is read once. docs/serving.md has the API.
    """
    chosen = ServeOptions(**options)
    try:
        from t2r.serving.server import load_models
        from t2r.serving.server import serve as run
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        raise T2RError(f'serving requires {error.name}: pip install "t2r[serve]"') from error

    hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with calm(quiet):
        models = load_models(model, teacher, chosen, dtype=dtype, device=device, **hub)

        def ready(address: str) -> None:
            if not quiet:
                names = " and ".join(each.name for each in models)
                print(f"{names} at {address} (the API: {address}/v1); Ctrl-C ends", file=sys.stderr, flush=True)

        run(models, chosen, ready)
