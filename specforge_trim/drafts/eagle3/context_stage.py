"""The context stage: step-0 keys and values of every layer, and its recomputed backward.

With one layer, over the tokens that some kept row attends to:

    forward    g^0 = fc(aux), K0/V0 -> leaves; g^0 of kept rows -> leaf
    backward   from the leaves' gradients into fc, k, v and the input norms, in token chunks

Deeper drafts run their lower layers over all these tokens at step 0; only the last layer is
trimmed there. The gradient of a lower layer's K0/V0 is complete only after all later queries of
that layer, so the backward goes layer by layer from the top, each layer's query chunks first,
then its keys and values.

stop_grad_context_tokens: g^0 of rows that no loss reads receives no gradient. fc and its norm
then learn from the other rows alone; keys, values and their norms still learn from all tokens.

Where ranks share a sequence, each runs this stage over its own block of the tokens. Its keys go
to the home that the ranks share, its g^0 to the ranks that compute the rows, and their gradients
come back the same ways.

Letters: T tokens, n tokens of a chunk, R_0 kept rows of step 0, D width, M key/value heads, H
head dim, A aux layers, Dt target width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specforge_trim.attention.context_kv import ContextKV
from specforge_trim.attention.rows import row_attention
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.plan.segments import ChunkStep, Segment
from specforge_trim.ranks.group import RankGroup

if TYPE_CHECKING:
    from specforge_trim.drafts.eagle3.batch import Batch

_NONE = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class StreamInputs:
    """The packed stream on the model's device: ids, positions and document ends, int64 [T]."""

    ids: Tensor
    positions: Tensor
    doc_end: Tensor

    def next_ids(self, rows: Tensor, offset: int) -> Tensor:
        """Token t + offset of rows t; past the document's end a filler, token 0."""
        index = rows + offset
        inside = index < self.doc_end[rows]
        return torch.where(inside, self.ids[index.clamp(max=self.ids.shape[0] - 1)], 0)


@dataclass(frozen=True)
class ContextChunk:
    """Some live tokens, and which kept rows lie among them.

    tokens: int64 [n], absolute positions, ascending. pieces: (document start, lo, hi) of each
    stretch [lo, hi) they form. rows: slice of the stage's rows. row_index: their positions
    inside `tokens`. grad_index: positions of the tokens whose g^0 takes a gradient, None = all.
    """

    tokens: Tensor
    pieces: tuple[tuple[int, int, int], ...]
    rows: slice
    row_index: Tensor
    grad_index: Tensor | None = None

    def as_step(self, device: torch.device) -> ChunkStep:
        """All tokens of the chunk as queries of step 0."""
        segments, done = [], 0
        for start, lo, hi in self.pieces:
            segments.append(Segment(done, done + hi - lo, start, lo, hi))
            done += hi - lo
        return ChunkStep(
            row_slice=(0, done),
            rows=self.tokens.to(device, non_blocking=True),
            loss_index=_NONE,
            teacher_index=_NONE,
            loss_slice=(0, 0),
            carry_index=None,
            diagonal_index=(),
            segments=tuple(segments),
        )


def context_chunks(
    batch: Batch, size: int, *, tokens: tuple[int, int], context_len: Tensor, rows: Tensor
) -> Iterator[ContextChunk]:
    """Live tokens (each document's prefix that kept rows attend to), `size` at a time.

    tokens: [lo, hi), those of this rank. context_len: [docs]. rows: kept rows among them.
    """
    starts = batch.cu_seqlens[:-1].tolist()
    lengths = context_len.tolist()
    lowest, highest = tokens
    group: list[tuple[int, int, int]] = []
    held = 0

    def emit() -> ContextChunk:
        own = torch.cat([torch.arange(a, b) for _, a, b in group])
        edges = torch.tensor([group[0][1], group[-1][2]])
        first, last = torch.searchsorted(rows, edges).tolist()
        index = torch.searchsorted(own, rows[first:last])
        learning = None
        if batch.grad_rows is not None:
            a, b = torch.searchsorted(batch.grad_rows, edges).tolist()
            learning = torch.searchsorted(own, batch.grad_rows[a:b])
        return ContextChunk(own, tuple(group), slice(first, last), index, learning)

    for start, length in zip(starts, lengths, strict=True):
        a, end = max(start, lowest), min(start + length, highest)
        while a < end:
            b = min(end, a + size - held)
            group.append((start, a, b))
            held += b - a
            a = b
            if held == size:
                yield emit()
                group, held = [], 0
    if group:
        yield emit()


class ContextStage:
    """Leaves of one training step and their gradients.

    contexts: one home of K0/V0 per layer. row_inputs: [R_0, D], the last layer's step-0 input at
    this rank's kept rows. d_row_inputs: its gradient, filled by the row stage.
    """

    def __init__(
        self,
        model: Eagle3Draft,
        batch: Batch,
        stream: StreamInputs,
        *,
        dtype: torch.dtype,
        chunk_tokens: int,
        make_context: Callable[[Tensor, Tensor], ContextKV],
        group: RankGroup | None = None,
    ) -> None:
        """make_context(k0, v0 [n, M, H]) makes a layer's home of its n = T context keys.

        group: the ranks that share the batch's sequence, None = this one alone; then n is the
        block of the batch's shard.
        """
        self.model, self.batch, self.stream = model, batch, stream
        self.dtype, self.device = dtype, stream.ids.device
        self.group, shard, pack = group, batch.shard, batch.pack
        self.first, self.count = 0, stream.ids.shape[0]  # of this rank's tokens
        tokens, lengths, rows = (0, self.count), pack.context_len, pack.steps[0].rows
        if shard is not None:
            self.first, self.count = shard.tokens[0], shard.block
            tokens, lengths, rows = shard.tokens, shard.context_len, shard.token_rows
        self.token_rows = rows
        self.chunks = tuple(
            context_chunks(batch, chunk_tokens, tokens=tokens, context_len=lengths, rows=rows)
        )
        self.make_context = make_context
        self.contexts: list[ContextKV] = []
        self.hidden: list[Tensor] = []  # inputs [n, D] of each layer; deeper drafts only
        self.row_inputs = torch.empty(0)
        self.d_row_inputs = torch.empty(0)

    def _new(self, *shape: int) -> Tensor:
        # Zeros, since tokens outside the live prefixes are never written and the reference
        # backend multiplies their keys by weight 0.
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _put(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)

    def _places(self, tokens: Tensor) -> Tensor:
        """Where tokens stand among this rank's n."""
        return tokens - self.first if self.first else tokens

    def _aux(self, chunk: ContextChunk) -> Tensor:
        """Aux states [n, A*Dt] of a chunk's tokens."""
        read = self.batch.aux
        assert read is not None, "a batch without features"
        parts = [read(a, b) for _, a, b in chunk.pieces]
        aux = parts[0] if len(parts) == 1 else torch.cat(parts)
        return aux.to(self.device, self.dtype, non_blocking=True)

    def _project(self, chunk: ContextChunk) -> Tensor:
        """g^0 [n, D] of a chunk's tokens."""
        return self.model.project_aux(self._aux(chunk))

    def _project_cut(self, chunk: ContextChunk, learning: Tensor) -> tuple[Tensor, Tensor]:
        """g^0 [n, D] of a chunk's tokens, with a gradient at `learning` only, and it there.

        Not by torch.where: the backward of fc then runs the learning tokens alone.
        """
        aux = self._aux(chunk)
        with torch.no_grad():
            whole = self.model.project_aux(aux)
        own = self.model.project_aux(aux.index_select(0, learning))
        return whole.index_copy(0, learning, own), own

    def _inputs(self, layer: int, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a layer's projections read at step 0, with cos and sin of the tokens."""
        embedding = None
        if layer == 0:
            embedding = self.model.embed(self.stream.next_ids(tokens, 1))
        z = self.model.stack[layer].inputs(embedding, x)
        return z, *self.model.rotary.cos_sin(self.stream.positions[tokens], z.dtype)

    # --- forward --------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self) -> None:
        config, shard = self.model.config, self.batch.shard
        depth = config.num_hidden_layers
        inputs = self._new(self.token_rows.shape[0], config.hidden_size)
        if depth > 1:
            self.hidden = [self._new(self.count, config.hidden_size) for _ in range(depth)]
        for layer in range(depth):
            k0 = self._new(self.count, config.num_key_value_heads, config.head_dim)
            v0 = torch.zeros_like(k0)
            for chunk in self.chunks:
                tokens = self._put(chunk.tokens)
                x = self._layer_input(layer, chunk, tokens)
                k, v = self.model.stack[layer].key_value(*self._inputs(layer, tokens, x))
                k0.index_copy_(0, self._places(tokens), k)
                v0.index_copy_(0, self._places(tokens), v)
                if layer == depth - 1:
                    inputs[chunk.rows] = x.index_select(0, self._put(chunk.row_index))
            self.contexts.append(self.make_context(k0, v0))
        if shard is not None and self.group is not None:
            inputs = self.group.all_to_all(inputs, shard.send, shard.receive)
        self.row_inputs, self.d_row_inputs = inputs, torch.zeros_like(inputs)

    def _layer_input(self, layer: int, chunk: ContextChunk, tokens: Tensor) -> Tensor:
        """A layer's step-0 input [n, D] at a chunk's tokens, computed once and kept if deeper."""
        x = self._project(chunk) if layer == 0 else self._run_layer(layer - 1, chunk, tokens)
        if self.hidden:
            self.hidden[layer].index_copy_(0, self._places(tokens), x)
        return x

    def _run_layer(
        self, layer: int, chunk: ContextChunk, tokens: Tensor, x: Tensor | None = None
    ) -> Tensor:
        """A lower layer's step-0 output [n, D]; x: its input, None = the one kept."""
        if x is None:
            x = self.hidden[layer].index_select(0, self._places(tokens))
        block = self.model.stack[layer]
        q = block.query(*self._inputs(layer, tokens, x))
        attended = row_attention(q, self.contexts[layer], chunk.as_step(self.device))
        return block.finish(x, attended)

    # --- backward -------------------------------------------------------------------------

    def backward(self) -> None:
        """From the gradients of K0/V0 and of the rows' inputs into the parameters."""
        depth, shard = self.model.config.num_hidden_layers, self.batch.shard
        d_rows = self.d_row_inputs
        if shard is not None and self.group is not None:
            d_rows = self.group.all_to_all(d_rows, shard.receive, shard.send)
        d_hidden: Tensor | None = None  # gradient [n, D] of the current layer's input
        if depth > 1:
            d_hidden = torch.zeros_like(self.hidden[0])
            d_hidden.index_copy_(0, self._places(self._put(self.token_rows)), d_rows)
        for layer in reversed(range(depth)):
            if layer < depth - 1:
                assert d_hidden is not None
                d_hidden = self._queries_backward(layer, d_hidden)
            d_keys = self.contexts[layer].finish()
            for chunk in self.chunks:
                self._keys_backward(layer, chunk, d_keys, d_rows, d_hidden)

    def _queries_backward(self, layer: int, d_output: Tensor) -> Tensor:
        """Back through a lower layer's queries, o and MLP; the gradient of its input so far."""
        d_input = torch.zeros_like(d_output)
        for chunk in self.chunks:
            tokens = self._put(chunk.tokens)
            places = self._places(tokens)
            x = self.hidden[layer].index_select(0, places).requires_grad_()
            with torch.enable_grad():
                output = self._run_layer(layer, chunk, tokens, x)
            output.backward(d_output.index_select(0, places))
            assert x.grad is not None
            d_input.index_copy_(0, places, x.grad)
        return d_input

    def _keys_backward(
        self,
        layer: int,
        chunk: ContextChunk,
        d_keys: tuple[Tensor, Tensor],
        d_rows: Tensor,
        d_hidden: Tensor | None,
    ) -> None:
        """Back through k and v of a layer and, for the first one, through fc."""
        tokens = self._put(chunk.tokens)
        places = self._places(tokens)
        learning = None if chunk.grad_index is None else self._put(chunk.grad_index)
        with torch.enable_grad():
            if layer > 0:
                own = x = self.hidden[layer].index_select(0, places).requires_grad_()
            elif learning is None:
                own = x = self._project(chunk)
            else:
                x, own = self._project_cut(chunk, learning)
            k, v = self.model.stack[layer].key_value(*self._inputs(layer, tokens, x))
            outputs = [k, v]
            if layer == 0 and d_hidden is None and learning is None:
                own = x.index_select(0, self._put(chunk.row_index))
            if layer == 0:
                outputs.append(own)
        gradients = [d[places].to(k.dtype) for d in d_keys]
        if layer == 0:
            gradients.append(self._input_gradient(chunk, places, learning, d_rows, d_hidden))
        torch.autograd.backward(outputs, gradients)
        if layer > 0:
            assert d_hidden is not None and x.grad is not None
            d_hidden.index_add_(0, places, x.grad)

    def _input_gradient(
        self,
        chunk: ContextChunk,
        places: Tensor,
        learning: Tensor | None,
        d_rows: Tensor,
        d_hidden: Tensor | None,
    ) -> Tensor:
        """Gradient of g^0 from its queries: of a chunk's rows, tokens, or learning tokens."""
        own = d_rows[chunk.rows]
        if d_hidden is not None:
            own = d_hidden.index_select(0, places)
        elif learning is not None:
            every = own.new_zeros(places.shape[0], own.shape[1])
            own = every.index_copy_(0, self._put(chunk.row_index), own)
        return own if learning is None else own.index_select(0, learning)
