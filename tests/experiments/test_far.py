"""The trials of texts that are longer than blocks: their recipes are valid, and what they leave out is the states."""

import copy

import pytest
import torch

import far
import far_layers
import t2r
from families import POSITIONS, VOCABULARY, tiny
from t2r.plans import MemoryPlan
from t2r.training.recipes.recipe import load_recipe, make_recipe

IDS = torch.randint(3, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
WINDOWS = ((4, 4),) * 3


def models(states=True):
    base = tiny("llama", torch.float32)
    options = load_recipe("memory-lm").swap | {"feature_size": 4} if states else {}
    plan = MemoryPlan(WINDOWS, 2, None if states else ((False, False),) * 3)
    return t2r.swap(copy.deepcopy(base), **options, plan=plan).eval(), base


@pytest.mark.parametrize("way", far.WAYS)
def test_recipes_are_valid(way):
    recipe = make_recipe(far.recipe(way, 4, 6), way)
    sizes = [(stage.steps, stage.block_size) for stage in recipe.stages]
    assert sizes == [(4, 64), (4, 64), (2, 256)] if way == "late" else [(4, 64), (6, 64)]
    assert recipe.swap == load_recipe("memory-lm").swap | {"feature_size": far.FEATURES}


def test_without_states_there_are_windows_alone():
    (whole, base), (windows, _) = models(), models(states=False)
    expected = far.divergence(windows, base, IDS)
    assert not torch.allclose(far.divergence(whole, base, IDS), expected, atol=1e-4)
    with far.without_states():
        torch.testing.assert_close(far.divergence(whole, base, IDS), expected, rtol=1e-4, atol=1e-5)
    # Windows do not depend on where a text begins, and states do.
    moved = POSITIONS - IDS.shape[1]
    torch.testing.assert_close(far.divergence(windows, base, IDS, moved), expected, rtol=1e-3, atol=1e-4)


def test_shares_of_states():
    whole, base = models()
    with far.watching() as shares:
        far.divergence(whole, base, IDS)
    assert len(shares) == 3
    assert all(x.shape == (32,) and not x[:4].any() and 0 < x[-1] < 1 for x in shares)  # nothing has left the windows


def test_tables_have_a_cell_for_each_column():
    found = {"short": 0.1, "moved": 0.2, "whole": 0.3, "quarters": [0.1] * 4, "without": [0.2] * 4, "shares": [0.5] * 4}
    lines = far.table({"windows": found, "short": found}).strip().splitlines()
    assert {line.count("|") for line in lines} == {9}
    assert len(far_layers.header()) == 1 + 4 + 8
