"""t2r pretrain"""

from typing import Annotated, Any

import typer

from t2r.cli.common import AsJson, Quiet, RunOut, calm, show_results, shows_progress, takes, training_options
from t2r.cli.stages import STAGE, stage_overrides
from t2r.options import Pretraining


@takes("stage", STAGE)
@training_options(Pretraining)
def pretrain(
    config: Annotated[
        str,
        typer.Argument(
            help="A preset (gpt2-tiny, gpt2-novels, adaptive-lm-tiny, adaptive-lm-small, adaptive-lm-medium, "
            "adaptive-lm-wiki, adaptive-lm-paper; for translation marian-tiny, marian-small, marian-large-paper), a "
            "YAML file in the same format, or a model folder, whose configuration is used."
        ),
    ],
    out: RunOut,
    options: dict[str, Any],
    stage: dict[str, Any],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a language model or a translation model from random weights.

    Trains a teacher or a baseline, and its tokenizer. The attention is softmax, unless --feature-map or another option
    of the swap is given.

    \b
    t2r pretrain gpt2-tiny first --train corpus.txt                       seconds on a CPU
    t2r pretrain adaptive-lm-small lm --train wiki.train.tokens           the paper's model, smaller
    t2r pretrain gpt2-tiny rnn --train corpus.txt --feature-map elu       recurrent from the start
    t2r pretrain gpt2-tiny wide --train corpus.txt --model-set n_embd=128 --set steps=1000
    t2r pretrain smollm2 more --continued --recipe scratch-lm --train corpus.txt --set steps=1000
    t2r pretrain marian-small mt --src train.en --tgt train.de --valid-src dev.en --valid-tgt dev.de   report BLEU
    t2r pretrain marian-small mt --src train.zh --tgt train.en --model-set share_encoder_decoder_embeddings=false

    With --src the preset is an encoder-decoder. Its tokenizer is one BPE for both languages, or one for each if the
    embeddings are not shared. An interrupted run is resumed by the same command.
    """
    from t2r.pipelines.pretrain import pretrain as run
    from t2r.pipelines.pretrain import summary

    options["overrides"] = stage_overrides(stage, options)
    with calm(quiet or as_json, info=not quiet):
        results = run(config, out, progress=shows_progress(quiet or as_json), **options)
    show_results(results, summary, out, as_json, quiet)
