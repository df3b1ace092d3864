"""Turn a row into token ids and the loss mask.

One job: loss_mask[t] is True iff the assistant wrote token t, from the end of the generation
prompt through its end-of-turn token; a newline after that is not its own. MaskOptions may leave
parts of that out. Where the spans are is decided on the rendered text (template.py), which tokens
they are by spelling tokens as bytes (token_bytes.py), so decoding the masked ids gives exactly
what the template renders for the assistant.
"""

import copy
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specforge_trim.data.rows import Row, RowError, TextRow, TokenRow
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.data.template import ChatTemplate
from specforge_trim.data.token_bytes import TokenBytes


@dataclass(frozen=True)
class Document:
    """One tokenised conversation of L tokens.

    input_ids: int64 [L];  loss_mask: bool [L];  source: "file:line";
    doc_id: sha256 (hex) of ids and mask, the same wherever the row stands.
    """

    input_ids: Tensor
    loss_mask: Tensor
    source: str
    doc_id: str


class ChatTokenizer:
    """A tokenizer with its chat template probed and its vocabulary spelled, for many rows.

    Raises ValueError when the tokenizer cannot give exact masks (no chat template, no fast
    backend, a template that hides where the assistant's turn starts or ends).
    """

    def __init__(self, tokenizer, *, masks: MaskOptions | None = None):
        self.tokenizer = tokenizer
        self.masks = masks or MaskOptions()
        self.template = ChatTemplate(tokenizer, masks=self.masks)
        self._bytes = TokenBytes(tokenizer)
        # A copy, since padding and truncation stay set from the last call of whoever used it.
        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_padding()
        self._backend.no_truncation()

    def document(self, row: Row) -> Document:
        """Tokenise one row; raises RowError when its mask would be a guess or empty."""
        if isinstance(row, TokenRow):
            return self._given(row)
        if isinstance(row, TextRow):
            rendered = self.template.locate(row)
        else:
            rendered = self.template.render(row)
        text = rendered.text
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("text has a lone surrogate", f"character {error.start}") from None
        spans = _byte_spans(text, rendered.spans)
        ids, starts, ends = self._encode(text, raw, rendered.spans, spans)
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            mask |= (starts >= start) & (ends <= end) & (ends > start)
        _check_edges(starts, ends, [edge for span in spans for edge in span])
        if not mask.any():
            raise RowError("no supervised token")
        return make_document(np.asarray(ids, dtype=np.int64), mask, source=row.source)

    def _given(self, row: TokenRow) -> Document:
        """Ids and mask as the row has them."""
        if self.masks != MaskOptions():
            raise RowError("a row with its own mask cannot follow the mask options")
        size, top = len(self.tokenizer), max(row.input_ids, default=0)
        if top >= size:
            raise RowError("input_ids hold an id the tokenizer does not have", f"{top} of {size}")
        if not any(row.loss_mask):
            raise RowError("no supervised token")
        ids, mask = np.array(row.input_ids, np.int64), np.array(row.loss_mask, bool)
        return make_document(ids, mask, source=row.source)

    def _encode(self, text, raw, char_spans, byte_spans):
        """ids of the text, one encoding of the whole; starts and ends in bytes.

        A token may reach over the end of a generation prompt, e.g. the newline that ends the
        prompt merged with one that starts the answer. While serving, the prompt is tokenised
        alone, so there is a token boundary: the text is then encoded in pieces cut there.
        """
        ids = self._ids(text)
        starts, ends = self._bytes.ranges(ids, raw)
        crossed = [
            chars[0]
            for chars, span in zip(char_spans, byte_spans, strict=True)
            if ((starts < span[0]) & (span[0] < ends)).any()
        ]
        if crossed:
            cuts = [0, *crossed, len(text)]
            ids = [i for a, b in zip(cuts, cuts[1:], strict=False) for i in self._ids(text[a:b])]
            starts, ends = self._bytes.ranges(ids, raw)
        return ids, starts, ends

    def _ids(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids


def render_and_mask(tokenizer, conversation: Row) -> Document:
    """Tokenise one row through the tokenizer's own chat template.

    tokenizer is a fast transformers tokenizer, or a ChatTokenizer (cheaper for many rows). Raises
    RowError for a row that is refused, ValueError for a tokenizer that cannot be used.
    """
    chat = tokenizer if isinstance(tokenizer, ChatTokenizer) else ChatTokenizer(tokenizer)
    return chat.document(conversation)


def make_document(input_ids: np.ndarray, loss_mask: np.ndarray, *, source: str) -> Document:
    """A Document from int64 ids [L] and bool mask [L]; the doc_id is computed here only."""
    assert input_ids.dtype == np.int64 and loss_mask.dtype == bool, (input_ids, loss_mask)
    assert input_ids.shape == loss_mask.shape, (input_ids.shape, loss_mask.shape)
    digest = hashlib.sha256(input_ids.astype("<i8").tobytes() + loss_mask.tobytes()).hexdigest()
    return Document(torch.from_numpy(input_ids), torch.from_numpy(loss_mask), source, digest)


def _byte_spans(text: str, spans: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Character spans as UTF-8 byte spans, in one pass over the text."""
    found, chars, size = [], 0, 0
    for start, end in spans:
        size += len(text[chars:start].encode())
        first, size = size, size + len(text[start:end].encode())
        found.append((first, size))
        chars = end
    return found


def _check_edges(starts: np.ndarray, ends: np.ndarray, edges: list[int]) -> None:
    for edge in edges:
        crossing = np.flatnonzero((starts < edge) & (edge < ends))
        if crossing.size:
            raise RowError("a token crosses the edge of the assistant's text", f"byte {edge}")
