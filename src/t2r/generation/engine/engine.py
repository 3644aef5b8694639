"""Generation with static caches. The decoding step is captured once and replayed; sequences join and leave the batch.

    engine = Engine(model)
    ids = engine.generate(prompts, attention_mask=mask, max_new_tokens=64)    # same result as model.generate, faster

    sequence = engine.submit(prompt, do_sample=True, seed=1)                  # joins the running batch
    for sequence, token in engine.run():
        ...

Each row of the running batch is one sequence. It is filled by a prefill or from a saved state, advanced with the other
rows, and freed when the sequence ends. The engine works on token ids, not on text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from t2r.attention.cache import T2RCache
from t2r.attention.masks import Padding
from t2r.attention.recurrence import computes_exactly
from t2r.errors import T2RError
from t2r.generation.engine.beams import Beams, BeamSearch, one_per_prompt, uses_beams
from t2r.generation.engine.request import ForGenerate, Request, prepare, seeded
from t2r.generation.engine.room import BLOCK, Room, enlarged, total_length
from t2r.generation.engine.sequences import Event, Group, Sequence
from t2r.generation.engine.step import DecodeStep
from t2r.generation.state import PIECE
from t2r.model.modeling import T2RModel
from t2r.ops.common import HALF

logger = logging.getLogger(__name__)

LOOK_EVERY = 8
"""On a GPU, the number of steps between reads of the generated tokens, because each read synchronizes."""


class Engine:
    """Fast generation with a swapped model.

    Supports greedy search, sampling and beam search, with the logits processors and stopping criteria of transformers.
    It chooses the same tokens as `model.generate`. Unsupported calls (assisted decoding, returned scores) are passed to
    `model.generate`, with a warning in the log.

    The weights of the model must not change while an engine uses it.

    Args:
        model: a swapped model.
        generation_config: default options of all calls. None: those of the model.
        rows: number of sequences that run at the same time. Defaults to the number of prompts in a call.
        max_length: maximum number of tokens of a sequence in softmax layers. By default, buffers grow as needed.
        source_length: maximum number of tokens of a source in softmax cross attention. By default, buffers grow as
            needed.
        compiled: whether to fuse the kernels of a step with torch.compile, on a GPU. Compilation takes about a minute
            for each batch size.
        state_dtype: the dtype in which recurrent states are stored, torch.bfloat16 or torch.float16. It halves their
            memory; they are rounded after every token (`t2r evaluate --variant MODEL:state=bfloat16` measures the
            error). Defaults to float32.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        *,
        rows: int | None = None,
        max_length: int | None = None,
        source_length: int | None = None,
        compiled: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if state_dtype not in (None, torch.float32, *HALF):
            raise T2RError(f"state_dtype must be torch.float32, torch.bfloat16 or torch.float16; got {state_dtype}")
        if not isinstance(model, T2RModel):
            raise T2RError("the engine requires a swapped model: use model.generate for other models")
        if rows is not None and rows < 1:
            raise T2RError(f"rows must be at least 1; got {rows}")
        self.model: Any = model
        self.generation_config = generation_config
        self.rows, self.max_length, self.source_length, self.compiled = rows, max_length, source_length, compiled
        self.state_dtype = None if state_dtype == torch.float32 else state_dtype
        self.obstacle = no_static_cache(self.model)
        self.decode: DecodeStep | None = None
        self.beam_decode: DecodeStep | None = None
        """A beam search does not join the running batch: it has a step of its own, which reorders its rows."""
        self.look_every = LOOK_EVERY if cast(Any, model).device.type == "cuda" else 1
        """Number of steps between reads of the generated tokens, if the decoding step chooses all tokens."""
        self.block = BLOCK
        self.said: set[str] = set()
        self.waiting: deque[Group] = deque()
        self.groups: list[Group] = []
        self.free: list[int] = []

    # --- One batch ------------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Tensor,
        *,
        state: T2RCache | None = None,
        seed: int | None = None,
        streamer: BaseStreamer | None = None,
        **options: Any,
    ) -> Tensor:
        """Return prompts and continuations `[sequences, tokens]`, as `model.generate` does.

        Args:
            input_ids: prompts `[batch, tokens]`, padded on the left (with their `attention_mask`), or sources.
            state: a state from which the prompts continue. It is not modified.
            seed: random seed for sampling. None: torch's default generator.
            streamer: receives the tokens as they are generated. Requires a single sequence.
            options: options of `model.generate`.
        """
        try:
            return self.attempt(input_ids, state=state, seed=seed, streamer=streamer, **options).result()
        except ForGenerate as reason:
            self.say_elsewhere(reason)
        if seed is not None:
            torch.manual_seed(seed)
        if self.generation_config is not None:
            options = {"generation_config": self.generation_config, **options}
        if state is not None:
            return self.model.continue_from(state, input_ids, streamer=streamer, **options)
        sequences: Tensor = self.model.generate(input_ids, streamer=streamer, **options)
        return sequences

    def attempt(
        self,
        input_ids: Tensor,
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
        request = self.prepared(input_ids, state, keep_state, options)
        if uses_beams(request):
            if keep_state or streamer is not None:
                raise ForGenerate("beam search with a streamer or a kept state is requested")
            return self.search(request, state, seed)
        group = self.admitted(request, state, seed, keep_state)
        if streamer is not None:
            if len(group.sequences) > 1:
                raise T2RError("a streamer supports one sequence only: use engine.stream for a batch")
            streamer.put(group.request.ids.cpu())
        for event in self.until_done(group):
            if streamer is not None:
                streamer.put(torch.tensor([event.token]))
        if streamer is not None:
            streamer.end()
        return group

    def say_elsewhere(self, reason: ForGenerate) -> None:
        """Log the reason for falling back to `model.generate`, once per reason."""
        if str(reason) not in self.said:
            self.said.add(str(reason))
            logger.warning("falling back from the engine to model.generate(): %s", reason)

    def stream(
        self, input_ids: Tensor, *, state: T2RCache | None = None, seed: int | None = None, **options: Any
    ) -> Iterator[tuple[int, int]]:
        """Yield pairs of the index of a sequence in the batch and its next token."""
        try:
            group = self.admitted(self.prepared(input_ids, state, False, options), state, seed, False)
        except ForGenerate as reason:
            raise T2RError(f"the engine cannot stream this call: {reason}") from reason
        for event in self.until_done(group):
            yield event.sequence.index, event.token

    def until_done(self, group: Group) -> Iterator[Event]:
        """Run until a group is finished. Other running sequences are advanced too."""
        own = set(group.sequences)
        try:
            while group.running:
                yield from (event for event in self.step() if event.sequence in own)
        finally:
            for sequence in group.running:  # the consumer has stopped, or an error occurred
                self.cancel(sequence)

    @torch.no_grad()
    def search(self, request: Request, state: T2RCache | None, seed: int | None) -> Beams:
        """Run a beam search to its end."""
        room = self.needed(request, state)
        self.check_room(room, request, state)
        step = self.beam_decode
        # A step that is much too large would waste time on rows that are not used.
        if step is None or not room.rows <= step.rows <= 2 * room.rows or not room.fits(step):
            self.beam_decode = step = None  # frees its memory before the next one is allocated
            self.beam_decode = step = self.build(room.rows, room, None, reorders=True)
        prompts = one_per_prompt(request)
        cache, logits = self.prefill(prompts, state)
        search = BeamSearch(step, request, prompts, cache, logits)
        if seed is None:
            return Beams(search.run(), request)
        device = self.model.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return Beams(search.run(), request)

    def state_bytes(self, done: Group | Beams, state: T2RCache | None = None) -> int:
        """Return the size of the caches of a call at its end, where all tokens except the last were read."""
        step = self.decode or self.beam_decode
        assert step is not None
        before = 0 if state is None else state.get_seq_length()
        source = 0 if done.request.source is None else done.request.source.shape[1]
        return done.request.ids.shape[0] * step.row_bytes(before + done.result().shape[1] - 1, source)

    # --- A running batch ------------------------------------------------------------------------------------

    def submit(
        self,
        input_ids: Tensor,
        *,
        state: T2RCache | None = None,
        seed: int | None = None,
        keep_state: bool = False,
        **options: Any,
    ) -> Sequence:
        """Add one prompt `[1, tokens]` or `[tokens]` to the running batch. It waits until a row is free.

        The options are those of `generate`. With `keep_state`, the finished sequence has its state."""
        input_ids = input_ids[None] if input_ids.dim() == 1 else input_ids
        options = {"attention_mask": torch.ones_like(input_ids), **options}  # a single prompt has no padding
        try:
            group = self.admitted(self.prepared(input_ids, state, keep_state, options), state, seed, keep_state)
        except ForGenerate as reason:
            raise T2RError(f"the sequence cannot join a running batch: {reason}") from reason
        if len(group.sequences) != 1:
            self.waiting.remove(group)
            raise T2RError(f"submit requires one sequence; got {len(group.sequences)}: submit each of them")
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
                events: list[Event] = []
                while batch is not None and not self.waiting:
                    options = dict(batch)
                    request = self.prepared(options.pop("input_ids"), None, False, options)
                    for sequence in self.admitted(request, None, None, False).sequences:
                        numbers[sequence] = count
                        count += 1
                    events += self.start_waiting()
                    batch = next(left, None)
                for sequence, _ in events + self.step():
                    if sequence.finished and sequence in numbers:
                        yield numbers.pop(sequence), sequence.tokens
        finally:
            for sequence in list(numbers):  # the consumer has stopped, or an error occurred
                self.cancel(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence immediately and free its row."""
        sequence.finished = True
        self.release()
        self.waiting = deque(group for group in self.waiting if group.running)

    def run(self) -> Iterator[Event]:
        """Yield every new token until no sequence is running or waiting."""
        while self.busy:
            yield from self.step()

    @property
    def busy(self) -> bool:
        return bool(self.groups or self.waiting)

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Start waiting sequences if there is room, and advance the running ones by one to `look_every` tokens."""
        events = self.start_waiting()
        if not self.groups:
            return events
        assert self.decode is not None
        tokens = self.decoded()
        for group in self.groups:
            if not group.plain:
                rows = [sequence.row for sequence in group.sequences]
                chosen = group.choose(self.decode.logits[rows].clone())
                self.decode.tokens[rows] = chosen[:, None]
                own = chosen[:, None].tolist()
            else:
                own = [[] if s.row is None else tokens[s.row] for s in group.sequences]
            new = group.advance(own)
            events += new
            for sequence in (event.sequence for event in new if group.keep_state and event.sequence.finished):
                sequence.state = self.decode.own.take(sequence.row)
        self.release()
        return events

    @torch.no_grad()
    def start_waiting(self) -> list[Event]:
        """Start the waiting groups for which there is room."""
        events = []
        while self.waiting and self.has_room(self.waiting[0]):
            events += self.start(self.waiting.popleft())
        return events

    def decoded(self) -> list[list[int]]:
        """Run the decoding step one or more times, and return the new tokens of every row.

        The tokens are read only if there are plain groups."""
        assert self.decode is not None
        if any(group.keep_state or not group.plain for group in self.groups):
            self.decode.run()
            return self.decode.tokens.tolist() if any(group.plain for group in self.groups) else []
        left = min(group.new_tokens - len(s.tokens) for group in self.groups for s in group.running)
        history = []
        for _ in range(min(self.look_every, left)):
            self.decode.run()
            history.append(self.decode.tokens.clone())
        tokens: list[list[int]] = torch.cat(history, dim=1).tolist()
        return tokens

    # --- Rows -----------------------------------------------------------------------------------------------

    def prepared(self, input_ids: Tensor, state: Any, keep_state: bool, options: dict[str, Any]) -> Request:
        """Prepare a call. Raises ForGenerate if the engine does not support it."""
        if self.model.training:
            raise ForGenerate("the model is in training mode")
        if len(set(getattr(self.model, "hf_device_map", {}).values())) > 1:
            raise ForGenerate("the model is on several devices")
        if computes_exactly(self.model):
            raise ForGenerate("recurrent layers compute exact attention")
        if self.obstacle is not None:
            raise ForGenerate(self.obstacle)
        if state is not None and self.model.config.is_encoder_decoder:
            raise T2RError("continuing from a state requires a language model, not an encoder-decoder")
        if keep_state and self.model.config.is_encoder_decoder:
            raise T2RError("keep_state requires a language model, not an encoder-decoder")
        device = self.model.device
        if options.get("attention_mask") is not None:
            options = {**options, "attention_mask": options["attention_mask"].to(device)}
        if state is not None:  # as in `continue_from`, new tokens are not padding unless a mask is given
            options = {"attention_mask": torch.ones_like(input_ids, device=device), **options}
        with torch.no_grad():
            return prepare(self.model, input_ids.to(device), options, self.generation_config)

    def admitted(self, request: Request, state: Any, seed: int | None, keep_state: bool) -> Group:
        """Make a group of sequences and add it to the waiting groups."""
        if uses_beams(request):
            raise ForGenerate("beam search is requested")
        group = Group(request, state, seeded(seed, self.model.device), keep_state)
        self.check_room(self.needed(request, state), request, state)
        self.waiting.append(group)
        return group

    def needed(self, request: Request, state: Any) -> Room:
        """Return what a call requires."""
        length, source = total_length(request, state), request.source
        return Room(
            request.ids.shape[0],
            length if self.model.kept_sites(cross=False) else 0,
            source.shape[1] if source is not None and self.model.kept_sites(cross=True) else 0,
        )

    def check_room(self, room: Room, request: Request, state: Any) -> None:
        if state is not None:
            self.model.check_generated_length(total_length(request, state))
        if self.rows is not None and room.rows > self.rows:
            raise T2RError(f"{room.rows} sequences do not fit into the engine's {self.rows} rows: give fewer at a time")
        if self.max_length is not None and room.length > self.max_length:
            raise T2RError(f"{room.length} tokens exceed the engine's max_length of {self.max_length}")
        if self.source_length is not None and room.source > self.source_length:
            raise T2RError(f"a source of {room.source} tokens exceeds the engine's source_length {self.source_length}")

    def has_room(self, group: Group) -> bool:
        """Return whether a group can start now. If no sequence is running, the engine can grow within its limits."""
        if self.groups and self.decode is not None and not self.decode.by_row:
            return False  # this decoder has the same positions for the whole batch
        if self.groups and self.decode is not None and self.decode.forbidden != group.forbidden:
            return False  # the forbidden tokens of a step are those of all its rows
        room = self.needed(group.request, group.state)
        return (room.fits(self.decode) and room.rows <= len(self.free)) or not self.groups

    def make_room(self, group: Group) -> DecodeStep:
        """Return a decoding step with room for this group. A new one is built only if the current one is too small."""
        decode, room = self.decode, self.needed(group.request, group.state)
        if decode is not None and room.rows <= len(self.free) and room.fits(decode):
            return decode
        rows = self.rows or max(room.rows, 0 if decode is None else decode.rows)
        before = Room.of(decode)
        self.decode = decode = None  # frees its memory before the next one is allocated
        self.decode = self.build(rows, room, before)
        self.free = list(range(rows))[::-1]
        return self.decode

    def build(self, rows: int, room: Room, before: Room | None, reorders: bool = False) -> DecodeStep:
        """Build a step. Buffers of softmax layers that were too small `before` at least double."""
        before = before or Room(rows, 0, 0)
        length = (
            self.max_length if room.length and self.max_length else enlarged(room.length, before.length, self.block)
        )
        source = (
            self.source_length
            if room.source and self.source_length
            else enlarged(room.source, before.source, self.block)
        )
        how: dict[str, Any] = {"compiled": self.compiled, "reorders": reorders, "state_dtype": self.state_dtype}
        return DecodeStep(self.model, rows, length or None, source or None, **how)

    def start(self, group: Group) -> list[Event]:
        """Prefill the prompts of a group, choose their first tokens and assign rows."""
        decode = self.make_room(group)
        decode.forbid(group.forbidden)
        cache, logits = self.prefill(group.request, group.state)
        chosen = group.choose(logits)
        events = group.advance(chosen[:, None].tolist())
        self.groups.append(group)
        index = []
        for i, sequence in enumerate(group.sequences):
            if sequence.finished and group.keep_state:
                sequence.state = cache.take(i)
            if not (sequence.finished and group.plain):
                sequence.row = self.free.pop()
                index.append(i)
        if index:
            rows = torch.tensor([group.sequences[i].row for i in index], device=chosen.device)
            which = torch.tensor(index, device=chosen.device)
            decode.put_rows(rows, cache, which, chosen[which], group.plain, group.request.source_mask)
        group.request.inputs.pop("past_key_values", None)  # the rows have copies
        self.release()
        return events

    def prefill(self, request: Request, state: Any) -> tuple[Any, Tensor]:
        """Read the prompts in chunks. Returns the cache, and the logits of the next token."""
        ids, inputs, past = request.ids, dict(request.inputs), 0
        if self.model.config.is_encoder_decoder:
            out = self.model(**self.model.prepare_inputs_for_generation(ids, is_first_iteration=True, **inputs))
            return inputs["past_key_values"], out.logits[:, -1].to(torch.float32, copy=True)
        cache, mask = inputs["past_key_values"], inputs.get("attention_mask")
        if state is not None:
            times, rest = divmod(ids.shape[0], state.rows)
            if rest:
                raise T2RError(f"{ids.shape[0]} prompts for a state of {state.rows} sequences")
            cache, past = state.fork(times), state.get_seq_length()
            read = cache.attention_mask().to(ids.device)
            mask = torch.cat([read, torch.ones_like(ids) if mask is None else mask.to(read)], dim=1)
            mask = None if bool(mask.all()) else mask
        read_so_far = torch.ones(ids.shape[0], past + ids.shape[1], device=ids.device) if mask is None else mask
        positions = (read_so_far.cumsum(1).long() - 1).clamp_min(0)[:, past:]
        for start in range(0, ids.shape[1], PIECE):
            end = min(start + PIECE, ids.shape[1])
            part: dict[str, Any] = {"input_ids": ids[:, start:end], "past_key_values": cache, "use_cache": True}
            if mask is not None:
                part["attention_mask"] = mask[:, : past + end]
            if "position_ids" in inputs:
                part["position_ids"] = positions[:, start:end]
            if "logits_to_keep" in inputs:
                part["logits_to_keep"] = 1
            logits = self.model(**part).logits
        if mask is not None:
            cache.padding = Padding.of(mask)
        return cache, logits[:, -1].to(torch.float32, copy=True)

    def release(self) -> None:
        """Free the rows of finished sequences."""
        freed = []
        for group in self.groups:
            # Groups that are not plain choose tokens for all their sequences, so their rows are freed together.
            done = [s for s in group.sequences if s.finished] if group.plain or not group.running else []
            for sequence in done:
                if sequence.row is not None:
                    freed.append(sequence.row)
                    sequence.row = None
        if freed:
            assert self.decode is not None
            self.decode.free(freed)
            self.free += freed
        self.groups = [group for group in self.groups if group.running]


def no_static_cache(model: Any) -> str | None:
    """Return why the model has no static cache, or None if it has one."""
    if not model.kept_layers():
        return None
    try:
        model.make_static_cache(rows=1, max_length=1, source_length=1)
    except T2RError as reason:
        return str(reason)
    return None
