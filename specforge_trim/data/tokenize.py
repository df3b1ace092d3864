"""Turn a row into token ids and the loss mask.

One job: loss_mask[t] is True iff the assistant wrote token t, from the end of the generation
prompt through its end-of-turn token; a newline after that is not its own. MaskOptions may leave
parts of that out. Where the spans are is decided on the rendered text (template.py), which tokens
they are by spelling tokens as bytes (token_bytes.py), so decoding the masked ids gives exactly
what the template renders for the assistant.
"""

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specforge_trim.data.rows import Conversation, Row, RowError, TextRow, TokenRow
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.data.template import ChatTemplate, Rendered
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

    def documents(self, rows: Sequence[Row]) -> list[Document | RowError]:
        """Tokenise many rows: for each its document, or why it is refused."""
        found: list[Document | RowError | Rendered] = []
        for row in rows:
            try:
                found.append(self._given(row) if isinstance(row, TokenRow) else self._render(row))
            except RowError as error:
                found.append(error)
        rendered = [i for i, item in enumerate(found) if isinstance(item, Rendered)]
        encoded = self._all_ids([found[i].text for i in rendered])
        for i, ids in zip(rendered, encoded, strict=True):
            try:
                found[i] = self._masked(found[i], ids, source=rows[i].source)
            except RowError as error:
                found[i] = error
        return found

    def document(self, row: Row) -> Document:
        """Tokenise one row; raises RowError when its mask would be a guess or empty."""
        (found,) = self.documents([row])
        if isinstance(found, RowError):
            raise found
        return found

    def _render(self, row: Conversation | TextRow) -> Rendered:
        rendered = (
            self.template.locate(row) if isinstance(row, TextRow) else self.template.render(row)
        )
        try:
            rendered.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("text has a lone surrogate", f"character {error.start}") from None
        return rendered

    def _masked(self, rendered: Rendered, ids: list[int], *, source: str) -> Document:
        """The document of a rendered row whose whole text encodes to ids."""
        raw = rendered.text.encode("utf-8")
        spans = _byte_spans(rendered.text, rendered.spans)
        ids, starts, ends = self._settle(rendered, raw, spans, ids)
        _check_edges(starts, ends, [edge for span in spans for edge in span])
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            mask[starts.searchsorted(start) : ends.searchsorted(end, "right")] = True
        mask &= ends > starts
        if not mask.any():
            raise RowError("no supervised token")
        return make_document(np.array(ids, dtype=np.int64), mask, source=source)

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

    def _settle(self, rendered: Rendered, raw: bytes, spans, ids: list[int]):
        """ids of the text, and starts and ends of the tokens in its bytes.

        A token may reach over the end of a generation prompt, e.g. the newline that ends the
        prompt merged with one that starts the answer. While serving, the prompt is tokenised
        alone, so there is a token boundary: the text is then encoded in pieces cut there.
        """
        starts, ends = self._bytes.ranges(ids, raw)
        crossed = _crossed(starts, ends, [start for start, _ in spans])
        if crossed.any():
            inside = [
                start for (start, _), cut in zip(rendered.spans, crossed, strict=True) if cut
            ]
            cuts, text = [0, *inside, len(rendered.text)], rendered.text
            ids = [i for a, b in zip(cuts, cuts[1:], strict=False) for i in self._ids(text[a:b])]
            starts, ends = self._bytes.ranges(ids, raw)
        return ids, starts, ends

    def _all_ids(self, texts: list[str]) -> list[list[int]]:
        if len(texts) == 1:  # a batch would start the tokenizer's threads
            return [self._ids(texts[0])]
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

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


def _crossed(starts: np.ndarray, ends: np.ndarray, edges: list[int]) -> np.ndarray:
    """Which byte edges lie inside a token: the last token that starts before one ends after it."""
    before = starts.searchsorted(edges) - 1
    return (before >= 0) & (ends[before] > edges)


def _check_edges(starts: np.ndarray, ends: np.ndarray, edges: list[int]) -> None:
    crossed = _crossed(starts, ends, edges)
    if crossed.any():
        raise RowError(
            "a token crosses the edge of the assistant's text", f"byte {edges[crossed.argmax()]}"
        )
