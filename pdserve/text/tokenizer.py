"""Text to token ids and back, with the checkpoint's own tokenizer. The `tokenizers` library only: no torch."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path

import tokenizers

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.text.chat import ChatTemplate
from pdserve.text.token_bytes import Decoder, read_decoder
from pdserve.text.utf8 import Utf8Stream


class Tokenizer:
    """Immutable after loading; may be used from several threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        """Raises `ConfigError` when the tokenizer's decoder is not known."""
        backend.no_padding()  # a tokenizer.json may carry the settings of its training
        backend.no_truncation()
        self._backend = backend
        self._chat_template = chat_template
        decoder = read_decoder(json.loads(backend.to_str())["decoder"])
        self._special = {
            index: token.content.encode() for index, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._bytes = _token_bytes(backend, decoder, self._special)
        self._strip_leading_space = decoder.strip_leading_space

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """From tokenizer.json, and the chat template where there is one. Raises `ConfigError`."""
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
        return cls(backend, ChatTemplate.load(directory))

    @property
    def vocab_size(self) -> int:
        """Ids are below it. The model's own may be larger: its last rows are padding."""
        return len(self._bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in the text count as such, as in every Hugging Face tokenizer.

        Long texts take long (0.3 s a megabyte): call it in a thread, the GIL is released. Raises `InvalidRequest` for
        a text with lone surrogates, which JSON can carry but no tokenizer takes.
        """
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest(f"is not valid Unicode: lone surrogate at character {exc.start}", field="prompt") from exc
        # As a batch of one: only batches release the GIL, and this kind skips the offsets, which halves the time.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens and ids of no token add nothing; what is not UTF-8 becomes U+FFFD."""
        stream = self.stream()
        return stream.push(b"".join(map(self.token_bytes, ids))) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds to a text: often not whole characters. Empty for special tokens and unknown ids."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def written_bytes(self, token_id: int) -> bytes:
        """As `token_bytes`, and a special token as it is written in a prompt."""
        return self._special.get(token_id) or self.token_bytes(token_id)

    def stream(self) -> Utf8Stream:
        """For the bytes of one output, from its first token on."""
        return Utf8Stream(strip_leading_space=self._strip_leading_space)

    def apply_chat_template(self, messages: Sequence[tuple[str, str]]) -> str:
        """(role, content) pairs as the prompt that asks for the next assistant turn.

        Encode it with `add_special_tokens=False`: the template writes them out. Raises `InvalidRequest` on "messages".
        """
        if self._chat_template is None:
            raise InvalidRequest("this model has no chat template: send a text prompt", field="messages")
        return self._chat_template.render(messages)


def _token_bytes(backend: tokenizers.Tokenizer, decoder: Decoder, special: Container[int]) -> tuple[bytes, ...]:
    """By id, special tokens empty. 49,152 ids take 60 ms, once."""
    vocab = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        if index not in special:
            table[index] = decoder.to_bytes(token)
    return tuple(table)
