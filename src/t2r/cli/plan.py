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
    SourceLanguage,
    TargetLanguage,
    TrustRemoteCode,
    calm,
    flag,
    print_json,
    show,
    shows_progress,
)
from t2r.options import Conversion, SwapOptions, options_of


def plan(
    model: Model,
    memory: Annotated[list[str], typer.Option(help="Bytes of a sequence, for example 4MiB. Repeatable.")],
    train: Annotated[
        list[str] | None, typer.Option(help="The text on which heads are measured: files, as for convert.")
    ] = None,
    src: Annotated[list[str] | None, typer.Option(help="Sources for an encoder-decoder, as for convert.")] = None,
    tgt: Annotated[list[str] | None, typer.Option(help="The targets of each --src.")] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens that windows are planned for, of an encoder-decoder target tokens. [default: positions, at "
            "most 2,048; with --src the longest target of the text]"
        ),
    ] = None,
    source_tokens: Annotated[int | None, flag(options_of(Conversion)["source_tokens"])] = None,
    nbits: Annotated[int | None, flag(options_of(Conversion)["nbits"])] = None,
    recurrent: Annotated[
        str, typer.Option(help="With --src: causal, which keeps cross attention exact, or both.")
    ] = SwapOptions.recurrent,
    join: Annotated[int, flag(options_of(Conversion)["join"])] = Conversion.join,
    source_language: SourceLanguage = None,
    target_language: TargetLanguage = None,
    states: Annotated[bool, typer.Option(help="Plan states too, which convert trains; or windows only.")] = True,
    device: Device = RUN["device"].default,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Show who gets which window within a memory budget, and what is lost without training.

    The memory of the model falls in small steps, from all keys and values to the smallest windows, on your text. In
    each step, the bytes go to the heads where they change the model's distribution most. All budgets are on this path,
    which is kept: another budget needs no second one, nor does t2r convert --memory with the same text.

    \b
    t2r plan gpt2 --train corpus.txt --memory 1MiB --memory 4MiB
    t2r plan opus-mt-zh-en --src train.zh --tgt train.en --memory 1MiB
    """
    from t2r.pipelines.budget import plan_memory, plan_notes, plan_table

    with calm(quiet or as_json, info=not quiet):
        found = plan_memory(
            model,
            memory,
            train=train or None,
            source=src or None,
            target=tgt or None,
            source_language=source_language,
            target_language=target_language,
            join=join,
            context=context,
            source_tokens=source_tokens,
            nbits=nbits,
            recurrent=recurrent,
            states=states,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=shows_progress(quiet or as_json),
        )
    if as_json:
        print_json({"plans": [each.to_dict() for each in found]})
    else:
        show([plan_table(found), *plan_notes(found)])
