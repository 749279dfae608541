"""The checkpoint's own tokenizer: text to token ids, and back. It needs the `tokenizers` library and no torch."""

from __future__ import annotations

import codecs
import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Final

import tokenizers

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.text.chat import ChatTemplate
from pdserve.text.token_bytes import TokenDecoder, read_decoder
from pdserve.text.token_length import TokenBound

# Characters -----------------------------------------------------------------------------------------------------------
#
# Bytes to text, piece by piece: a character is given out when its last byte has come.

_new_decoder: Final = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """A decoder of UTF-8 that comes in pieces. Invalid bytes become U+FFFD, exactly as if all bytes were decoded at once."""

    def __init__(self, *, strip_leading_space: bool = False) -> None:
        self._decoder = _new_decoder("replace")
        self._strip = strip_leading_space

    def push(self, data: bytes) -> str:
        """Add bytes and return the characters that are complete now. At most three bytes are held back."""
        return self._stripped(self._decoder.decode(data))

    def flush(self) -> str:
        """End the text. The bytes that are held back are an incomplete character and become U+FFFD."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class Tokenizer:
    """The tokenizer of one model. Immutable after loading, so several threads may use it at the same time."""

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        """Wrap a loaded tokenizer. Raises `ConfigError` when its decoder is not known."""
        backend.no_padding()  # a tokenizer.json may carry the settings of its training
        backend.no_truncation()
        self._backend = backend
        self.chat_template: Final = chat_template
        """The template of chats. None: the model has none."""
        decoder = read_decoder(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        self._special = {
            index: token.content.encode() for index, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._bytes = _token_bytes(backend, decoder, self._special)
        self._strip_leading_space = decoder.strip_leading_space
        self._bound = TokenBound(backend)

    @classmethod
    def load(cls, directory: Path, chat_template: Path | None = None) -> Tokenizer:
        """Read tokenizer.json, and the chat template if there is one. `chat_template` is read in place of the model's own.
        Raises `ConfigError`."""
        path = directory / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
        except UnicodeDecodeError as exc:
            raise ConfigError(f"{path} is not a valid tokenizer: {exc}") from exc
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as exc:  # the library raises Exception itself
            raise ConfigError(f"{path} is not a valid tokenizer: {exc}") from exc
        return cls(backend, ChatTemplate.load(directory, chat_template))

    @property
    def vocab_size(self) -> int:
        """All ids are below this number. The model's vocabulary may be larger: its last rows are then padding."""
        return len(self._bytes)

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return self.chat_template is not None

    @property
    def special_tokens(self) -> dict[int, str]:
        """The spelling of each special token by its id."""
        return {index: spelling.decode() for index, spelling in self._special.items()}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. As in every Hugging Face tokenizer, special tokens may be written in the text.

        A megabyte takes 0.3 s: call it in a thread for long texts, since it releases the GIL. Raises `InvalidRequest` for
        a text with lone surrogates, which JSON can carry but no tokenizer accepts.
        """
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(f"is not valid Unicode: lone surrogate at character {exc.start}", field="prompt") from exc
        # Only batches release the GIL, hence a batch of one text. This kind of batch skips offsets, which halves the time.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without encoding it. 0: nothing is known."""
        return self._bound.least_tokens(text)

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = (), skip_special_tokens: bool = True) -> str:
        """Return the text of token ids that follow those of `after`. Special tokens add nothing or, without
        `skip_special_tokens`, their written form. Unknown ids add nothing; invalid UTF-8 becomes U+FFFD."""
        stream = self.stream(after, skip_special_tokens=skip_special_tokens)
        bytes_of = self.token_bytes if skip_special_tokens else self.written_bytes
        return stream.push(b"".join(map(bytes_of, ids))) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text. They may be parts of characters.

        Special tokens and unknown ids add none.
        """
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def written_bytes(self, token_id: int) -> bytes:
        """Return the same bytes as `token_bytes`, and for a special token its spelling in a prompt."""
        return self._special.get(token_id) or self.token_bytes(token_id)

    def spelling(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it, such as "Ġthe". It is empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def stream(self, after: Sequence[int] = (), *, skip_special_tokens: bool = True) -> Utf8Stream:
        """Return a decoder for the bytes of a text that follows the tokens `after`.

        Tokenizers of Llama 2's kind drop the blank at the beginning of a text. What follows a prompt is not a beginning, unless
        the prompt adds no text, as one of special tokens alone.
        """
        bytes_of = self.token_bytes if skip_special_tokens else self.written_bytes
        return Utf8Stream(strip_leading_space=self._strip_leading_space and not any(map(bytes_of, after)))


def _token_bytes(backend: tokenizers.Tokenizer, decoder: TokenDecoder, special: Container[int]) -> tuple[bytes, ...]:
    """Return the bytes of each token by id; those of special tokens are empty. 49,152 ids take 60 ms, once."""
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        if index not in special:
            table[index] = decoder.to_bytes(token)
    return tuple(table)
