"""t2r inspect"""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from t2r.cli.common import RUN, AsJson, Dtype, Model, Revision, TrustRemoteCode, calm, print_json, show, swap_options
from t2r.storage import kind_of


@swap_options()
def inspect(
    model: Model,
    options: dict[str, Any],
    recipe: Annotated[
        str | None, typer.Option(help="Show what convert would do with this recipe, and use its swap options.")
    ] = None,
    revision: Revision = None,
    dtype: Dtype = RUN["dtype"].default,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show what a swap makes recurrent in a model.

    Lists layers, parameters and bytes of a swapped model, or of the model that a swap would make. No weights are
    loaded. Without --recipe, the options are those of t2r swap. --recipe distill-lm shows what t2r convert makes.

    For a state file (see generate --save-state), shows its contents.
    """
    if kind_of(model) == "file":
        from t2r.generation.state import describe_state

        facts = describe_state(model)
        if as_json:
            print_json(facts)
        else:
            show(f"{name:12} {value}" for name, value in facts.items())
        return
    from t2r.reporting import inspection

    plan = None
    if recipe is not None:
        from t2r.training.planning.plan import over
        from t2r.training.recipes.recipe import load_recipe

        plan = load_recipe(recipe)
        options = over(plan.swap, options)
    with calm(as_json):
        found = inspection.inspect_model(
            model, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, **options
        )
    if as_json:
        print_json(asdict(found) | ({} if plan is None else {"recipe": plan.to_dict()}))
    else:
        show(inspection.tables(found))
        show(["", *plan.told()] if plan is not None else [])
