"""One sequence's draft state while decoding: its key/value cache and its chain of guesses.

The order of a serving engine (each entry is one cached key/value, made from a pair):

    true entries     (aux_t, x_{t+1}) at position t, for every verified token
    drafted entries  (fed-back output, drafted token) at position t+k, dropped by the next extend

so after the prompt x_0..x_{n-1} and the target's x_n there are n true entries, the last row's
output predicts x_{n+1}, and the k-th drafted token stands at position n-1+k.

Letters: R rows, A aux layers, Dt target width, N heads, M key/value heads, H head dim, Vd draft
vocabulary, L cached entries.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specforge_trim.drafts.eagle3.model import Eagle3Draft


class CachedDraft:
    """A draft and the cache of one sequence. No gradient is kept."""

    def __init__(self, draft: Eagle3Draft) -> None:
        if draft.config.num_hidden_layers != 1:
            raise ValueError(
                f"num_hidden_layers={draft.config.num_hidden_layers}: decoding is written for "
                "drafts of one layer"
            )
        self.draft = draft
        self.length = 0  # true entries
        self._used = 0  # true and drafted entries
        self._target_ids = draft.draft_to_target
        self._device = draft.fc.weight.device
        config = draft.config
        shape = (2, config.num_key_value_heads, 256, config.head_dim)
        self._cache = torch.empty(shape, dtype=draft.fc.weight.dtype, device=self._device)
        self._output: Tensor | None = None

    @torch.no_grad()
    def extend(self, aux_RA: Tensor, next_ids: Sequence[int] | Tensor) -> None:
        """Drop drafted entries, then take R verified ones.

        aux_RA: the target's true states [R, A*Dt] of the next R positions; next_ids [R]: for each
        of them the token that follows it.
        """
        ids = torch.as_tensor(next_ids, dtype=torch.int64, device=self._device)
        assert aux_RA.shape[0] == ids.shape[0] > 0, (aux_RA.shape, ids.shape)
        positions = torch.arange(self.length, self.length + len(ids), device=self._device)
        embedding, hidden = self.draft.embed(ids), self.draft.project_aux(aux_RA)
        self._used = self.length
        self._append(*self.draft.key_value(embedding, hidden, positions))
        self.length = self._used
        # Only the last row's output is ever read: its query sees every entry, so no mask.
        last = slice(-1, None)
        query = self.draft.query(embedding[last], hidden[last], positions[last])
        self._output = self.draft.finish(hidden[last], self._attend(query))

    @torch.no_grad()
    def feed(self, token: int) -> None:
        """Take one drafted token (a target id) with the last output fed back."""
        assert self._output is not None, "extend comes first"
        position = torch.tensor([self._used], device=self._device)
        embedding = self.draft.embed(torch.tensor([token], device=self._device))
        hidden = self.draft.feedback(self._output)
        query, key, value = self.draft.query_key_value(embedding, hidden, position)
        self._append(key, value)
        self._output = self.draft.finish(hidden, self._attend(query))

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Draft logits [Vd] of the newest entry."""
        assert self._output is not None, "extend comes first"
        return self.draft.logits(self._output)[0]

    def propose(self, depth: int) -> list[int]:
        """The greedy chain: `depth` target ids, each fed back to draft the next."""
        tokens: list[int] = []
        for _ in range(depth):
            if tokens:
                self.feed(tokens[-1])
            tokens.append(int(self._target_ids[self.logits().argmax()]))
        return tokens

    def _append(self, key_RMH: Tensor, value_RMH: Tensor) -> None:
        end = self._used + key_RMH.shape[0]
        capacity = self._cache.shape[2]
        if end > capacity:
            grown = self._cache.new_empty(
                (2, self._cache.shape[1], max(end, 2 * capacity), self._cache.shape[3])
            )
            grown[:, :, : self._used] = self._cache[:, :, : self._used]
            self._cache = grown
        self._cache[0, :, self._used : end] = key_RMH.transpose(0, 1)
        self._cache[1, :, self._used : end] = value_RMH.transpose(0, 1)
        self._used = end

    def _attend(self, query_1NH: Tensor) -> Tensor:
        """Attention [1, N, H] of one query over all entries, scale 1/sqrt(H)."""
        key, value = self._cache[:, None, :, : self._used]  # each [1, M, L, H]
        # [1, N, H] -> [1, N, 1, H] and back
        query = query_1NH[:, :, None]
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)[:, :, 0]
