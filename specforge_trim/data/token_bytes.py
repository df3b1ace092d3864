"""Which bytes of the text each token stands for.

One job: token ids plus the text they came from become byte ranges. A tokenizer's own character
offsets cannot serve: one character of several bytes may be several tokens, whose offsets then
overlap. Here every token is spelled as bytes, and the spelling must equal the text.

    text   "a e-acute b"   bytes 61 c3 a9 62
    tokens "a" "<c3>" "<a9>" "b"  ->  starts 0 1 2 3, ends 1 2 3 4
"""

import json

import numpy as np

from specforge_trim.data.conversation import RowError


class TokenBytes:
    """Byte spellings of a fast tokenizer's vocabulary.

    Raises ValueError for a tokenizer without a Rust backend, or one whose vocabulary is neither
    byte-level (GPT-2, Llama-3, Qwen) nor sentencepiece-like (Llama-2, Gemma).
    """

    def __init__(self, tokenizer):
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) is not a fast "
                "tokenizer; loss masks need tokenizer.json"
            )
        spell = _speller(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._spelling: list[bytes | None] = [
            str(added[i]).encode() if i in added else spell(token)
            for i, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
        ]
        self._sizes = np.array([len(s or b"") for s in self._spelling], dtype=np.int64)
        self._strips = {i: (t.lstrip, t.rstrip) for i, t in added.items() if t.lstrip or t.rstrip}
        self._special = frozenset(i for i, t in added.items() if t.special)

    def spelling(self, token: int) -> bytes:
        """The bytes a token stands for; its id in brackets for one without a spelling."""
        spelled = self._spelling[token] if 0 <= token < len(self._spelling) else None
        return f"<{token}>".encode() if spelled is None else spelled

    def ranges(self, ids: np.ndarray, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Byte ranges [starts, ends) of the tokens of text, each int64 [L]; raises RowError.

        ids: int64 [L].

        Bytes between two ranges belong to no token: a special token may swallow spaces at its
        sides. A sentencepiece token may spell one leading space that the text does not have, at
        the start or after a special token; its range leaves it out.
        """
        sizes = self.sizes(ids, text)
        if sizes is None:
            listed = ids.tolist()
            return self._walk(listed, [self._spelling[i] for i in listed], text)
        ends = sizes.cumsum()
        return ends - sizes, ends

    def sizes(self, ids: np.ndarray, text: bytes) -> np.ndarray | None:
        """Bytes of each token, int64 [L], where the tokens one after the other are the text."""
        spelled = map(self._spelling.__getitem__, ids.tolist())
        try:
            whole = b"".join(spelled) == text  # type: ignore[arg-type]
        except TypeError:  # a token without a spelling
            return None
        return self._sizes[ids] if whole else None

    def _walk(self, ids, spelled, text: bytes) -> tuple[np.ndarray, np.ndarray]:
        starts, ends = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)
        place, fresh, swallow = 0, True, False
        for k, (i, token) in enumerate(zip(ids, spelled, strict=True)):
            before, after = self._strips.get(i, (False, False))
            while (before or swallow) and text[place : place + 1].isspace():
                place += 1
            if (
                token is not None
                and fresh
                and token[:1] == b" "
                and text[place : place + 1] != b" "
            ):
                token = token[1:]
            if token is None or not text.startswith(token, place):
                raise RowError("tokens do not spell the rendered text", f"token {k}, id {i}")
            starts[k], place = place, place + len(token)
            ends[k] = place
            fresh, swallow = i in self._special, after
        if text[place:].strip() or (text[place:] and not swallow):
            raise RowError("tokens do not spell the rendered text", f"ends at byte {place}")
        return starts, ends


def _speller(tokenizer):
    """The function from a vocabulary entry to its bytes, or None where it has none."""
    decoder = tokenizer.backend_tokenizer.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    kinds = {part["type"] for part in [state, *state.get("decoders", [])] if "type" in part}
    if "ByteLevel" in kinds:
        alphabet = _byte_alphabet()

        def byte_level(token: str) -> bytes | None:
            if any(char not in alphabet for char in token):
                return None
            return bytes(alphabet[char] for char in token)

        return byte_level
    if kinds & {"Metaspace", "ByteFallback"}:
        return _sentencepiece
    raise ValueError(
        f"tokenizer {tokenizer.name_or_path!r} decodes with {sorted(kinds) or 'nothing'}; loss "
        "masks need a byte-level or a sentencepiece vocabulary"
    )


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte.

    Printable Latin-1 bytes stand for themselves; the others, in order, for U+0100 onwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet.update({chr(0x100 + k): byte for k, byte in enumerate(others)})
    return alphabet
