"""t2r plan"""

from typing import Annotated

import typer

from t2r.cli.common import (
    RUN,
    AsJson,
    Device,
    Model,
    Quiet,
    Revision,
    TrustRemoteCode,
    calm,
    print_json,
    show,
    shows_progress,
)


def plan(
    model: Model,
    memory: Annotated[list[str], typer.Option(help="Bytes of a sequence, for example 4MiB. Repeatable.")],
    train: Annotated[list[str], typer.Option(help="The text on which heads are measured: files, as for convert.")],
    context: Annotated[
        int | None, typer.Option(help="Tokens that windows are planned for. [default: positions, at most 2,048]")
    ] = None,
    states: Annotated[bool, typer.Option(help="Plan states too, which convert trains; or windows only.")] = True,
    device: Device = RUN["device"].default,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Show who gets which window within a memory budget, and what is lost without training.

    Each head of the model is limited to windows of several sizes, one head at a time, and the change of the model's
    distribution is measured on your text. The measurements are kept: another budget needs no second scan, nor does
    t2r convert --memory with the same text.

    \b
    t2r plan gpt2 --train corpus.txt --memory 1MiB --memory 4MiB
    """
    from t2r.pipelines.budget import plan_memory, plan_table

    with calm(quiet or as_json, info=not quiet):
        found = plan_memory(
            model,
            memory,
            train=train,
            context=context,
            states=states,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=shows_progress(quiet or as_json),
        )
    if as_json:
        print_json({"plans": [each.to_dict() for each in found]})
    else:
        show([plan_table(found)])
