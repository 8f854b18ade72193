"""Turns documents into rows: their tokens, and which tokens are labels.

Prompt and response are tokenized in one piece. The offsets of the tokens say which of them hold a character of a
response. So the tokens of a row do not depend on `loss_on`, and a token across the border is a label, because it holds
text of the response. Responses that `hsd generate-data` sampled bring their own tokens and are not tokenized again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hsd_jax.host.files import sha256
from hsd_jax.train.documents import Document

ALL, RESPONSES = "all", "responses"
_ENCODED_AT_ONCE = 1000
"""Documents tokenized at once. The offsets of a whole corpus would need many times its size."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """Training data as rows of length + 1 tokens. The extra token is the last label."""

    tokens: np.ndarray
    """int32 [num, length + 1]."""
    mask: np.ndarray
    """bool [num, length + 1]: whether a token is a label. Position 0 and the first token of a document never are."""
    num_documents: int
    num_tokens: int
    """Tokens of the documents, start and end tokens included."""
    starts: np.ndarray | None = None
    """int32 [num, length + 1]: where in the row the document of each token begins; 0 if it began in an earlier row. A
    token sees nothing before that place, and positions count from it. None: every row holds one document."""

    @property
    def length(self) -> int:
        return self.tokens.shape[1] - 1

    def describe(self) -> str:
        """The data in one line."""
        labels = self.mask.sum() / (len(self.tokens) * self.length)
        rows = f"{len(self.tokens):,} rows of {self.length}: {labels:.1%} labels"
        return f"{self.num_documents:,} documents, {self.num_tokens:,} tokens, {rows}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of tokens and starts, in 64 hexadecimal digits. Cached features depend on nothing else of the data."""
        arrays = [self.tokens] if self.starts is None else [self.tokens, self.starts]
        return sha256(str(self.tokens.shape), *(np.ascontiguousarray(array, "<i4").tobytes() for array in arrays))

    def take(self, at: slice | np.ndarray) -> dict[str, np.ndarray]:
        """Some rows as a batch: `tokens`, `mask` and, if rows pack several documents, `starts`."""
        values = {"tokens": self.tokens, "mask": self.mask, "starts": self.starts}
        return {name: value[at] for name, value in values.items() if value is not None}


def beginnings(batch: dict[str, np.ndarray], length: int) -> list[np.ndarray]:
    """At most `length` tokens of each row of a batch (`Rows.take`), all of one document: the first with `length`
    tokens, else the longest."""
    starts = batch.get("starts", np.zeros_like(batch["tokens"]))
    return [
        max((row[begins == begin][:length] for begin in np.unique(begins)), key=len)  # on a tie the first
        for row, begins in zip(batch["tokens"], starts, strict=True)
    ]


Encoded = tuple[np.ndarray, np.ndarray]
"""The tokens of a document, int32 [n], and whether each is a label, bool [n]."""


def encoded(
    documents: Sequence[Document], tokenizer, bos: int | None, eos: int, vocab_size: int, on_responses: bool
) -> Iterator[Encoded]:
    """The tokens and labels of each document.

    Args:
      bos, eos: the token before each text, if any, and that after each text without a special token at its end.
    """
    if on_responses and not any(d.responses for d in documents):
        raise ValueError(f"data.loss_on=responses: no document from {documents[0].where} on holds a response")
    special = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    for start in range(0, len(documents), _ENCODED_AT_ONCE):
        some = documents[start : start + _ENCODED_AT_ONCE]
        texts = iter(tokenizer.encode_batch([d.text for d in some if d.tokens is None], add_special_tokens=False))
        found: list[Encoded] = []
        for document in some:
            if document.tokens is None:
                ids, labels = _of_text(document, next(texts), bos, eos, special, on_responses)
            else:
                if spoken(tokenizer.decode, *document.tokens) != document.text[document.responses[0][0] :]:
                    raise ValueError(f"{document.where}: response_tokens are another tokenizer's; generate them again")
                ids, labels = _as_sampled(document.tokens, eos, special, on_responses)
            if max(ids) >= vocab_size:
                raise ValueError(f"{document.where}: holds token {max(ids)}; the model has {vocab_size} tokens")
            found.append((np.asarray(ids, np.int32), labels))
        yield from found


def _of_text(document: Document, encoding, bos, eos: int, special: dict[int, str], on_responses: bool):
    """The tokens and labels of a text. Start and end tokens are added if the text does not have them."""
    ids = encoding.ids
    head = [] if bos is None or document.is_templated or ids[:1] == [bos] else [bos]
    is_closed = ids[-1:] == [eos] or (
        document.is_templated and document.text.rstrip().endswith(tuple(special.values()) or ("\0",))
    )
    tail = [] if is_closed else [eos]
    labels = np.full(len(head) + len(ids) + len(tail), not on_responses)
    if on_responses:
        ends = np.array([end for _, end in encoding.offsets])
        starts = np.array([start for start, _ in encoding.offsets])
        for first, last in document.responses:
            # A token of white space may have an empty range of offsets, at its end.
            inside = np.flatnonzero((ends > first) & (starts < last))
            if document.is_templated:  # what follows the end of the turn is not the assistant's
                closing = [i for i, at in enumerate(inside) if ids[at] in special]
                inside = inside[: closing[-1] + 1] if closing else inside
            labels[len(head) + inside] = True
        if tail and document.responses and document.responses[-1][1] == len(document.text):
            labels[-1] = True
    return [*head, *ids, *tail], labels


def _as_sampled(tokens: tuple[list[int], list[int]], eos: int, special: dict[int, str], on_responses: bool):
    """The tokens and labels of a sampled response. A response without an end gets an end token, which is no label."""
    prompt, response = tokens
    ids = [*prompt, *response]
    tail = [] if ids[-1:] and ids[-1] in special else [eos]
    return [*ids, *tail], np.repeat([not on_responses, True, False], [len(prompt), len(response), len(tail)])


def spoken(decode: Callable[[list[int]], str], prompt: list[int], response: list[int]) -> str:
    """The text that `response` adds to `prompt`."""
    # Decoded together, because some tokenizers write a token in another way at the start of a text.
    before, whole = decode(prompt), decode([*prompt, *response])
    return whole[len(before) :] if whole.startswith(before) else decode(response)


def make_rows(encoded: Sequence[Encoded], length: int, seed: int) -> Rows:
    """Rows of `length` tokens and a last label, from documents in a random order.

    Neighbouring rows share one token, so that no label is lost. Tokens that do not fill a row are dropped.
    """
    encoded = [encoded[i] for i in np.random.default_rng(seed).permutation(len(encoded))]
    tokens, labels = (np.concatenate(parts) for parts in zip(*encoded, strict=True))
    lengths = [len(ids) for ids, _ in encoded]
    begins = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)  # where in `tokens` the document of each token begins
    labels = labels & (begins != np.arange(len(tokens)))  # the first token of a document
    num = (len(tokens) - 1) // length
    if num < 1:
        raise ValueError(f"the data hold {len(tokens)} tokens: fewer than one row of {length + 1}")
    at = length * np.arange(num)[:, None] + np.arange(length + 1)
    mask = labels[at]
    mask[:, 0] = False
    starts = np.maximum(begins[at] - at[:, :1], 0).astype(np.int32)
    return Rows(tokens[at], mask, len(encoded), len(tokens), starts=starts if starts.any() else None)
