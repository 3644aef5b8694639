"""The language model of the paper: it computes what fairseq computes, and behaves like other transformers models."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy, layer_norm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

import t2r
from t2r.architectures import AdaptiveLMConfig, AdaptiveLMForCausalLM
from t2r.architectures.adaptive_lm.modeling import sinusoids
from t2r.cli import app
from t2r.evaluation.logits import logits_by_slice
from t2r.evaluation.perplexity import perplexity
from t2r.model.logits import Readout
from t2r.reporting.inspection import inspect_model

VOCABULARY, PAD = 53, 1
NO_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "layerdrop", "softmax_dropout"), 0.0)
SMALL = NO_DROPOUT | {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "cutoffs": [11, 30],
    "adaptive_factor": 2,
}
UNTIED = {"tie_word_embeddings": False, "tie_adaptive_projections": False}


def make(dtype=torch.float64, **fields):
    """Return a small model with random biases and norms."""
    torch.manual_seed(0)
    model = AdaptiveLMForCausalLM(AdaptiveLMConfig(**(SMALL | fields))).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter)).mul_(1.5 if "norm" in name else 1)
    return model


def text(rows=2, length=9, vocabulary=VOCABULARY):
    """Return words of all bands, including the first and last of each."""
    ids = torch.randint(4, vocabulary, (rows, length))
    ids[0, :6] = torch.tensor([10, 11, 29, 30, vocabulary - 1, 4])
    return ids


def padded(side):
    """Return three padded texts of 9, 6 and 3 words."""
    ids = text(3)
    mask = torch.ones_like(ids)
    for row in (1, 2):
        mask[row, : 3 * row] = 0
    mask = mask if side == "left" else mask.flip(1)
    return ids.masked_fill(mask == 0, PAD), mask


# --- What is computed ---------------------------------------------------------------------------------------


def by_the_book(model, ids):
    """Compute the log-probabilities of one text from the weights, one token and one head at a time."""
    config, w = model.config, model.state_dict()
    size, heads = config.hidden_size, config.num_attention_heads
    bounds = [0, *config.cutoffs, config.vocab_size]

    def affine(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        return layer_norm(x, (size,), w[f"{name}.weight"], w[f"{name}.bias"])

    rows = []
    for t, word in enumerate(ids.tolist()):
        band = max(i for i, first in enumerate(bounds[:-1]) if word >= first)
        row = w[f"model.embed_tokens.embeddings.{band}.weight"][word - bounds[band]]
        if config.cutoffs:
            row = w[f"model.embed_tokens.projections.{band}.weight"] @ row
        rates = [10000 ** (-i / (size / 2 - 1)) for i in range(size // 2)]
        angles = [(PAD + 1 + t) * rate for rate in rates]
        wave = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=row.dtype)
        rows.append(row * math.sqrt(size) + wave)
    x = torch.stack(rows)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        y = norm(f"{layer}.self_attn_layer_norm", x)
        q, k, v = (affine(f"{layer}.self_attn.{name}_proj", y).chunk(heads, -1) for name in "qkv")
        mixed = torch.zeros_like(x).chunk(heads, -1)
        for h in range(heads):
            for t in range(len(ids)):
                scores = k[h][: t + 1] @ q[h][t] / math.sqrt(size / heads)
                mixed[h][t] = scores.softmax(0) @ v[h][: t + 1]
        x = x + affine(f"{layer}.self_attn.out_proj", torch.cat(mixed, -1))
        y = norm(f"{layer}.final_layer_norm", x)
        x = x + affine(f"{layer}.fc2", affine(f"{layer}.fc1", y).relu())
    if config.final_layer_norm:
        x = norm("model.final_layer_norm", x)

    head = x @ w["lm_head.words.0.weight"].T
    if config.cutoffs:
        head = torch.cat([head, x @ w["lm_head.classes.weight"].T], -1)
    head = head.softmax(-1)
    first = bounds[1]
    parts = [head[:, :first]]
    for i in range(len(config.cutoffs)):
        inner = x @ w[f"lm_head.projections.{i}.weight"] @ w[f"lm_head.words.{i + 1}.weight"].T
        parts.append(head[:, first + i, None] * inner.softmax(-1))
    return torch.cat(parts, -1).log()


@pytest.mark.parametrize(
    "fields",
    [{}, UNTIED, {"tie_adaptive_projections": False}, {"cutoffs": []}, {"cutoffs": [20]}, {"final_layer_norm": True}],
    ids=["tied", "untied", "words tied", "one band", "two bands", "final norm"],
)
def test_it_computes_what_the_paper_says(fields):
    model, ids = make(**fields), text()
    with torch.no_grad():
        actual = model(ids).logits
    assert actual.dtype == torch.float64
    for row in range(len(ids)):
        # Positions are float32 in every dtype, as in fairseq. Those of the reference are float64.
        assert (actual[row] - by_the_book(model, ids[row])).abs().max() < 1e-5
    assert actual.logsumexp(-1).abs().max() < 1e-12  # normalized
    half = model.bfloat16()(ids).logits
    assert half.dtype == torch.float32
    assert half.logsumexp(-1).abs().max() < 1e-5


def test_positions_are_computed_and_never_rounded():
    model = make(torch.float32)
    assert not [name for name in (*model.state_dict(), *dict(model.named_buffers())) if "position" in name]
    far = sinusoids(torch.tensor([0, 3, 70_000]), 8)
    assert torch.equal(far[0], torch.tensor([0.0] * 4 + [1.0] * 4))
    rates = torch.tensor([1, 10000 ** (-1 / 3), 10000 ** (-2 / 3), 1e-4], dtype=torch.float64)
    expected = torch.cat([(3 * rates).sin(), (3 * rates).cos()])
    assert torch.allclose(far[1].double(), expected, atol=1e-6)
    assert far.dtype == torch.float32
    # In half precision, positions 2,049 and 2,050 would be equal.
    seen = []
    model.half().model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.full((1, 2), 7), position_ids=torch.tensor([[2047, 2048]]))
    assert (seen[0][0, 0] - seen[0][0, 1]).abs().max() > 0.5


def test_a_padding_token_chosen_later_moves_nothing(tmp_path):
    model, ids = make(torch.float32), text()
    assert model.config.first_position == PAD + 1
    assert AdaptiveLMConfig(**(SMALL | {"pad_token_id": 6})).first_position == 7
    before = model(ids).logits
    model.config.pad_token_id = 2
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.pad_token_id == 2
    assert torch.equal(again(ids).logits, before)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_changes_nothing(side, implementation):
    model = make()
    model.set_attn_implementation(implementation)
    ids, mask = padded(side)
    together = model(ids, attention_mask=mask).logits
    for row in range(3):
        real = mask[row].bool()
        assert (together[row, real] - model(ids[row, real][None]).logits[0]).abs().max() < 1e-9


# --- The loss -----------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    cutoffs=st.sets(st.integers(1, VOCABULARY - 1), max_size=3).map(sorted),
    ties=st.sampled_from([{}, {"tie_adaptive_projections": False}, UNTIED]),
    ignored=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_the_loss_by_bands_is_the_cross_entropy(cutoffs, ties, ignored, seed):
    model = make(cutoffs=cutoffs, **ties)
    torch.manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (2, 7))
    labels = ids.masked_fill(torch.rand(2, 7) < ignored, -100)
    scored = max(1, int((labels[:, 1:] >= 0).sum()))

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}  # every parameter has a gradient

    out = model(ids, labels=labels)
    assert out.logits is None
    expected = cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / scored
    assert torch.allclose(out.loss, expected, atol=1e-12)
    ours = gradients(out.loss)
    for name, gradient in gradients(expected).items():
        assert torch.allclose(ours[name], gradient, atol=1e-12), name


class Widths(TorchDispatchMode):
    """Record the last dimension of every tensor created in forward and backward."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen |= {n for x in tree_leaves(out) if isinstance(x, torch.Tensor) for n in x.shape}
        return out


def test_the_loss_never_forms_all_logits():
    model, ids = make().train(), text()
    with Widths() as widths:
        model(ids, labels=ids).loss.backward()
    assert VOCABULARY not in widths.seen
    with Widths() as widths:
        model(ids)
    assert VOCABULARY in widths.seen  # the test detects logits


def test_num_items_in_batch_and_logits_to_keep():
    model, ids = make(), text()
    assert model.loss_without_logits
    labels = ids.masked_fill(torch.arange(9) < 3, -100)
    mean = model(ids, labels=labels).loss
    for count in (24, torch.tensor(24)):
        assert torch.allclose(model(ids, labels=labels, num_items_in_batch=count).loss, mean * 12 / 24)
    assert model(ids, labels=torch.full_like(ids, -100)).loss == 0
    whole = model(ids).logits
    entered = []
    model.lm_head.register_forward_pre_hook(lambda _, args: entered.append(args[0].shape[1]))
    assert torch.allclose(model(ids, logits_to_keep=1).logits, whole[:, -1:])
    assert entered == [1]
    assert torch.allclose(model(ids, logits_to_keep=torch.tensor([2, 5])).logits, whole[:, [2, 5]])


def test_a_word_that_is_not_there_is_an_error():
    model = make()
    for word in (VOCABULARY, -1):
        with pytest.raises(IndexError):
            model(torch.tensor([[4, word]]))


# --- Training -----------------------------------------------------------------------------------------------


def test_it_starts_as_in_fairseq():
    config = AdaptiveLMConfig(**(SMALL | {"hidden_size": 128, "vocab_size": 4000, "cutoffs": [1000, 2000]}))
    model = AdaptiveLMForCausalLM(config)
    tables = model.model.embed_tokens
    for i, table in enumerate(tables.embeddings):
        assert table.weight.std().item() == pytest.approx((128 / 2**i) ** -0.5, rel=0.05)
    assert tables.embeddings[0].weight[PAD].abs().max() == 0
    assert tables.embeddings[1].weight[PAD].abs().max() > 0  # in other bands, this index is an ordinary word

    def reaches(weight, bound):
        return 0.95 * bound < weight.abs().max().item() <= bound

    attention, layer = model.model.layers[1].self_attn, model.model.layers[1]
    xavier = (6 / 256) ** 0.5
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert reaches(projection.weight, xavier / 2**0.5)
        assert reaches(projection.bias, 128**-0.5)
    assert reaches(attention.out_proj.weight, xavier)
    assert reaches(layer.fc1.weight, (6 / (128 + 24)) ** 0.5)
    assert reaches(tables.projections[2].weight, (6 / (128 + 32)) ** 0.5)
    assert reaches(model.lm_head.classes.weight, (6 / 130) ** 0.5)
    assert all(x.abs().max() == 0 for x in (attention.out_proj.bias, layer.fc1.bias, layer.fc2.bias))


def test_layers_are_skipped_in_training_only():
    model, ids = make(layerdrop=0.4, num_hidden_layers=4).train(), text()
    runs = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: runs.append(1))
    for _ in range(100):
        model(ids)
    assert 200 < len(runs) < 280  # 240 of 400 on average; 4 standard deviations are 39
    model.eval()
    runs.clear()
    model(ids)
    assert len(runs) == 4


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_processes_agree_on_what_has_a_gradient(process_group):
    """DDP raises at the next forward if a parameter had no gradient, from a skipped layer or a band without words."""
    model = make(layerdrop=0.5).train()
    parallel = DistributedDataParallel(model, find_unused_parameters=False)
    for _ in range(6):
        ids = torch.randint(4, 11, (2, 6))
        parallel(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_every_dropout_is_in_its_place():
    """Each dropout alone changes the loss in training, and none changes it in evaluation."""
    ids = text()
    expected = make()(ids, labels=ids).loss
    for name in set(NO_DROPOUT) - {"layerdrop"}:
        model = make(**{name: 0.5})
        assert torch.equal(model(ids, labels=ids).loss, expected), name
        assert not torch.isclose(model.train()(ids, labels=ids).loss, expected), name
        assert model(ids).logits.logsumexp(-1).abs().max() < 1e-9


def test_gradient_checkpointing_changes_nothing():
    gradients = []
    for checkpointing in (False, True):
        model, ids = make().train(), text()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.allclose(plain, checkpointed)


# --- A model like others ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 3, "do_sample": False}],
    ids=["greedy", "sampling", "beam"],
)
@pytest.mark.parametrize("cutoffs", [[11, 30], []])
def test_it_generates_with_a_cache_what_it_generates_without(options, cutoffs):
    model = make(cutoffs=cutoffs)
    ids, mask = padded("left")
    options |= {"max_new_tokens": 8, "eos_token_id": None}
    written = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        written.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **options))
    assert torch.equal(*written)
    if not options["do_sample"]:
        alone = model.generate(ids[2, 6:][None], attention_mask=torch.ones(1, 3, dtype=torch.long), **options)
        assert torch.equal(alone[0, 3:], written[0][2, 9:])


@pytest.mark.parametrize("fields", [{}, {"tie_adaptive_projections": False}, UNTIED, {"cutoffs": []}])
def test_saving_and_loading_keeps_what_is_tied(fields, tmp_path):
    model, ids = make(torch.float32, **fields), text()
    model.save_pretrained(tmp_path)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert isinstance(again, AdaptiveLMForCausalLM)
    assert torch.equal(again(ids).logits, model(ids).logits)
    config = again.config
    tails = len(config.cutoffs)
    for one in (model, again):
        inner, outer = one.get_input_embeddings(), one.get_output_embeddings()
        words = [outer.words[i].weight is inner.embeddings[i].weight for i in range(tails + 1)]
        projections = [outer.projections[i].weight is inner.projections[i + 1].weight for i in range(tails)]
        assert words == [config.tie_word_embeddings] * (tails + 1)
        assert projections == [config.tie_adaptive_projections] * tails


def test_it_returns_what_it_is_asked_for():
    model, ids = make(), text()
    out = model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.allclose(model.lm_head(out.hidden_states[-1]), out.logits)
    with pytest.raises(t2r.T2RError, match='attn_implementation="eager"'):
        model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    eager = model(ids, output_attentions=True)
    assert [tuple(x.shape) for x in eager.attentions] == [(2, 2, 9, 9)] * 2
    assert torch.allclose(eager.attentions[0].sum(-1), torch.ones(2, 2, 9, dtype=torch.float64))
    assert torch.allclose(eager.logits, out.logits)
    embedded = model.get_input_embeddings()(ids)
    assert torch.allclose(model(inputs_embeds=embedded).logits, out.logits)
    assert torch.equal(model(ids, return_dict=False)[0], eager.logits)
    with pytest.raises(t2r.T2RError, match="either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=embedded)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cutoffs": [30, 11]}, "must be increasing, between 0 and vocab_size=53"),
        ({"cutoffs": [11, 53]}, "must be increasing, between 0 and vocab_size=53"),
        ({"cutoffs": [0, 11]}, "must be increasing"),
        ({"num_attention_heads": 3}, "must be a multiple of num_attention_heads=3"),
        ({"adaptive_factor": 8}, "must be divisible by adaptive_factor=8 2 times"),
        ({"hidden_size": 15}, "must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and less than 1"),
        ({"activation_function": "rellu"}, "activation_function='rellu'"),
        ({"pad_token_id": 53}, "pad_token_id=53 is not in a vocabulary of 53"),
        ({"tie_word_embeddings": False}, "tie_adaptive_projections requires tie_word_embeddings"),
    ],
)
def test_an_invalid_configuration_is_refused(fields, says):
    with pytest.raises(t2r.T2RError, match=says) as error:
        AdaptiveLMConfig(**(SMALL | fields))
    assert "\n" not in str(error.value)


def test_its_embeddings_cannot_be_resized():
    model = make()
    assert model.resize_token_embeddings(VOCABULARY) is model.get_input_embeddings()
    with pytest.raises(t2r.T2RError, match="cannot be resized"):
        model.resize_token_embeddings(VOCABULARY + 1)


# --- With the rest of t2r -----------------------------------------------------------------------------------


def test_the_number_of_parameters_of_the_papers_model():
    with torch.device("meta"):
        model = AdaptiveLMForCausalLM(AdaptiveLMConfig())
    embeddings = 20000 * 1024 + 40000 * 256 + 207744 * 64 + 1024 * (1024 + 256 + 64)
    layer = 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    expected = embeddings + 2 * 1024 + 32 * layer
    assert sum(p.numel() for p in model.parameters()) == expected == 448_473_088
    inspection = inspect_model(model, feature_size=32)
    assert inspection.parameters == expected
    assert inspection.parameters_added == 32 * 8 * 32 * (128 + 1)
    assert f"{inspection.share:.2%}" == "0.24%"


def test_perplexity_and_slices_are_those_of_the_whole():
    model, ids = make(), text(1, 40)
    assert Readout(model, {"input_ids": ids}).split
    whole = model(ids).logits
    assert torch.allclose(torch.cat(list(logits_by_slice(model, ids, 3, 30)), 1), whole[:, 3:30].float())
    scored = perplexity(model, ids[0], window=20, stride=10, teacher=make(final_layer_norm=True))
    expected = -model(ids[:, :20]).logits[0, 9:19].gather(-1, ids[0, 10:20, None])[:, 0]
    assert torch.allclose(scored.nll[:10].double(), expected, atol=1e-5)
    assert scored.mean_kl > 0


@pytest.mark.parametrize("cutoffs", [[11, 30], []])
def test_a_swapped_one_merges_and_keeps_its_loss_by_bands(cutoffs, tmp_path):
    ids = text()
    model = t2r.swap(make(cutoffs=cutoffs), feature_size=4)
    assert model.loss_without_logits
    if cutoffs:
        with Widths() as widths:
            model(ids, labels=ids).loss.backward()
        assert VOCABULARY not in widths.seen
    before = model(ids).logits
    t2r.merge(model).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.model_type == "adaptive_lm"
    assert (again(ids).logits - before).abs().max() < 1e-9
    assert again.lm_head.words[0].weight is again.model.embed_tokens.embeddings[0].weight


TEXT = "the old man and the sea went out with a boat to catch fish but he came home with none . " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and a word tokenizer, whose ids are ordered by frequency."""
    root = tmp_path_factory.mktemp("adaptive")
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.train_from_iterator([TEXT], trainers.WordLevelTrainer(special_tokens=["<s>", "<pad>", "</s>", "<unk>"]))
    words = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    (root / "text.txt").write_text(TEXT)
    make(torch.float32, cutoffs=[8, 14], vocab_size=len(words)).save_pretrained(root / "model")
    words.save_pretrained(root / "model")
    return root


def run(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_commands_know_it(folder):
    report = json.loads(run("inspect", folder / "model", "--feature-size", 4, "--json"))
    assert report["model_type"] == "adaptive_lm"
    assert [site["name"] for site in report["sites"]] == [f"model.layers.{i}.self_attn" for i in range(2)]
    run("swap", folder / "model", folder / "rnn", "--feature-size", 4)
    assert "2 of 2 decoder layers recurrent" in run("inspect", folder / "rnn")
    for name in ("model", "rnn"):
        written = run("generate", folder / name, "the old man", "--max-new-tokens", 5, "--no-do-sample")
        assert set(written.split()) <= {*TEXT.split(), "<s>", "<unk>"}
        assert written.split()
    options = ("--window", 32, "--stride", 16, "--limit", 4, "--no-generation", "--json")
    teacher, student = json.loads(
        run("evaluate", folder / "model", folder / "rnn", "--text", folder / "text.txt", *options)
    )
    assert teacher["tokens"] == student["tokens"] == 64
    assert teacher["perplexity"] == pytest.approx(teacher["word_perplexity"], rel=1e-6)
    assert student["kl"] > 0
