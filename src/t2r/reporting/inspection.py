"""Reports what a swap changes, or would change: parameters and bytes of each layer. No weights are loaded.

Bytes are not computed by a formula: the caches are filled with tensors on the meta device, and measured.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from t2r import compat
from t2r.config import OPTIONS, T2RConfig
from t2r.errors import T2RError
from t2r.feature_maps import FeatureMap, make_feature_map
from t2r.hub import auto_class, choose_dtype, load_config
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap
from t2r.ops.stored import token_bytes
from t2r.options import RunOptions, parse_auto
from t2r.options.entrance import entrance
from t2r.storage import shortened
from t2r.surgery.adapters import Shape, Site, family_of
from t2r.surgery.adapters.names import refusal
from t2r.training.planning.plan import over
from t2r.training.recipes.recipe import Recipe, default_recipe, load_recipe

LENGTHS = (512, 4096, 32768)
OF_SIZES = (ArithmeticError, RuntimeError)
"""Errors of calculations and of tensors."""
DEFAULT = "default"
"""Stands for the recipe that `convert` uses by default."""


@dataclass(frozen=True)
class SiteReport:
    """One attention module of the decoder."""

    name: str
    layer: int
    cross: bool
    recurrent: bool
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    feature_size: int | None
    parameters_added: int
    """Parameters beyond those of the base model. After a merge this can be negative."""
    state_bytes: int
    kv_bytes: dict[int, int]
    """Bytes of keys and values of softmax attention, by number of tokens, also where it was swapped."""
    windows: list[int] | None = None
    """The window of each key-value head, in tokens. None: there are none."""
    window_bytes: dict[int, int] | None = None
    """Bytes of the windows, by number of tokens."""
    window_nbits: int | None = None
    """Bits of the numbers of keys and values in the windows."""

    def cache_bytes(self, length: int) -> int:
        if self.window_bytes is not None:
            return self.state_bytes + self.window_bytes[length]
        return self.state_bytes if self.recurrent else self.kv_bytes[length]


@dataclass(frozen=True)
class Ungrouped:
    """The cost of a state for every query head, where now the heads of a group share one."""

    parameters_added: int
    state_bytes: int


@dataclass(frozen=True)
class Inspection:
    """The result of a swap, or of the swap that would be made. All bytes are per sequence."""

    model: str
    model_type: str
    swapped: bool
    """Whether the model is swapped. Otherwise this describes what a swap would do."""
    merged: bool
    dtype: str
    options: dict[str, Any]
    sites: list[SiteReport]
    encoder_layers: int
    """They keep softmax attention, and have no cache."""
    parameters: int
    """Parameters of the base model."""
    parameters_added: int
    share: float
    """`parameters_added` divided by `parameters`."""
    state_bytes: int
    kv_bytes: dict[int, int]
    """The base model's cache, by number of tokens (for an encoder-decoder, also of the source)."""
    cache_bytes: dict[int, int]
    """The swapped model's cache: its state, and the keys and values of softmax layers."""
    ungrouped: Ungrouped | None
    cross_saves_from: int | None = None
    """The number of source tokens from which the states of cross attention are smaller than its keys and values. None:
    there is no recurrent cross attention."""
    undecided: int | None = None
    """With `softmax_layers=auto:N`: N. Any of the layers, which are all listed as recurrent, may then be a softmax
    layer; totals are those with N softmax layers."""
    positions: int | None = None
    """The size of a learned table of positions, which limits a conversion too. None: there is no limit."""

    @property
    def exact_cross(self) -> list[SiteReport]:
        """Cross attention, if all of it stays exact."""
        cross = [site for site in self.sites if site.cross]
        return [] if any(site.recurrent for site in cross) else cross

    @property
    def alike(self) -> bool:
        """Whether all layers have the same parameters and bytes."""
        facts = {(s.cross, s.parameters_added, s.state_bytes, *s.kv_bytes.values()) for s in self.sites}
        return len(facts) == len({site.cross for site in self.sites})


@entrance(RunOptions)
def inspect_model(
    source: PreTrainedModel | str | PathLike[str],
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    recipe: str | None = None,
    **options: Any,
) -> Inspection:
    """Report what a swap of a model with these options (those of `swap`) would do, or what was done to a swapped model.

    Args:
        source: a model, which is not modified; or a folder or hub name, of which only the configuration is read.
        dtype: dtype of the weights, and so of keys and values. `auto`: as saved.
        recipe: a recipe of `convert`, which has other defaults than `swap`: `default` for the one that `convert` uses,
            the name of a shipped recipe, or a YAML file. None: the defaults of `swap`.
        options: options of `swap`. `softmax_layers` may also be `auto:N`, as in `convert`.
    """
    if not isinstance(source, PreTrainedModel):
        name = fspath(source)
        model: Any = empty_model(name, dtype, revision=revision, trust_remote_code=trust_remote_code)
        with validly(name, *OF_SIZES):
            return inspected(model, recipe, options)
    return inspected(source, recipe, options)


def inspected(model: Any, recipe: str | None, options: dict[str, Any]) -> Inspection:
    """Report on a model, which may be without weights."""
    if isinstance(model, T2RModel):
        if given := sorted([*options, *(["recipe"] if recipe not in (None, DEFAULT) else [])]):
            raise T2RError(f"{name_of(model)} is already swapped: do not give {', '.join(given)}")
        return report(model, True)
    if recipe is not None:
        options = over(recipe_for(model, recipe).swap, options)
    count = parse_auto(options.get("softmax_layers"))
    if count is None:
        return report(swap(empty_twin(type(model), model), **options), False)
    return undecided(model, count, options)


def recipe_for(model: PreTrainedModel, name: str) -> Recipe:
    """Return a recipe by name; `default` is that of `convert` for this model."""
    return load_recipe(default_recipe(model.config.is_encoder_decoder) if name == DEFAULT else name)


def undecided(model: Any, count: int, options: dict[str, Any]) -> Inspection:
    """Report on a conversion that keeps `count` softmax layers, of which it is not known which they will be.

    Totals are those of the layers that take the most memory: if all layers are alike, of any."""
    others = {name: value for name, value in options.items() if name != "softmax_layers"}
    if others.get("softmax_every") is not None:
        raise T2RError(f"softmax_layers=auto:{count} cannot be combined with softmax_every")
    pure = report(swap(empty_twin(type(model), model), **others), False)
    layers: dict[int, list[SiteReport]] = {}
    for site in pure.sites:
        layers.setdefault(site.layer, []).append(site)
    if count >= len(layers):
        raise T2RError(f"softmax_layers=auto:{count} would keep all {len(layers)} layers: nothing would be swapped")

    def growth(layer: int) -> int:
        return sum(site.kv_bytes[LENGTHS[-1]] - site.state_bytes for site in layers[layer])

    largest = sorted(sorted(layers, key=growth)[-count:])
    kept = report(swap(empty_twin(type(model), model), **others, softmax_layers=largest), False)
    named = kept.options | {"softmax_layers": f"auto:{count}"}
    return dataclasses.replace(kept, options=named, sites=pure.sites, undecided=count)


def memory_by_length(source: PreTrainedModel | str | PathLike[str], lengths: Sequence[int]) -> list[dict[str, int]]:
    """Return the bytes of a sequence after each number of `tokens`, of a swapped `model` and of its `teacher`, with
    keys and values in bfloat16 and states in float32."""
    if not isinstance(source, PreTrainedModel):
        source = empty_model(fspath(source), "bfloat16", revision=None, trust_remote_code=False)
    found = report(source, True, torch.bfloat16, lengths)
    return [{"tokens": n, "teacher": found.kv_bytes[n], "model": found.cache_bytes[n]} for n in lengths]


def lengths_within(positions: int | None, lengths: Sequence[int] = LENGTHS) -> list[int]:
    """Return the lengths that a model with this number of positions can read, at least one. None: all."""
    return [n for n in lengths if positions is None or n <= positions] or [positions or lengths[0]]


def empty_model(source: str, dtype: str, **hub: Any) -> PreTrainedModel:
    """Return the model on the meta device, without its weights."""
    config = load_config(source, **hub)
    chosen = choose_dtype(dtype)
    saved = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    options: dict[str, Any] = {"dtype": saved if chosen == "auto" else chosen}
    if not isinstance(config, T2RConfig):
        options["trust_remote_code"] = hub["trust_remote_code"]
    with validly(source, Exception):  # of any kind
        try:
            with torch.device("meta"):
                return auto_class(config).from_config(config, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            raise refusal(config.model_type, "transformers has no language model of that type") from error


@contextmanager
def validly(source: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds, which inconsistent sizes in a configuration cause, to T2RError."""
    try:
        yield
    except T2RError:
        raise
    except kinds as error:
        reason = shortened(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise T2RError(f"the configuration of {source} is not valid ({reason})") from error


def empty_twin(base_class: Any, model: Any) -> Any:
    """Return the base model of another, without weights. Its attention is `eager`, the only name that families outside
    the attention interface accept."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        return compat.build_from_config(base_class, config, dtype=model.dtype, attn_implementation="eager")


def report(
    model: Any, swapped: bool, dtype: torch.dtype | None = None, lengths: Sequence[int] | None = None
) -> Inspection:
    """Report on a swapped model. `dtype` is that of keys and values, by default the model's."""
    config: T2RConfig = model.t2r_config
    dtype, lengths = dtype or model.dtype, lengths or LENGTHS
    base, kin = empty_twin(model.base_class, model), family_of(model)
    before = [count(site.module.parameters()) for site in kin.sites(base)]
    layers = len(kin.decoder_layers(model))
    kept = config.kept_layers(layers)
    stock: list[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    stock += [DynamicLayer() for _ in range(layers - len(stock))]  # T5's configuration counts encoder layers
    sites = []
    for site, parameters in zip(kin.sites(model), before, strict=True):
        layer = DynamicLayer() if site.cross else stock[site.layer]
        swapped_site = site.layer not in kept and not config.keeps(site.cross)
        sites.append(site_report(site, kin.shape(site.module), swapped_site, parameters, layer, dtype, lengths))
    parameters, added = count(base.parameters()), sum(site.parameters_added for site in sites)
    return Inspection(
        model=name_of(model),
        model_type=model.config.model_type,
        swapped=swapped,
        merged=config.merged,
        dtype=str(dtype).removeprefix("torch."),
        options={name: getattr(config, name) for name in OPTIONS},
        sites=sites,
        encoder_layers=len(kin.encoder_layers(model)),
        parameters=parameters,
        parameters_added=added,
        share=added / parameters,
        state_bytes=sum(site.state_bytes for site in sites),
        kv_bytes={n: sum(site.kv_bytes[n] for site in sites) for n in lengths},
        cache_bytes={n: sum(site.cache_bytes(n) for site in sites) for n in lengths},
        ungrouped=ungrouped(config, sites, dtype),
        cross_saves_from=cross_saves_from(sites),
        positions=kin.max_positions(model),
    )


def cross_saves_from(sites: list[SiteReport]) -> int | None:
    """Return the shortest source for which recurrent cross attention takes less memory than keys and values."""
    cross = [site for site in sites if site.cross and site.recurrent]
    if not cross:
        return None
    length = next(iter(cross[0].kv_bytes))
    per_token = sum(site.kv_bytes[length] for site in cross) // length
    return sum(site.state_bytes for site in cross) // per_token + 1


def site_report(
    site: Site,
    shape: Shape,
    swapped: bool,
    parameters: int,
    layer: CacheLayerMixin,
    dtype: torch.dtype,
    lengths: Sequence[int],
) -> SiteReport:
    """Report on one site. `parameters` and `layer` are those of the base model."""
    module: Any = site.module
    feature_map = module.feature_map if swapped and module.has_map else None
    window = getattr(module, "window", None)  # also of a softmax layer with a sliding window
    return SiteReport(
        name=site.name,
        layer=site.layer,
        cross=site.cross,
        recurrent=swapped,
        **shape._asdict(),
        feature_size=None if feature_map is None else feature_map.feature_size,
        parameters_added=count(site.module.parameters()) - parameters,
        state_bytes=0 if feature_map is None else state_bytes(feature_map, shape.head_dim, dtype),
        kv_bytes={n: kv_bytes(layer, shape, n, dtype) for n in lengths},
        windows=None if window is None else list(window.sizes),
        window_bytes=None if window is None else {n: window_bytes(window, shape, n, dtype) for n in lengths},
        window_nbits=None if window is None else window.nbits,
    )


def window_bytes(window: Any, shape: Shape, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the windows of a layer after `length` tokens, and of their number."""
    held = sum(min(length, size + window.sinks) for size in window.sizes if size)
    each = token_bytes(shape.head_dim, shape.head_dim, window.nbits, dtype.itemsize)
    return held * each + torch.long.itemsize


def state_bytes(feature_map: FeatureMap, value_size: int, dtype: torch.dtype) -> int:
    return sum(x.nbytes for x in feature_map.empty_state(1, value_size, dtype, "meta") if x is not None)


def kv_bytes(layer: CacheLayerMixin, shape: Shape, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of a layer of a stock cache after `length` tokens, considering its window."""
    layer = copy.copy(layer)
    read = torch.empty(1, shape.num_key_value_heads, length, shape.head_dim, dtype=dtype, device="meta")
    layer.update(read, read)
    assert layer.keys is not None and layer.values is not None
    return layer.keys.nbytes + layer.values.nbytes


def ungrouped(config: T2RConfig, sites: list[SiteReport], dtype: torch.dtype) -> Ungrouped | None:
    """Return the cost of the sites with `grouped=False`. None: it would change nothing."""
    recurrent = [site for site in sites if site.recurrent and site.feature_size is not None]
    if (
        config.plan is not None
        or config.merged
        or not config.grouped
        or all(site.num_heads == site.num_key_value_heads for site in recurrent)
    ):
        return None
    parameters = held = 0
    for site in recurrent:
        shape = Shape(site.num_heads, site.num_key_value_heads, site.head_dim)
        options = config.map_options(site.cross) | {"grouped": False}
        with torch.device("meta"):
            feature_map = make_feature_map(config.feature_map, **shape._asdict(), **options)
        parameters += count(feature_map.parameters())
        held += state_bytes(feature_map, site.head_dim, dtype)
    return Ungrouped(parameters, held)


def count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def name_of(model: Any) -> str:
    return model.config.name_or_path or type(model).__name__
