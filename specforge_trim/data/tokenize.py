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
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from specforge_trim.data.records import Conversation, Row, RowError, TextRow, TokenRow
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
        found: list = [None] * len(rows)
        chats = {i: row for i, row in enumerate(rows) if isinstance(row, Conversation)}
        for i, rendered in zip(chats, self._rendered(list(chats.values())), strict=True):
            found[i] = rendered
        for i, row in enumerate(rows):
            try:
                if isinstance(row, TokenRow):
                    found[i] = self._given(row)
                elif isinstance(row, TextRow):
                    found[i] = _encodable(self.template.locate(row))
            except RowError as error:
                found[i] = error
        texts = [i for i, item in enumerate(found) if isinstance(item, Rendered)]
        items = [found[i] for i in texts]
        encoded = self._all_ids([item.text for item in items])
        sources = [rows[i].source for i in texts]
        for i, made in zip(texts, self._all_masked(items, encoded, sources), strict=True):
            found[i] = made
        return found

    def document(self, row: Row) -> Document:
        """Tokenise one row; raises RowError when its mask would be a guess or empty."""
        (found,) = self.documents([row])
        if isinstance(found, RowError):
            raise found
        return found

    def _rendered(self, rows: Sequence[Conversation]) -> list[Rendered | RowError]:
        found = self.template.render_all(rows)
        for i, item in enumerate(found):
            try:
                found[i] = item if isinstance(item, RowError) else _encodable(item)
            except RowError as error:
                found[i] = error
        return found

    def _all_masked(
        self, rendered: list[Rendered], encoded: list[list[int]], sources: list[str]
    ) -> list[Document | RowError]:
        """_masked of many rows; those with anything unusual about them are looked at alone."""
        made: list[Document | RowError] = []
        usual = self._masked_together(rendered, encoded)
        for item, ids, source, found in zip(rendered, encoded, sources, usual, strict=True):
            try:
                if found is None:
                    made.append(self._masked(item, ids, source=source))
                else:
                    made.append(make_document(*found, source=source))
            except RowError as error:
                made.append(error)
        return made

    def _masked_together(
        self, rendered: list[Rendered], encoded: list[list[int]]
    ) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """ids and mask of each row, from byte ranges in all texts joined; None: look at it alone.

        Alone go rows that _masked may cut anew or refuse, and all of them where one token does not
        stand for the bytes of its spelling.
        """
        raws = [item.text.encode("utf-8") for item in rendered]
        counts = np.array([len(ids) for ids in encoded], np.int64)
        ids = np.fromiter(chain.from_iterable(encoded), np.int64, counts.sum())
        sizes = self._bytes.sizes(ids, b"".join(raws)) if len(counts) and counts.all() else None
        if sizes is None or not sizes.all():
            return [None] * len(rendered)
        ends = sizes.cumsum()
        starts = ends - sizes
        lasts = counts.cumsum()
        firsts = lasts - counts
        row_edges = np.cumsum([0, *map(len, raws)])  # of the rows, in bytes
        edges = [_byte_edges(*pair) for pair in zip(rendered, raws, strict=True)]
        row = np.repeat(np.arange(len(edges)), [len(some) for some in edges])
        all_edges = np.concatenate(edges) + row_edges[row]
        mask = np.zeros(len(ids), dtype=bool)
        begins = starts.searchsorted(all_edges[0::2]).tolist()
        stops = ends.searchsorted(all_edges[1::2], "right").tolist()
        for begin, stop in zip(begins, stops, strict=True):
            mask[begin:stop] = True
        usual = (starts[firsts] == row_edges[:-1]) & (ends[lasts - 1] == row_edges[1:])
        usual[row[_crossed(starts, ends, all_edges)]] = False
        usual &= np.logical_or.reduceat(mask, firsts)
        return [
            (ids[first:last], mask[first:last]) if good else None
            for first, last, good in zip(
                firsts.tolist(), lasts.tolist(), usual.tolist(), strict=True
            )
        ]

    def _masked(self, rendered: Rendered, ids: list[int], *, source: str) -> Document:
        """The document of a rendered row whose whole text encodes to ids."""
        raw = rendered.text.encode("utf-8")
        edges = _byte_edges(rendered, raw)
        token_ids, starts, ends = self._settle(rendered, raw, edges, np.array(ids, np.int64))
        firsts = starts.searchsorted(edges[0::2]).tolist()
        lasts = ends.searchsorted(edges[1::2], "right").tolist()
        mask = np.zeros(len(token_ids), dtype=bool)
        for first, last in zip(firsts, lasts, strict=True):
            mask[first:last] = True
        mask &= ends > starts
        if not mask.any():
            raise RowError("no supervised token")
        return make_document(token_ids, mask, source=source)

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

    def _settle(self, rendered: Rendered, raw: bytes, edges: np.ndarray, ids: np.ndarray):
        """ids of the text, and starts and ends of the tokens in its bytes; no edge is crossed.

        A token may reach over the end of a generation prompt, e.g. the newline that ends the
        prompt merged with one that starts the answer. While serving, the prompt is tokenised
        alone, so there is a token boundary: the text is then encoded in pieces cut there.
        """
        starts, ends = self._bytes.ranges(ids, raw)
        crossed = _crossed(starts, ends, edges)
        if crossed[0::2].any():
            inside = [
                start for (start, _), cut in zip(rendered.spans, crossed[0::2], strict=True) if cut
            ]
            cuts, text = [0, *inside, len(rendered.text)], rendered.text
            pieces = [self._ids(text[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
            ids = np.array([i for piece in pieces for i in piece], np.int64)
            starts, ends = self._bytes.ranges(ids, raw)
            crossed = _crossed(starts, ends, edges)
        if crossed.any():
            edge = edges[crossed.argmax()]
            raise RowError("a token crosses the edge of the assistant's text", f"byte {edge}")
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
    digest = hashlib.sha256(input_ids.astype("<i8", copy=False).tobytes())
    digest.update(loss_mask.tobytes())
    tensors = torch.from_numpy(input_ids), torch.from_numpy(loss_mask)
    return Document(*tensors, source, digest.hexdigest())


def _encodable(rendered: Rendered) -> Rendered:
    try:
        rendered.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("text has a lone surrogate", f"character {error.start}") from None
    return rendered


def _byte_edges(rendered: Rendered, raw: bytes) -> np.ndarray:
    """Start, end, start, end, ... of the spans in the UTF-8 bytes, int64, in one pass."""
    text, edges = rendered.text, [edge for span in rendered.spans for edge in span]
    if len(text) != len(raw):
        place, size = 0, 0
        for k, edge in enumerate(edges):
            size += len(text[place:edge].encode())
            place, edges[k] = edge, size
    return np.array(edges, np.int64)


def _crossed(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Which byte edges lie inside a token: the last token that starts before one ends after it."""
    before = starts.searchsorted(edges) - 1
    return (before >= 0) & (ends[before] > edges)
