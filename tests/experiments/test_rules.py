"""The trial of rules: the gated delta rule in chunks is its definition, and it is a rule like any other."""

import dataclasses

import pytest
import torch

import rules
import t2r
from delta import CHUNK, DeltaMap, GatedDelta, UnitLowerInverse, chunked, recurrent
from families import batch, tiny
from t2r.attention.recurrence import recurrent_sites
from t2r.errors import T2RError
from t2r.feature_maps import FEATURE_MAPS
from t2r.ops import State
from t2r.plans import MemoryPlan


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """The map is registered in these tests only: others run for every map that there is."""
    monkeypatch.setitem(FEATURE_MAPS, DeltaMap.name, DeltaMap)


def columns(time, *, rows=2, heads=4, key_heads=2, features=8, values=5, seed=0):
    torch.manual_seed(seed)
    feature_map = DeltaMap(
        head_dim=6, num_heads=heads, num_key_value_heads=key_heads, feature_size=features, shared=False
    ).double()
    with torch.no_grad():
        feature_map.gates.weight.normal_()  # gates that depend on the token
    q, k, v = (
        torch.randn(rows, n, time, size, dtype=torch.float64)
        for n, size in ((heads, 6), (key_heads, 6), (key_heads, values))
    )
    with torch.no_grad():
        phi_q, phi_k = feature_map(q, k)
    state = State(
        torch.randn(rows, key_heads, features, values).double(), torch.rand(rows, key_heads, features).double()
    )
    return GatedDelta(key_heads, features), phi_q, phi_k, v, state


@pytest.mark.parametrize("time", [2, CHUNK, 2 * CHUNK + 7])
def test_chunks_have_the_values_and_gradients_of_the_definition(time):
    rule, *given, state = columns(time)
    mask = torch.arange(time) < torch.tensor([[time], [time - 1]])
    found = []
    for compute in (recurrent, chunked):
        leaves = [x.clone().requires_grad_() for x in (*given, state.s, state.z)]
        read, write = rule.parts(*leaves[:3], mask)
        sums, new = compute(read, write, State(*leaves[3:]))
        outputs = [sums.numerator, sums.denominator, new.s, new.z]
        torch.manual_seed(1)
        loss = sum((x * torch.randn_like(x)).sum() for x in outputs)
        found.append([*outputs, *torch.autograd.grad(loss, leaves)])
    for expected, own in zip(*found, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-8, atol=1e-9)


def test_float32_is_exact_enough_for_equal_keys_that_are_written_whole():
    """The worst case of the inverse: each write replaces the one before."""
    rule, phi_q, phi_k, v, state = columns(4 * CHUNK)
    phi_k[..., :8] = phi_k[:, :, :1, :8]
    phi_k[..., 16], phi_k[..., 17] = 1.0, -1e-3
    expected, _ = rule.parallel(phi_q, phi_k, v, state=state)
    found, _ = rule.parallel(phi_q.float(), phi_k.float(), v.float(), state=state.map(torch.Tensor.float))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_key_that_was_written_whole_answers_its_value():
    rule, _, phi_k, v, _ = columns(6)
    phi_k[..., 16], phi_k[..., 17] = 1.0, 0.0
    torch.nn.init.orthogonal_(phi_k[0, 0, :, :8])
    phi_k[0, 0, 5, :8] = phi_k[0, 0, 2, :8]  # the third key again, with another value
    read = phi_k[..., :16].repeat_interleave(2, dim=1)
    _, state = rule.parallel(read, phi_k, v)
    answers = phi_k[0, 0, :, :8] @ state.s[0, 0]
    torch.testing.assert_close(answers[[0, 1, 3, 4]], v[0, 0, [0, 1, 3, 4]])
    torch.testing.assert_close(answers[2], v[0, 0, 5])


def test_the_inverse_of_a_unit_lower_matrix():
    lower = torch.randn(3, 2, 16, 16, dtype=torch.float64).tril(-1).requires_grad_()
    whole = torch.eye(16, dtype=torch.float64) + lower
    torch.testing.assert_close(UnitLowerInverse.apply(lower) @ whole, torch.eye(16).double().expand(3, 2, 16, 16))
    g = torch.randn(3, 2, 16, 16, dtype=torch.float64)
    own, expected = (
        torch.autograd.grad(f, lower, g)[0] for f in (UnitLowerInverse.apply(lower), torch.linalg.inv(whole))
    )
    torch.testing.assert_close(own, expected.tril(-1))


def planned(model_type="llama"):
    base = tiny(model_type, torch.float64)
    config = base.config
    heads = [1 + i for i in range(config.num_key_value_heads)]  # windows that differ by head
    plan = MemoryPlan(tuple((heads,) * config.num_hidden_layers), sinks=1)
    return t2r.swap(base, feature_map="delta", feature_size=8, shared=False, plan=plan).eval()


def test_it_advances_by_what_leaves_windows_that_differ_by_head(tmp_path):
    model, ids = planned(), batch("llama", padding=None)["input_ids"]
    expected = model(ids, use_cache=False).logits
    model.save_pretrained(tmp_path)
    for own in (model, t2r.load(tmp_path)):
        cache = own.make_cache()
        with torch.no_grad():
            first = own(ids[:, :5], past_key_values=cache, use_cache=True).logits
            others = [
                own(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(5, ids.shape[1])
            ]
        torch.testing.assert_close(torch.cat([first, *others], 1), expected)


def test_it_keeps_the_bytes_of_sums():
    sums = t2r.swap(tiny("llama"), feature_size=8)
    own, other = (
        site.feature_map.empty_state(1, 6, torch.float32, "cpu")
        for site in (recurrent_sites(planned())[0], recurrent_sites(sums)[0])
    )
    assert [x.shape for x in own[:2]] == [x.shape for x in other[:2]]


def trial(folder, **changes):
    scale = dataclasses.replace(rules.SCALES["smoke"], **changes)
    return rules.Trial("model", folder, scale, ["train.txt"], "valid.txt", "cpu", None)


def test_a_trial_is_resumed_by_rule_and_its_results_are_written_after_each(tmp_path, monkeypatch):
    measured = {
        "measured": [{"window": 64, "perplexity": 20.0, "kl": 0.0, "kept_bytes": 2**20}],
        "recall": [{"distance": 16, "accuracy": 0.5}],
    }
    done = []

    def train(self, rule):
        if rule == "delta" and len(done) == 1:
            raise KeyboardInterrupt
        done.append(rule)
        return {"seconds": {"transfer": 2.0, "distill": 3.0}, "log": {"transfer": [{"loss": 0.5}], "distill": []}}

    monkeypatch.setattr(rules.Trial, "trained", train)
    monkeypatch.setattr(rules.Trial, "measured", lambda self, folder: measured)
    monkeypatch.setattr(rules.Trial, "plan", lambda self: {})
    with pytest.raises(KeyboardInterrupt):
        trial(tmp_path).run(["sums", "delta"])
    assert "and sums" in (tmp_path / "table.md").read_text()
    done.append("interrupted")
    trial(tmp_path).run(["sums", "delta"])
    assert done == ["sums", "interrupted", "delta"]
    table = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:]] == [
        "| the model itself",
        "| and sums",
        f"| {rules.TITLES['delta']}",
    ]
    assert table[-1].endswith("20.000 (+0.00 %) | 0.0000 | 50 % | 0.500 | 2 + 3 |")
    with pytest.raises(T2RError, match="another distill"):
        trial(tmp_path, distill=9).run(["sums"])


def test_a_plan_is_read_from_a_converted_model(tmp_path):
    model = planned()
    model.save_pretrained(tmp_path)
    found = rules.known_plan(tmp_path / "config.json")
    assert found["features"] == 8
    assert MemoryPlan.of(found["plan"]) == model.t2r_config.memory_plan
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(T2RError, match="no plan with states"):
        rules.known_plan(tmp_path / "other.json")
