"""Text to tokens and back: encoding, chat rendering, and text that streams out token by token."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conflux_jax.chat_template import ChatTemplate
from conflux_jax.request import InvalidRequest
from conflux_jax.tokenizer_files import TokenizerParts, read_tokenizer

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's mark for a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def open_text(model: str | Path) -> TextCodec:
    """The tokenizer of a known name, a `.gguf` file or a Hugging Face directory.

    Raises ModelError that names the file and field.
    """
    return TextCodec(read_tokenizer(model))


class TextCodec:
    """A model's tokenizer and chat template.

    Decoding goes through bytes: each token has its own, and UTF-8 is decoded from their
    concatenation. That is what makes streaming exact: any split of the tokens into pieces gives
    the same text, and a character appears when its last byte does.
    """

    def __init__(self, parts: TokenizerParts):
        self._parts = parts
        self._tokenizer = parts.tokenizer
        self._spelling = parts.spelling
        self._template = ChatTemplate(parts.chat_template, parts.special_tokens)
        self._token_bytes: dict[int, bytes] = {}
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        bos = parts.special_tokens.get("bos_token")
        self.bos_token_id = None if bos is None else self._tokenizer.token_to_id(bos)
        self.vocab_size = parts.vocab_size  # ids from here on have no token
        self.eos_token_ids = parts.eos_token_ids

    @property
    def drops_first_space(self) -> bool:
        return self._spelling.drops_first_space

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in the text are recognised.

        A BOS token is put first where the model asks for one and the text does not already start
        with it (a rendered chat often does). Raises InvalidRequest (field "prompt") for a text
        that is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("prompt", f"is not valid Unicode: {error.reason}") from error
        # Not `encode`, which keeps every other thread of Python waiting until it is done: seconds
        # for a long prompt, in which no stream would have a token.
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = found.ids
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_token_id:
            return ids[1:]
        return ids

    def decode(
        self,
        ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        continuation: bool = False,
    ) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        `continuation`: the text goes on from a prompt, so a space that it starts with is real.
        """
        stream = IncrementalDetokenizer(
            self, skip_special_tokens=skip_special_tokens, continuation=continuation
        )
        pieces = [stream.push(token_id) for token_id in ids]
        return "".join(pieces) + stream.finish()

    def render_chat(self, messages: Any, add_generation_prompt: bool = True) -> str:
        """The conversation as text. Raises InvalidRequest (field "messages")."""
        return self._template.render(messages, add_generation_prompt)

    def encode_chat(self, messages: Any, add_generation_prompt: bool = True) -> list[int]:
        """The conversation as tokens. The template alone decides on a BOS token."""
        text = self.render_chat(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def as_files(self) -> dict[str, str]:
        """The tokenizer as Hugging Face's files, by name, wherever it was read from. Slow."""
        settings: dict[str, Any] = {
            **self._parts.special_tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
        if self._parts.chat_template is not None:
            settings["chat_template"] = self._parts.chat_template
        return {
            "tokenizer.json": self._tokenizer.to_str(),
            "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=1),
        }

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token, which has no place in the text of an answer."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty where the id has no token."""
        known = self._token_bytes.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            known = b"" if token is None else self._spelled(token)
            self._token_bytes[token_id] = known
        return known

    def _spelled(self, token: str) -> bytes:
        if self._spelling.byte_level:
            try:
                return bytes(_BYTES_OF[character] for character in token)
            except KeyError:  # an added token, spelled as it is
                return token.encode()
        if self._spelling.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()


class IncrementalDetokenizer:
    """Tokens in, text out, at constant cost a token: the pieces joined are `decode` of all tokens.

    Never emits half a character: bytes wait until they are complete or cannot become so. Worked:
    the three tokens of U+9F9C (E9, BE, 9C) give "", "", "龜"; cut off after two, `finish` gives
    U+FFFD, as decoding those two at once does.
    """

    def __init__(
        self, codec: TextCodec, *, skip_special_tokens: bool = True, continuation: bool = False
    ):
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        self._drop_space = codec.drops_first_space and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes; often empty inside a long character."""
        if self._skip_special_tokens and self._codec.is_special(token_id):
            return ""
        data = self._codec.token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut off, else nothing."""
        return self._decoder.decode(b"", True)


class TextStream:
    """The text of one answer as it is generated, up to the first stop string.

    Text that may turn out to be the start of a stop string is held back until it is decided. The
    stop string that is complete first counts (of several that end together, the longest), so the
    outcome does not depend on how tokens cut the text. The text of the first `min_tokens` tokens is
    not looked at.
    """

    def __init__(self, tokenizer: TextCodec, stop: Sequence[str] = (), min_tokens: int = 0):
        self._detokenizer = IncrementalDetokenizer(tokenizer, continuation=True)
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""
        self._unsearched = min_tokens  # tokens
        self._stopped = False

    def push(self, token_id: int) -> tuple[str, bool]:
        """(new text that is safe to show, whether a stop string was completed). The stop string
        itself is not part of the text, and after it nothing more comes."""
        if self._stopped:
            return "", True
        text = self._detokenizer.push(token_id)
        if self._unsearched:
            self._unsearched -= 1
            return text, False
        return self._feed(text)

    def finish(self) -> str:
        """What was held back, at the end of an answer that no stop string ended."""
        if self._stopped:
            return ""
        text, _ = self._feed(self._detokenizer.finish())
        text, self._held = text + self._held, ""
        self._stopped = True
        return text

    def _feed(self, new: str) -> tuple[str, bool]:
        if not self._matchers:
            return new, False
        text = self._held + new
        for end in range(len(self._held) + 1, len(text) + 1):
            complete = [m.length for m in self._matchers if m.advance(text[end - 1])]
            if complete:
                self._stopped, self._held = True, ""
                return text[: end - max(complete)], True
        keep = len(text) - max(m.matched for m in self._matchers)
        self._held = text[keep:]
        return text[:keep], False


class _Matcher:
    """Looks for one string in text that arrives a character at a time (Knuth, Morris, Pratt).

    `matched` is the length of the longest end of the text so far that starts the string: what
    must be held back. Constant cost a character, whatever the string, and none before: a call of
    128 choices with sixteen long strings has thousands of these, made while others wait.
    """

    def __init__(self, pattern: str):
        self._pattern = pattern
        self.length = len(pattern)
        self.matched = 0
        # The same, of the pattern's own first i+1 characters; as many as have been matched once.
        self._fallback = [0]

    def advance(self, character: str) -> bool:
        """Whether the string is now complete; it must not be advanced after that."""
        self.matched = self._step(self.matched, character)
        if self.matched > len(self._fallback):  # by one
            last = self._pattern[self.matched - 1]
            self._fallback.append(self._step(self._fallback[-1], last))
        return self.matched == self.length

    def _step(self, matched: int, character: str) -> int:
        while matched and self._pattern[matched] != character:
            matched = self._fallback[matched - 1]
        return matched + (self._pattern[matched] == character)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTES_OF = _byte_of_character()
