"""t2r import"""

from dataclasses import asdict
from typing import Annotated

import typer

from t2r.cli.common import AsJson, Out, Overwrite, Quiet, calm, print_json


def import_(
    checkpoint: Annotated[str, typer.Argument(help="A fairseq checkpoint (.pt).")],
    out: Out,
    dictionary: Annotated[
        str, typer.Option("--dict", help="The dict.txt of the checkpoint; for translation, of the source language.")
    ],
    target_dictionary: Annotated[
        str | None, typer.Option("--target-dict", help="The dict.txt of the target language. [default: --dict]")
    ] = None,
    bpe_codes: Annotated[
        str | None,
        typer.Option(help="BPE codes of subword-nmt or fastBPE, which a translation model needs to read raw text."),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Import a fairseq checkpoint as a transformers model.

    Supports transformer_lm with adaptive embeddings, and transformer for translation. No code in the checkpoint is
    executed. Tensors and settings that are not supported raise an error that names them.
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
