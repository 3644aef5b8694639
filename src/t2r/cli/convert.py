"""t2r convert"""

from typing import Any

from t2r.cli.common import AsJson, Model, Quiet, RunOut, calm, show_results, shows_progress, takes, training_options
from t2r.cli.stages import STAGE, stage_overrides
from t2r.options import Conversion


@takes("stage", STAGE)
@training_options(Conversion)
def convert(
    source: Model,
    out: RunOut,
    options: dict[str, Any],
    stage: dict[str, Any],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Convert a language model or a translation model into an RNN.

    Swaps the attention, trains the model, evaluates it beside the teacher, and saves it.

    \b
    t2r convert gpt2 rnn --train corpus.txt --valid valid.txt        report perplexity
    t2r convert gpt2 rnn --train corpus.txt --minutes 30             fit into 30 minutes
    t2r convert gpt2 rnn --train corpus.txt --softmax-layers auto:3  keep softmax in the 3 most sensitive layers
    t2r convert gpt2 rnn --train corpus.txt --memory 4MiB            the best model for 4 MiB per sequence
    t2r convert gpt2 rnn --train teacher                             train on text the model generates
    t2r convert gpt2 rnn --train wiki.txt:2 --train novels.txt:0.5   read twice, and half, per epoch
    t2r convert gpt2 rnn --train wiki.txt:60% --train novels.txt:40% mix by share of the tokens
    t2r convert gpt2 rnn --train small.txt --set noise=0.1           token noise, for many epochs of a small text
    t2r convert opus-mt-zh-en rnn --src train.zh --tgt train.en --valid-src dev.zh --valid-tgt dev.en   report BLEU
    t2r convert opus-mt-zh-en rnn --src train.zh --tgt teacher       train on the model's own translations
    t2r convert rnn more --train corpus.txt --minutes 30             train a finished conversion further

    An interrupted run is resumed by the same command. The defaults shown are those of the recipe distill-lm; another
    --recipe or --feature-map has its own.
    """
    from t2r.pipelines.convert import convert as run
    from t2r.pipelines.convert import summary
    from t2r.training.recipes.recipe import default_recipe

    translates = "source" in options or "target" in options
    options.setdefault("recipe", default_recipe(translates, memory="memory" in options))
    options["overrides"] = stage_overrides(stage, options, options["recipe"])
    with calm(quiet or as_json, info=not quiet):
        results = run(source, out, progress=shows_progress(quiet or as_json), **options)
    show_results(results, summary, out, as_json, quiet)
