"""Training with a replayed CUDA graph gives the same losses and weights as eager training."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

import t2r
from families import FAMILIES, POSITIONS, VOCABULARY, batch, tiny
from t2r import compat
from t2r.attention import masks
from t2r.attention.interface import PADDED, UNMASKED
from t2r.graphs import WARM_UP
from t2r.model import inputs as model_inputs
from t2r.tasks import LanguageModeling, Translation
from t2r.training.loop import preparation, trainer
from t2r.training.planning import timing
from t2r.training.recipes.recipe import Stage
from t2r.training.sessions.run import Run
from t2r.training.sessions.run_stage import run_stage
from t2r.training.steps import objectives
from t2r.training.steps.capture import CapturedStep, Graph
from t2r.training.steps.job import Job, Settings
from t2r.training.steps.learner import Learner
from t2r.training.steps.order import OFFSET
from translating import make_model, make_tokenizer, write_pairs

LENGTH = 16


class Rows(LanguageModeling):
    """Random tokens in blocks; the last batch of an epoch is smaller than the others."""

    def __init__(self):
        super().__init__(None, [])
        self.ids = torch.randint(3, VOCABULARY, (22, LENGTH), generator=torch.Generator().manual_seed(1))

    def dataset(self, block_size):
        return [{"input_ids": row, "labels": row} for row in self.ids]


def test_without_a_gpu_nothing_is_captured():
    settings = Settings(compiled=True)
    assert not trainer.captures(tiny("gpt2"), settings)


def test_models_with_layer_dropout_are_not_captured():
    """A captured step would skip the same layers every time."""
    model = tiny("opt")
    assert not trainer.skips_layers(model)
    model.config.layerdrop = 0.1
    assert trainer.skips_layers(torch.nn.Sequential(model))


def test_a_step_is_captured_after_its_warm_up():
    """On a CPU the work runs eagerly until the capture is due."""
    calls = []
    weight = torch.nn.Parameter(torch.ones(2))

    def work(inputs):
        calls.append(1)
        (inputs["x"] * weight).sum().backward()
        return {"x": inputs["x"]}

    step = CapturedStep(work, [weight])
    for _ in range(WARM_UP):
        step({"x": torch.ones(2)})
    assert len(calls) == WARM_UP
    torch.testing.assert_close(weight.grad, torch.full((2,), float(WARM_UP)))


@pytest.mark.parametrize(
    "model_type",
    ["llama", "mistral", "gemma2", "gemma3_text", "qwen3", "gpt2", "opt", "gpt_neox", "phi3", "adaptive_lm"],
)
@torch.no_grad()
def test_logits_without_masks_are_the_same(model_type):
    """Also with sliding windows and capped scores, in unmodified models, in softmax layers and with exact attention."""
    ids = torch.randint(3, VOCABULARY, (2, 24))
    stock = tiny(model_type, torch.float64)
    swapped = t2r.swap(copy.deepcopy(stock), feature_map="hedgehog", softmax_layers=[1])
    for model in (stock, swapped):
        expected = model(ids).logits
        compat.set_attention_implementation(model, UNMASKED)
        torch.testing.assert_close(model(ids).logits, expected)
    with t2r.exact_attention(swapped):
        torch.testing.assert_close(swapped(ids).logits, stock(ids).logits)


@pytest.mark.parametrize("model_type", [name for name, row in FAMILIES.items() if row.seq2seq])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_logits_with_given_masks_are_the_same(model_type, padded):
    """In unmodified models, in softmax layers and with exact attention; also if the mask hides nothing."""
    inputs = batch(model_type)
    inputs.pop("decoder_attention_mask", None)  # a captured batch has none
    if not padded:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    stock = tiny(model_type, torch.float64)
    swapped = t2r.swap(copy.deepcopy(stock), softmax_layers=[1])
    for model in (stock, swapped):
        expected = model(**inputs).logits
        compat.set_attention_implementation(model, PADDED)
        torch.testing.assert_close(model(**inputs).logits, expected)
    if model_type != "fsmt":  # whose own causal mask overflows in float64
        with t2r.exact_attention(swapped):
            torch.testing.assert_close(swapped(**inputs).logits, stock(**inputs).logits)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["distill", "task"])
def test_nothing_is_compiled_during_a_capture(tmp_path, monkeypatch, objective):
    """It would fail. A captured call cannot know whether a mask hides anything, so layers get one in any case."""
    task, base, model = translation(tmp_path, monkeypatch)
    during, captured, capturing, compiled = [], [], [], torch.nn.Module.compile

    def note(graph, inputs):
        during.append(bool(capturing))
        return graph

    def capture(self, inputs, key):
        capturing.append(key)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_initialized", lambda: True)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            patch.setattr(masking_utils, "is_tracing", lambda *_: True)
            self.work(dict(inputs))
        captured.append(capturing.pop())

    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: compiled(layer, backend=note, **how))
    monkeypatch.setattr(objectives, "fused", lambda function: function)
    monkeypatch.setattr(CapturedStep, "capture", capture)
    monkeypatch.setattr(preparation, "LONG", 1)
    for module in (trainer, preparation, timing):
        monkeypatch.setattr(module, "captures", lambda *_: True)
    torch.compiler.reset()
    job, stage = Job(task, base, Settings(progress=False, compiled=True)), translation_stage(objective, 12)
    timing.time_stage(job, model, stage)
    run_stage(Run(tmp_path / "run", {}), job, model, stage)
    torch.compiler.reset()
    assert len(captured) > 3
    assert during
    assert not any(during)


MOVED = {"feature_map": "t2r", "activation": "softmax", "decay": True}
"""States of rotated queries and keys, whose blocks are moved."""


@pytest.mark.parametrize("options", [{"feature_map": "t2r", "decay": True, "rotary": False}, MOVED])
def test_layers_do_not_synchronize_during_capture(monkeypatch, options):
    """Reading a value on the host would end the capture."""
    monkeypatch.setattr(masks, "values_are_known", lambda: False)
    monkeypatch.setattr(model_inputs, "values_are_known", lambda: False)
    base = tiny("llama").requires_grad_(False)
    model = t2r.swap(copy.deepcopy(base), **options)
    reach = POSITIONS if options is MOVED else None
    for part in (model, base):
        compat.set_attention_implementation(part, UNMASKED)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    for objective in ("transfer", "distill", "task"):
        trains = "maps" if objective == "transfer" else "all"
        stage = Stage("only", objective, trains, steps=1, block_size=LENGTH, batch_tokens=2 * LENGTH, reach=reach)
        learner = Learner(Job(Rows(), base), model, stage).train()
        batch = {"input_ids": ids, "labels": ids}
        if learner.room.largest:
            batch[OFFSET] = torch.tensor([0, 5])
        count = torch.tensor(2 * LENGTH)
        learner(dict(batch), count)  # verifies the model's head, once
        with Looks() as looks:
            learner(dict(batch), count)[0].backward()
        assert not looks.seen, objective


def test_translation_does_not_synchronize_during_capture(tmp_path, monkeypatch):
    """Masks depend on values, except while a stream is being captured."""
    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    monkeypatch.setattr(masks, "values_are_known", lambda: False)
    task, base, model = translation(tmp_path, monkeypatch)
    for objective in ("transfer", "distill", "task"):
        stage = Stage("only", objective, "maps" if objective == "transfer" else "all", steps=1)
        # In training mode, transformers draws a number on the CPU for each layer, which it may drop.
        learner = Learner(Job(task, base), model, stage).eval()
        batch = task.in_few_shapes(task.collate([task.dataset(64)[0]]), 64)
        count = torch.tensor(20)
        learner(dict(batch), count)
        with Looks() as looks:
            learner(dict(batch), count)[0].backward()
        assert not looks.seen, objective


def translation(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))
    base = make_model().requires_grad_(False)
    model = t2r.swap(
        copy.deepcopy(base), feature_size=4, recurrent="both", cross_feature_size=8, seed=3
    ).requires_grad_(True)
    task = Translation(make_tokenizer(), *write_pairs(tmp_path, "train", 60), progress=False)
    task.check(model, [64])
    task.prepare(None, 64)
    return task, base, model


def test_gradients_of_replays_are_added_to_those_of_eager_steps():
    """With a graph that only pretends to replay: the first replay of a step starts from zero, or from what is there."""
    used, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))

    def work(inputs):
        (inputs["x"] * used).sum().backward()
        return {}

    step = CapturedStep(work, [used, other])
    step({"x": torch.ones(2)})
    assert step.reached == {used}
    step.gradients = {used: torch.full((2,), 7.0)}
    inputs = {"x": torch.full((3,), 2.0)}
    key = None, (("x", torch.Size([3]), torch.float32),)
    step.graphs[key] = Graph(lambda: step.gradients[used].add_(10), {"x": torch.zeros(3)})
    step(inputs)  # after an eager step whose gradient is 1
    assert used.grad.tolist() == [11, 11]
    step(inputs)
    assert used.grad.tolist() == [21, 21]
    used.grad = None
    step(inputs)
    assert used.grad.tolist() == [10, 10]
    assert other.grad is None


def trained_both_ways(tmp_path, monkeypatch, caplog, model, base, stage, task):
    """Losses and weights by whether steps were captured."""
    losses, weights = {}, {}
    for captured in (False, True):
        own = copy.deepcopy(model)
        run = Run(tmp_path / f"run{captured}", {})
        with monkeypatch.context() as patch, caplog.at_level("INFO"):
            if not captured:
                patch.setattr(trainer, "captures", lambda *_: False)
            run_stage(run, Job(task, base, Settings(progress=False, compiled=True)), own, stage)
        losses[captured] = [entry["loss"] for entry in run.facts["only.log"]]
        weights[captured] = {name: p.detach() for name, p in own.named_parameters()}
    assert "replayed as CUDA graphs" in caplog.text
    return losses, weights


class Looks(TorchDispatchMode):
    """Records operations that require a value on the host."""

    def __enter__(self):
        self.seen = []
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen.append(function)
        return function(*args, **(kwargs or {}))


def translation_stage(objective, steps):
    """A stage whose batches have several shapes, two of them in each step."""
    trains = "maps" if objective == "transfer" else "all"
    sizes = {"block_size": 64, "batch_tokens": 128, "device_tokens": 64}
    return Stage("only", objective, trains, steps=steps, learning_rate=1e-3, schedule="constant", **sizes)


@pytest.mark.parametrize("objective", ["distill", "task"])
def test_batches_in_few_shapes_train_alike(tmp_path, monkeypatch, objective):
    """In float64: Adam turns rounding errors of tiny gradients into steps of full size."""
    task, base, model = translation(tmp_path, monkeypatch)
    base, model = base.double(), model.double()
    monkeypatch.setattr(trainer, "CapturedStep", lambda work, _: lambda inputs, variant: work(dict(inputs)))
    losses = {}
    for captured in (False, True):
        monkeypatch.setattr(trainer, "captures", lambda *_, captured=captured: captured)
        run = Run(tmp_path / f"run{captured}", {})
        run_stage(run, Job(task, base, Settings(progress=False)), copy.deepcopy(model), translation_stage(objective, 8))
        losses[captured] = [entry["loss"] for entry in run.facts["only.log"]]
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-6, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("objective", ["transfer", "distill", "task"])
def test_captured_translation_matches_eager_training(tmp_path, monkeypatch, caplog, objective):
    task, base, model = translation(tmp_path, monkeypatch)
    base, model = base.cuda().double(), model.cuda().double()
    losses, _ = trained_both_ways(tmp_path, monkeypatch, caplog, model, base, translation_stage(objective, 40), task)
    # A transfer averages over rows, and copies of rows count.
    tolerance = 5e-2 if objective == "transfer" else 1e-4
    torch.testing.assert_close(losses[True], losses[False], rtol=tolerance, atol=tolerance)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("objective", ["transfer", "distill", "task"])
@pytest.mark.parametrize("options", [{"feature_map": "t2r", "activation": "softmax", "rotary": False}, MOVED])
def test_captured_training_matches_eager_training(tmp_path, monkeypatch, caplog, options, objective, accumulation):
    base = tiny("llama").cuda().requires_grad_(False)
    how = {"shared": False, "grouped": False, "key_weights": True, "decay": True, "seed": 3}
    model = t2r.swap(copy.deepcopy(base), **(how | options))
    stage = Stage(
        "only",
        objective,
        "maps" if objective == "transfer" else "all",
        steps=16,
        block_size=LENGTH,
        batch_tokens=4 * LENGTH * accumulation,
        device_tokens=4 * LENGTH,
        learning_rate=1e-2,
        schedule="constant",
        reach=POSITIONS if options is MOVED else None,
    )
    losses, weights = trained_both_ways(tmp_path, monkeypatch, caplog, model, base, stage, Rows())
    torch.testing.assert_close(losses[True], losses[False], rtol=2e-3, atol=2e-3)
    for name, expected in weights[False].items():  # sums in another order, through 16 steps of Adam
        difference = (weights[True][name] - expected).norm() / expected.norm().clamp_min(1e-3)
        assert difference < 2e-2, name


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_training_goes_on_after_a_failed_capture():
    """With dropout: random numbers are still drawn, also for shapes that were captured before."""
    weight = torch.nn.Parameter(torch.ones(64, device="cuda"))

    def work(inputs):
        x = torch.nn.functional.dropout(inputs["x"] * weight, 0.5)
        if len(x) == 3:
            x.sum().item()  # synchronizes, which a capture does not allow
        x.sum().backward()
        return {"sum": x.detach().sum()}

    step = CapturedStep(work, [weight])
    rows = {count: {"x": torch.ones(count, 64, device="cuda")} for count in (2, 3)}
    for _ in range(WARM_UP + 1):
        step(rows[2])
    assert len(step.graphs) == 1
    for _ in range(2):
        step(rows[3])
    assert not step.possible
    assert len({step(rows[count])["sum"].item() for count in (2, 3) for _ in range(4)}) > 2
