"""t2r import"""

from dataclasses import asdict
from typing import Annotated

import typer

from t2r.cli.common import AsJson, Out, Overwrite, Quiet, calm, print_json


def import_(
    checkpoint: Annotated[str, typer.Argument(help="A .pt file of fairseq.")],
    out: Out,
    dictionary: Annotated[
        str, typer.Option("--dict", help="The dict.txt it was trained with; of the source, if it translates.")
    ],
    target_dictionary: Annotated[
        str | None, typer.Option("--target-dict", help="That of the target, if it is another.")
    ] = None,
    bpe_codes: Annotated[
        str | None, typer.Option(help="Codes of subword-nmt or fastBPE, for a translation model to read raw text.")
    ] = None,
    overwrite: Overwrite = False,
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
        print_json(asdict(done))
    elif not quiet:
        print(
            f"{done.model_type}: {done.layers} layers, {done.parameters:,} parameters, {done.vocabulary:,} words; "
            f"saved in {out}"
        )
