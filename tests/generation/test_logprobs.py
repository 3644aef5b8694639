"""Probabilities of tokens, and sequences that are stopped from outside."""

import pytest
import torch

from engines import alone, prompts, swapped
from t2r import Engine

KINDS = (
    {},
    {"do_sample": True, "top_k": 5, "temperature": 0.7},
    {"sequence_bias": [[[20], 4.0]], "suppress_tokens": [3, 4]},
    {"sequence_bias": [[[20], 4.0]], "no_repeat_ngram_size": 1},  # chosen by the processors of transformers
)


@pytest.mark.parametrize("options", KINDS)
def test_probabilities_of_tokens(options):
    """They are those of the model, with biases, whatever runs beside. The tokens do not change."""
    model = swapped("gpt2 kept")
    (prompt, other), how = prompts([5, 9]), {"max_new_tokens": 7, "seed": 3, **options}
    engine = Engine(model, step_tokens=4)
    engine.submit(other, max_new_tokens=12)
    plain = engine.submit(prompt, **how)
    sequence = engine.submit(prompt, logprobs=3, **how)
    list(engine.run())
    assert sequence.tokens == plain.tokens
    assert not plain.logprobs
    assert len(sequence.logprobs) == 7
    whole = torch.cat([prompt, torch.tensor([sequence.tokens])], 1)
    with torch.no_grad():
        logits = model(whole).logits[0, prompt.shape[1] - 1 : -1].float()
    for (token,), bias in options.get("sequence_bias", ()):
        logits[:, token] += bias
    logits[:, options.get("suppress_tokens", [])] = -torch.inf
    wanted = logits.log_softmax(-1)
    for token, own, row in zip(sequence.tokens, sequence.logprobs, wanted, strict=True):
        assert own.chosen == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(3)
        assert [t for t, _ in own.top] == best.indices.tolist()
        assert [p for _, p in own.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_no_alternatives():
    engine = Engine(swapped("gpt2"))
    sequence = engine.submit(prompts([4])[0], max_new_tokens=3, logprobs=0)
    list(engine.run())
    assert [(own.chosen <= 0, own.top) for own in sequence.logprobs] == [(True, [])] * 3


def test_a_sequence_is_stopped_with_its_state():
    """It ends after its last token, and its state is that of all tokens but the last. Others go on."""
    model = swapped("gpt2")
    (prompt, other) = prompts([5, 3])
    engine = Engine(model)
    sequence = engine.submit(prompt, max_new_tokens=20, keep_state=True)
    beside = engine.submit(other, max_new_tokens=9)
    waiting = engine.submit(other, max_new_tokens=9, keep_state=True)
    engine.stop(waiting)
    for _ in range(4):
        engine.step()
    engine.stop(sequence)
    engine.stop(sequence)
    ends = {event.sequence: (event.token, event.reason) for event in engine.run() if event.reason is not None}
    assert ends[sequence] == (None, "stop")
    assert waiting.reason == "stop"
    assert waiting.state is None
    assert beside.tokens == alone(model, other, max_new_tokens=9)
    free = alone(model, prompt, max_new_tokens=12)
    count = len(sequence.tokens)
    assert sequence.tokens == free[:count]
    assert sequence.state.get_seq_length() == prompt.shape[1] + count - 1
    rest = engine.submit(torch.tensor([sequence.tokens[-1:]]), state=sequence.state, max_new_tokens=12 - count)
    list(engine.run())
    assert rest.tokens == free[count:]
    assert not engine.rows.held
