"""t2r import"""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from t2r.cli.common import AsJson, Quiet, calm


def import_(
    checkpoint: Annotated[str, typer.Argument(help="A .pt file of fairseq.")],
    out: Annotated[str, typer.Argument(help="The folder to make.")],
    dictionary: Annotated[
        str, typer.Option("--dict", help="The dict.txt it was trained with; of the source, if it translates.")
    ],
    target_dictionary: Annotated[
        str | None, typer.Option("--target-dict", help="That of the target, if it is another.")
    ] = None,
    bpe_codes: Annotated[
        str | None, typer.Option(help="Codes of subword-nmt or fastBPE, for a translation model to read raw text.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that OUT holds already.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Make an ordinary model of one that fairseq trained: transformer_lm with adaptive embeddings, or transformer.

    Nothing that is in the file is run, and what it holds beyond such a model is refused by name.
    """
    from t2r.pipelines.fairseq import import_fairseq

    with calm(quiet or as_json):
        done = import_fairseq(
            checkpoint,
            out,
            dictionary=dictionary,
            target_dictionary=target_dictionary,
            bpe_codes=bpe_codes,
            overwrite=overwrite,
        )
    if as_json:
        print(json.dumps(asdict(done), indent=2))
    elif not quiet:
        print(
            f"{done.model_type}: {done.layers} layers, {done.parameters:,} parameters, {done.vocabulary:,} words; "
            f"saved in {out}"
        )
