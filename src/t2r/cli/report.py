"""t2r report"""

from typing import Annotated

import typer

from t2r.cli.common import Quiet, calm


def report(
    source: Annotated[
        list[str],
        typer.Argument(
            help="A folder of convert, pretrain or reproduce, or a file with the --json output of evaluate, bench or "
            "analyze. Several make one page."
        ),
    ],
    out: Annotated[
        str | None, typer.Option(help="The HTML file. [default: report.html in the folder, or beside the JSON file]")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Let the model in the folder complete this prompt, for a sample on the page. Repeatable."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write results as one self-contained HTML page.

    The page has tables, figures, the configuration, the machine and the commands. It needs no network, and is readable
    on a phone, in light and in dark mode. Figures require the plots extra.

    \b
    t2r report rnn                                      a conversion: rnn/report.html
    t2r report runs/smollm2-pure                        an experiment
    t2r report analysis.json bench.json --out all.html  several results on one page
    """
    from t2r.pages import report as run

    with calm(quiet):
        path = run(source, out, prompts=prompt or [])
    if not quiet:
        print(path)
