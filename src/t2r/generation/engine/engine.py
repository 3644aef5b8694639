"""Generation with static caches. The decoding step is captured once and replayed; sequences join and leave the batch.

    engine = Engine(model)
    ids = engine.generate(prompts, attention_mask=mask, max_new_tokens=64)    # same result as model.generate, faster

    sequence = engine.submit(prompt, do_sample=True, seed=1)                  # joins the running batch
    for sequence, token in engine.run():
        ...

This file has the calls of a user. `request` prepares a call with transformers, and the `scheduler` decides when its
prompts are read (`prefill`) and its sequences run, in the `rows` of a decoding `step`. The engine works on token ids,
not on text.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from t2r import compat
from t2r.attention.cache import T2RCache
from t2r.attention.masks import Padding, new_token_mask
from t2r.errors import T2RError
from t2r.generation.engine.arguments import check_options, check_sizes, own_tensors, refuse
from t2r.generation.engine.beams import Beams, BeamSearch, one_per_prompt, uses_beams
from t2r.generation.engine.prefill import prefill, whole_mask
from t2r.generation.engine.request import (
    ForGenerate,
    Request,
    check_padding,
    check_tokens,
    checked_history,
    counts_tokens,
    no_static_cache,
    not_now,
    prepare,
    seeded,
    seeding,
)
from t2r.generation.engine.room import Room, total_length
from t2r.generation.engine.rows import Rows, check_memory
from t2r.generation.engine.scheduler import Scheduler
from t2r.generation.engine.sequences import Event, Group, Sequence
from t2r.generation.engine.softmax import on_the_engine
from t2r.generation.engine.step import DecodeStep
from t2r.model.modeling import T2RModel, option_value
from t2r.ops.common import HALF
from t2r.options.entrance import check_type

logger = logging.getLogger(__name__)

ELSEWHERE = "falling back from the engine to model.generate(): %s"


class Engine:
    """Fast generation with a swapped model, or with any other model that t2r could swap.

    Supports greedy search, sampling and beam search, with the logits processors and stopping criteria of transformers.
    It chooses the same tokens as `model.generate`. Unsupported calls (assisted decoding, returned scores) are passed to
    `model.generate`, with a warning in the log.

    A model that is not swapped runs with softmax attention in all its layers: the engine decodes a copy of its modules,
    which shares the weights. Models with a sliding window or a relative bias there (Mistral, T5) are passed to
    `model.generate`.

    The model must not change while an engine uses it. A captured step holds copies of some weights and values computed
    from others, and they are not refreshed: after training, merging or switching adapters, make a new engine.

    On a CPU, a step uses at most `torch.get_num_threads()` threads. The number with which steps are fastest is found by
    timing them, unless OMP_NUM_THREADS is set.

    Several threads can use one engine. Their calls run one after the other, and each returns its own tokens; between
    two tokens of `stream`, `run` and `generate_each`, other calls can run. `step` and `run` return the tokens of all
    submitted sequences, so one thread should call them.

    Raises T2RError if t2r does not support the model.

    Args:
        model: a swapped model, or a model of a supported family.
        generation_config: default options of all calls. None: those of the model.
        rows: number of sequences that run at the same time. By default, the number grows with the sequences that run
            and wait, as long as the rows take at most half of the free memory, up to 256 rows; on a CPU, where unused
            rows take time, it shrinks again.
        max_length: maximum number of tokens of a sequence in softmax layers. By default, buffers grow as needed.
        source_length: maximum number of tokens of a source in softmax cross attention. By default, buffers grow as
            needed.
        step_tokens: maximum number of tokens of a prompt that are read between two steps. Defaults to 256 on a CPU and
            2048 on a GPU. With fewer, a long prompt delays running sequences less, and is read more slowly.
        compiled: whether to fuse the kernels of a step with torch.compile, on a GPU. Compilation takes about a minute
            for each batch size.
        state_dtype: the dtype in which recurrent states are stored, torch.float16 or torch.bfloat16. It halves their
            memory; they are rounded after every token, at random (docs/performance.md; `t2r evaluate --variant
            MODEL:state=float16` measures what it costs). Defaults to float32.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        *,
        rows: int | None = None,
        max_length: int | None = None,
        source_length: int | None = None,
        step_tokens: int | None = None,
        compiled: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        check_type("compiled", compiled, bool)
        if state_dtype is not None and not any(state_dtype is known for known in (torch.float32, *HALF)):
            raise T2RError(f"state_dtype must be torch.float32, torch.bfloat16 or torch.float16; got {state_dtype}")
        check_sizes(rows=rows, max_length=max_length, source_length=source_length, step_tokens=step_tokens)
        self.original: Any = model
        """The model as given. The engine decodes `self.model`, which shares its weights if it is not swapped."""
        self.model: Any = decoded_model(model)
        check_options(model, {"generation_config": generation_config})
        self.generation_config = generation_config
        self.obstacle = no_static_cache(self.model)
        rotates = self.model.t2r_config.rotary or bool(self.model.kept_layers())
        self.longest = compat.constant_rotation(self.model) if rotates else None
        """Beyond this number of tokens, a row would depend on those beside it."""
        self.rows = Rows(
            self.model,
            limit=rows,
            max_length=max_length,
            source_length=source_length,
            compiled=compiled,
            state_dtype=None if state_dtype == torch.float32 else state_dtype,
        )
        self.scheduler = Scheduler(self.rows, step_tokens)
        self.beam_step: DecodeStep | None = None
        """A beam search does not join the others: it has a step of its own, which reorders its rows."""
        self.said: set[str] = set()
        self.lock = threading.RLock()
        """Held while the scheduler is used, but not while a generator waits for its consumer."""

    # --- One batch ------------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        state: T2RCache | None = None,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Tensor:
        """Return prompts and continuations `[sequences, tokens]`, as `model.generate` does.

        Args:
            input_ids: prompts `[batch, tokens]`, padded on the left (with their `attention_mask`), or sources. None if
                the options have `encoder_outputs` of an encoder-decoder.
            state: a state from which the prompts continue. It is not modified.
            seed: random seed for sampling, which does not change torch's default generator. None: that generator.
            streamer: receives the tokens as they are generated. Requires a single sequence.
            options: options of `model.generate`.
        """
        check_options(self.original, options | {"streamer": streamer}, self.generation_config, seed)
        with self.lock:
            try:
                return self._attempt(input_ids, state=state, seed=seed, streamer=streamer, **options).result()
            except ForGenerate as reason:
                self._say_elsewhere(reason)
        options["generation_config"] = options.get("generation_config") or self.generation_config
        sequences: Tensor
        # A seed is set in torch's default generator, which all threads share.
        with self.lock, seeding(seed, self.model.device):
            if state is not None and input_ids is not None:
                sequences = self.model.continue_from(state, input_ids, streamer=streamer, **options)
            else:
                sequences = self.original.generate(input_ids, streamer=streamer, **options)
        return sequences

    def _attempt(
        self,
        input_ids: Tensor | None = None,
        *,
        state: T2RCache | None = None,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        keep_state: bool = False,
        **options: Any,
    ) -> Group | Beams:
        """Generate without falling back to `model.generate`, and return the finished sequences.

        With `keep_state`, each sequence has its state.

        Raises:
            ForGenerate: if the engine does not support the call.
        """
        with self.lock:
            request = self._prepared(input_ids, options, state, keep_state=keep_state, seed=seed)
            return self._answer(request, state, seed=seed, streamer=streamer, keep_state=keep_state)

    def _answer(
        self,
        request: Request,
        state: T2RCache | None = None,
        *,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        keep_state: bool = False,
    ) -> Group | Beams:
        """Run a prepared call to its end. Raises ForGenerate if the engine does not support it."""
        with self.lock:
            if uses_beams(request):
                if keep_state or streamer is not None:
                    raise ForGenerate("beam search with a streamer or a kept state is requested")
                return self._search(request, state, seed)
            if streamer is not None and request.ids.shape[0] > 1:
                raise T2RError("a streamer supports one sequence only: use engine.stream for a batch")
            group = self._admitted(request, state, seed, keep_state)
            if streamer is not None:
                streamer.put(request.ids.cpu())
            for event in self._until_done(group):
                if streamer is not None:
                    streamer.put(torch.tensor([event.token]))
            if streamer is not None:
                streamer.end()
            return group

    def stream(
        self, input_ids: Tensor, *, state: T2RCache | None = None, seed: int | None = None, **options: Any
    ) -> Iterator[tuple[int, int]]:
        """Yield pairs of the index of a sequence in the batch and its next token."""
        try:
            with self.lock:
                group = self._admitted(self._prepared(input_ids, options, state, seed=seed), state, seed, False)
        except ForGenerate as reason:
            raise T2RError(f"the engine cannot stream this call: {reason}") from reason
        for event in self._until_done(group):
            yield event.sequence.index, event.token

    @torch.no_grad()
    def _search(self, request: Request, state: T2RCache | None, seed: int | None) -> Beams:
        """Run a beam search to its end."""
        room = Room.needed(self.model, request, state)
        self._check_positions(request, state)
        self.rows.check(room)
        step = self.beam_step
        # A step that is much too large would waste time on rows that are not used.
        if step is None or not room.rows <= step.rows <= 2 * room.rows or not room.fits(step):
            self.beam_step = step = None  # frees its memory before the next one is allocated
            self.beam_step = step = self.rows.build(room.rows, room, reorders=True)
        prompts = one_per_prompt(request)
        cache, logits = prefill(self.model, prompts, state)
        return BeamSearch(step, request, prompts, cache, logits).run(seed)

    def _state_bytes(self, done: Group | Beams, state: T2RCache | None = None) -> int:
        """Return the size of the caches of a call at its end, where all tokens except the last were read."""
        step = self.rows.step or self.beam_step
        assert step is not None
        before = 0 if state is None else state.get_seq_length() - done.request.read
        source = 0 if done.request.source is None else done.request.source.shape[1]
        return done.request.ids.shape[0] * step.row_bytes(before + done.result().shape[1] - 1, source)

    # --- A running batch ------------------------------------------------------------------------------------

    def submit(
        self,
        input_ids: Tensor,
        *,
        state: T2RCache | None = None,
        history: Tensor | None = None,
        copy_state: bool = True,
        seed: int | None = None,
        keep_state: bool = False,
        logprobs: int | None = None,
        **options: Any,
    ) -> Sequence:
        """Add one prompt `[1, tokens]` or `[tokens]` to the running batch. It waits until a row is free.

        The last event of the sequence has a `reason`, and so has the sequence: `stop`, `length`, `cancelled` or
        `error`. A sequence that fails, for example in a logits processor, has an `error`; others go on.

        Args:
            input_ids: the prompt.
            state: a state from which the prompt continues. It is not modified.
            history: the tokens `[1, tokens]` or `[tokens]` that the state has read. Logits processors, such as a
                repetition penalty, and stopping criteria then see them too, as if the model had read everything now.
            copy_state: whether the state is copied now. Without a copy, it must not change while the sequence waits.
            seed: random seed for sampling.
            keep_state: whether the finished sequence has its state.
            logprobs: give each token the logarithm of its probability, and those of this many other likely tokens.
            options: options of `generate`.
        """
        if isinstance(input_ids, Tensor) and input_ids.dim() == 1:
            input_ids = input_ids[None]
        check_tokens(self.model, input_ids)
        history = None if history is None else checked_history(self.model, history, state)
        options = {"attention_mask": torch.ones_like(input_ids), **options}  # a single prompt has no padding
        with self.lock:
            try:
                request = self._prepared(input_ids, options, state, keep_state=keep_state, seed=seed, history=history)
                state = state.fork() if state is not None and copy_state else state
                group = self._admitted(request, state, seed, keep_state, logprobs)
            except ForGenerate as reason:
                raise T2RError(f"the sequence cannot join a running batch: {reason}") from reason
            if len(group.sequences) != 1:
                group.end("cancelled")
                self.scheduler.release()
                raise T2RError(f"submit requires one sequence; got {len(group.sequences)}: submit each of them")
            group.submitted = True
            return group.sequences[0]

    def generate_each(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, list[int]]]:
        """Generate for many batches of prompts. Yields the number of each prompt, from 0, and its new tokens.

            engine = Engine(model, rows=256)
            for number, tokens in engine.generate_each({"input_ids": ids, "max_new_tokens": 64} for ids in batches):
                ...

        A batch is a dictionary of arguments of `generate`. It starts as soon as enough rows are free, so batches that
        are smaller than `rows` do not wait for the longest sequence of a batch before them. Prompts are yielded in the
        order in which they end. Batches are read as they are needed.

        Raises:
            ForGenerate: if the engine does not support a call.
        """
        numbers: dict[Sequence, int] = {}
        count, left = 0, iter(batches)
        batch = next(left, None)
        try:
            while batch is not None or numbers:
                while batch is not None:
                    with self.lock:
                        if self.scheduler.queue:
                            break
                        if not isinstance(batch, Mapping):
                            refuse("a batch", "a dictionary of arguments of generate", batch)
                        options = dict(batch)
                        seed, state = options.pop("seed", None), options.pop("state", None)
                        request = self._prepared(options.pop("input_ids", None), options, state, seed=seed)
                        for sequence in self._admitted(request, state, seed, False).sequences:
                            numbers[sequence] = count
                            count += 1
                        self.scheduler.admit()
                    batch = next(left, None)  # may wait for a thread that uses the engine
                with self.lock:
                    self.scheduler.advance()
                    ended = [sequence for sequence in numbers if sequence.finished]
                for sequence in ended:
                    number = numbers.pop(sequence)
                    if sequence.error is not None:
                        raise sequence.error
                    yield number, sequence.tokens
        finally:
            for sequence in list(numbers):  # the consumer has stopped, or an error occurred
                self.cancel(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence immediately and free its row. Its last event has no token and the reason `cancelled`."""
        with self.lock:
            self.scheduler.cancel(sequence)

    def stop(self, sequence: Sequence) -> None:
        """End a sequence after its last token, as a stopping criterion does. With `keep_state`, it has its state."""
        with self.lock:
            self.scheduler.stop(sequence)

    def run(self) -> Iterator[Event]:
        """Yield every event of submitted sequences until no sequence is running or waiting."""
        while self.busy or self.scheduler.events:
            yield from self.step()

    @property
    def _is_captured(self) -> bool:
        """Whether the last step that was built is replayed. Some models cannot be captured, and run eagerly."""
        step = self.rows.step or self.beam_step
        return step is not None and step.captured_as is not None

    @property
    def busy(self) -> bool:
        """Whether sequences are running or waiting."""
        return self.scheduler.busy

    def step(self) -> list[Event]:
        """Read the next pieces of prompts, and advance the running sequences by one to eight tokens.

        Returns the events of submitted sequences, with those that other calls have caused since the last step: pairs of
        a sequence and its new token. The last event of a sequence has a `reason`."""
        with self.lock:
            self.scheduler.advance()
            events, self.scheduler.events = self.scheduler.events, []
            return events

    # --- For all calls --------------------------------------------------------------------------------------

    def _prepared(
        self,
        input_ids: Tensor | None,
        options: dict[str, Any],
        state: Any = None,
        *,
        keep_state: bool = False,
        seed: Any = None,
        history: Tensor | None = None,
    ) -> Request:
        """Check and prepare a call. Raises ForGenerate if the engine does not support it."""
        check_options(self.original, options, self.generation_config, seed)
        options = own_tensors(options)
        if state is not None and input_ids is None:
            raise T2RError("continuing from a state requires input_ids: give at least one token")
        if input_ids is not None:
            check_tokens(self.model, input_ids)
        if (reason := not_now(self.original) or self.obstacle) is not None:
            raise ForGenerate(reason)
        self.model.generation_config = self.original.generation_config  # it may have been replaced
        if state is not None and self.model.config.is_encoder_decoder:
            raise T2RError("continuing from a state requires a language model, not an encoder-decoder")
        if keep_state and self.model.config.is_encoder_decoder:
            raise T2RError("keep_state requires a language model, not an encoder-decoder")
        mask, read = options.get("attention_mask"), 0
        if state is not None:
            if not isinstance(state, T2RCache):
                raise T2RError(f"state must be a T2RCache; got {type(state).__name__}")
            assert input_ids is not None
            state.check_prompts(input_ids.shape[0], self.model)
            read = state.get_seq_length()
        ids = None if input_ids is None else input_ids.to(self.model.device, torch.long, copy=True)
        self._check_memory(ids, options)
        # As in `continue_from`, tokens after a state are not padding unless a mask is given.
        if ids is not None and (mask is not None or state is not None):
            mask = new_token_mask(mask, ids, read)
        if mask is not None:
            options = {**options, "attention_mask": mask.to(self.model.device)}
        if history is not None and ids is not None:
            ids = torch.cat([history, ids], dim=1)
            mask = options["attention_mask"]
            options["attention_mask"] = torch.cat([torch.ones_like(history).to(mask), mask], dim=1)
        with torch.no_grad():
            request = prepare(self.model, ids, options, self.generation_config)
        request = request._replace(read=0 if history is None else history.shape[1])
        check_padding(request)
        if not self.model.config.is_encoder_decoder and (mask := whole_mask(request, state)) is not None:
            if self.model.grows() and not Padding.of(mask).is_known:  # a row holds real tokens only
                raise ForGenerate("a row has padding in several places, and the model has softmax layers")
            if counts_tokens(self.model):
                raise ForGenerate("prompts have padding, which this model counts as positions")
        if self.longest is not None and total_length(request, state) > self.longest:
            raise ForGenerate(
                f"beyond {self.longest} tokens, the rotation of this model depends on the longest sequence of a batch"
            )
        return request

    def _check_memory(self, ids: Tensor | None, options: dict[str, Any]) -> None:
        """Raise T2RError if the sequences of a call cannot fit into memory, before transformers repeats the prompts."""
        if ids is not None:
            config = options.get("generation_config") or self.generation_config
            ways = [option_value(self.original, config, options, n) or 1 for n in ("num_beams", "num_return_sequences")]
            check_memory(self.model, ids.shape[0] * max(ways), ids.shape[1] if self.model.grows() else 1)

    def _admitted(
        self, request: Request, state: Any, seed: int | None, keep_state: bool, logprobs: int | None = None
    ) -> Group:
        """Make a group of sequences and add it to the queue."""
        if uses_beams(request):
            raise ForGenerate("beam search is requested")
        self._check_positions(request, state)
        group = Group(request, state, seeded(seed, self.model.device), keep_state, logprobs)
        self.scheduler.add(group)
        return group

    def _check_positions(self, request: Request, state: Any) -> None:
        if state is not None:
            self.model.check_generated_length(total_length(request, state))

    def _until_done(self, group: Group) -> Iterator[Event]:
        """Run until a group is finished, and yield its tokens. Other running sequences are advanced too.

        The tokens are read from the sequences, because other calls may advance them between two tokens."""
        read, done = [0] * len(group.sequences), False
        try:
            while not done:
                with self.lock:
                    if group.running:
                        self.scheduler.advance()
                    done = not group.running
                    start, read = read, [len(sequence.tokens) for sequence in group.sequences]
                    new = [
                        Event(s, token) for s, n in zip(group.sequences, start, strict=True) for token in s.tokens[n:]
                    ]
                yield from new
            for error in (sequence.error for sequence in group.sequences if sequence.error is not None):
                raise error
        finally:
            for sequence in group.running:  # the consumer has stopped, or an error occurred
                self.cancel(sequence)

    def _say_elsewhere(self, reason: ForGenerate) -> None:
        """Log the reason for falling back to `model.generate`, once per reason."""
        if str(reason) not in self.said:
            self.said.add(str(reason))
            logger.warning(ELSEWHERE, reason)


def decoded_model(model: Any) -> Any:
    """Return the model that an engine decodes: a swapped model itself, and of others one that shares the weights."""
    if isinstance(model, T2RModel):
        return model
    if hasattr(model, "peft_config"):
        raise T2RError("the engine does not run PEFT adapters: merge them first (model = model.merge_and_unload())")
    if not isinstance(model, PreTrainedModel):
        hint = ": load it first (t2r.load)" if isinstance(model, str | PathLike) else ""
        hint = ": give the model as it was before torch.compile" if hasattr(model, "_orig_mod") else hint
        raise T2RError(f"the engine requires a transformers model, not a {type(model).__name__}{hint}")
    try:
        shared = on_the_engine(model)
    except T2RError as reason:
        raise T2RError(f"the engine does not support this model (use model.generate): {reason}") from reason
    return shared.eval()


def engine_for(model: Any, **options: Any) -> Engine | None:
    """Return an engine for this model, or None, with a message in the log, if t2r does not support the model."""
    try:
        return Engine(model, **options)
    except T2RError as reason:
        logger.warning(ELSEWHERE, reason.__cause__ or reason)
        return None
