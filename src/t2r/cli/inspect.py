"""t2r inspect"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from t2r.cli.common import RUN, AsJson, Dtype, Model, Revision, TrustRemoteCode, calm, print_json, show, swap_options
from t2r.errors import T2RError
from t2r.storage import kind_of


@swap_options()
def inspect(
    model: Model,
    options: dict[str, Any],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Show what convert makes with this recipe; none: what t2r swap makes by default. [default: "
            "distill-lm, or distill-mt for an encoder-decoder]"
        ),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = RUN["dtype"].default,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what a conversion makes recurrent in a model.

    Lists layers, parameters and bytes of a swapped model, or of the model that t2r convert would make with the same
    options. No weights are loaded. The defaults shown are those of the recipe distill-lm.

    \b
    t2r inspect gpt2 --feature-size 64
    t2r inspect gpt2 --softmax-layers auto:3    bytes with 3 softmax layers, whichever they will be

    For a state file (see generate --save-state), shows its contents.
    """
    if kind_of(model) == "file":
        from t2r.generation.state import describe_state

        if options or recipe is not None:
            raise T2RError(f"{model} is a file of a state: options of a swap are for models")
        facts = describe_state(model)
        if as_json:
            print_json(facts)
        else:
            show(f"{name:12} {value}" for name, value in facts.items())
        return
    from t2r.reporting import inspection
    from t2r.reporting.inspection_tables import tables

    with calm(as_json):
        source = inspection.empty_model(model, dtype, revision=revision, trust_remote_code=trust_remote_code)
        asked = None if recipe == "none" else inspection.DEFAULT if recipe is None else recipe
        with inspection.validly(model, *inspection.OF_SIZES):
            found = inspection.inspect_model(source, recipe=asked, **options)
        plan = None if found.swapped or asked is None else inspection.recipe_for(source, asked)
    if as_json:
        print_json(asdict(found) | ({} if plan is None else {"recipe": plan.to_dict()}))
    else:
        show(tables(found))
        show(["", *plan.told()] if plan is not None else [])
