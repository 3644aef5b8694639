"""t2r analyze"""

from typing import Annotated

import typer

from t2r.cli.common import (
    RUN,
    AsJson,
    Device,
    Model,
    Quiet,
    SourceLanguage,
    TargetLanguage,
    calm,
    flag,
    print_json,
    show,
    shows_progress,
)
from t2r.errors import T2RError
from t2r.options import AnalysisOptions, options_of
from t2r.storage import kind_of

OWN = options_of(AnalysisOptions)


def analyze(
    model: Model,
    teacher: Annotated[
        str | None, typer.Option(help="The model that was converted. Without it, only the model itself is measured.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text to read: a file or a glob.")] = None,
    src: Annotated[str | None, typer.Option(help="For encoder-decoders: a file of source sentences.")] = None,
    tgt: Annotated[str | None, typer.Option(help="For encoder-decoders: the targets of --src.")] = None,
    source_language: SourceLanguage = None,
    target_language: TargetLanguage = None,
    window: Annotated[int | None, flag(RUN["window"], help="Tokens per sample.")] = None,
    words: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens at the end of a sample whose attention is measured. [default: half of it]"),
    ] = None,
    limit: Annotated[int, flag(OWN["limit"])] = OWN["limit"].default,
    trials: Annotated[int, flag(OWN["trials"])] = OWN["trials"].default,
    recall: Annotated[bool, typer.Option(help="Measure recall by distance.")] = True,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also measure the loss with a single recurrent layer, for each layer. For models whose other weights "
            "are the teacher's.",
        ),
    ] = False,
    plots: Annotated[str | None, typer.Option(help="Folder to write figures to, as SVG files.")] = None,
    dtype: Annotated[str, flag(RUN["dtype"], default="float32")] = "float32",
    device: Device = RUN["device"].default,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare the attention of a model with its teacher's, and examine features and states.

    Measures, by layer and head, the Euclidean distance and the Jensen-Shannon divergence between the attention weights
    of model and teacher, and their entropy; attention by distance; dead features, half-lives, bounded denominators;
    the rank and growth of the state; perplexity by position; and recall by distance.

    \b
    t2r analyze rnn --teacher teacher --text valid.txt
    t2r analyze rnn --teacher teacher --text valid.txt --plots figures --json > analysis.json
    t2r analyze teacher --text valid.txt                                      entropy of a transformer
    t2r analyze rnn --teacher teacher --src test.zh --tgt test.en             encoder-decoders
    """
    from t2r import analysis
    from t2r.reporting.page import check_plots

    if plots is not None and kind_of(plots) in ("file", "other"):
        raise T2RError(f"--plots {plots} is not a folder")
    if plots is not None:
        check_plots()
    with calm(quiet or as_json):
        result = analysis.analyze(
            model,
            text,
            teacher=teacher,
            source=src,
            target=tgt,
            source_language=source_language,
            target_language=target_language,
            window=window,
            words=words,
            limit=limit,
            trials=trials,
            measure_recall=recall,
            sensitivity=sensitivity,
            dtype=dtype,
            device=device,
            progress=shows_progress(quiet or as_json),
        )
        written = [] if plots is None else analysis.plots(result, plots)
    if as_json:
        print_json(result)
    else:
        show(analysis.tables(result))
        show(f"wrote {path}" for path in written)
