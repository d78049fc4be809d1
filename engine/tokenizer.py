"""Text to token ids and back: encoding, chat templates, streaming decoding, stop strings.

Everything comes from a packed entry's `tokenizer.json` and `chat.json`; transformers is not needed and not imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tokenizers

from ..kernels.errors import CheckpointError, UsageError
from .load.text import ChatInfo
from .long_text import encode, refuse_hopeless
from .pieces import TextStream, decoder_style

if TYPE_CHECKING:
    from .chat_template import Message


class Tokenizer:
    """The tokenizer in `folder`, with `template` as its chat template if one is given.

    Safe to share between threads: nothing changes once it is made, but that it remembers the bytes of tokens it met.
    """

    __slots__ = ("_backend", "_bytes", "_special_ids", "_style", "chat")

    def __init__(self, folder: Path, template: str | None = None) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            chat = msgspec.json.decode((folder / "chat.json").read_bytes(), type=ChatInfo)
        except Exception as error:  # tokenizers raises bare Exception for anything wrong with its file
            raise CheckpointError(f"cannot read the tokenizer in `{folder}`: {error}") from error
        self.chat = chat if template is None else msgspec.structs.replace(chat, template=template)
        decoder = self._backend.decoder  # its pickled state is its part of the JSON; parsing all of that again is slow
        self._style = decoder_style(None if decoder is None else json.loads(decoder.__getstate__()))
        self._backend.no_truncation()  # a tokenizer.json may carry both, and would silently cut or fill prompts
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's own vocabulary may be padded to more."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.chat.eos_ids

    def encode(self, text: str, add_special: bool = True, most: int | None = None) -> list[int]:
        """Token ids of the text, with the tokens the model wants round it (such as BOS) if `add_special`.

        A text that is far too long for `most` tokens is a CapacityError, without encoding all of it.
        """
        if most is not None:
            refuse_hopeless(self._backend, text, most)
        return list(encode(self._backend, text, add_special).ids)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of these tokens; bytes that form no character become U+FFFD, unknown ids nothing."""
        decoder = IncrementalDecoder(self, skip_special)
        return decoder.push(ids) + decoder.finish()

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token adds to a text."""
        data = self.known_bytes(index)
        if data is None:
            raise UsageError(f"there is no token {index}", f"the vocabulary has {self.vocab_size} tokens")
        return data

    def known_bytes(self, index: int) -> bytes | None:
        """As `token_bytes`; None for an id without a token."""
        data = self._bytes.get(index)
        if data is None and (token := self.token(index)) is not None:
            data = self._bytes[index] = self._style.token_bytes(token)
        return data

    def token(self, index: int) -> str | None:
        """The token as the vocabulary writes it, None for an id without one."""
        token: str | None = self._backend.id_to_token(index) if index >= 0 else None
        return token

    def is_special(self, index: int) -> bool:
        """Whether the token is a control token, which is not text."""
        return index in self._special_ids

    def stream(self) -> TextStream:
        """A new stream from this vocabulary's tokens to text."""
        return TextStream(self._style.lead)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation as the model's template writes it; `variables` are a template's own, like `enable_thinking`.

        UsageError if there is no template, or if it refuses the messages.
        """
        if not self.chat.template:
            raise UsageError("the model has no chat template", "use plain completion, or an instruction-tuned model")
        from .chat_template import render  # brings Jinja, which only chats need

        return render(
            self.chat.template,
            self.chat.special_tokens,
            messages,
            add_generation_prompt,
            tools,
            documents,
            variables or {},
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        documents: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, `most` as in `encode`. The template writes every special token itself."""
        text = self.apply_chat_template(messages, add_generation_prompt, tools, documents, variables)
        return self.encode(text, add_special=False, most=most)


class IncrementalDecoder:
    """Streams one sequence: the texts of all pushes and of `finish`, joined, are `decode` of all ids.

    Only the bytes of an unfinished character are held back.
    """

    __slots__ = ("_skip_special", "_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = tokenizer.stream()

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        texts = []
        for index in ids:
            data = self._tokenizer.known_bytes(index)
            if data is not None and not (self._skip_special and self._tokenizer.is_special(index)):
                texts.append(self._stream.push(data))
        return "".join(texts)

    def finish(self) -> str:
        """What was held back; after it nothing may be pushed."""
        return self._stream.finish()


class StopMatcher:
    """Finds the first stop string in a streamed text, and never lets out text that may belong to one.

    The match that begins first wins, of several that begin together the shortest, however the text is cut into pushes.
    """

    __slots__ = ("_found", "_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise UsageError("a stop string is empty", "leave it out")
        self._stops = tuple(sorted(set(stops), key=len))
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string found or None). After a match everything is swallowed."""
        if self._found is not None:
            return "", self._found
        if not self._stops:
            return text, None
        self._held += text
        start, stop = self._first()
        unsure = self._first_partial()
        if stop is not None and start <= unsure:
            return self._emit(start), self._end(stop)
        return self._emit(unsure), None

    def finish(self) -> tuple[str, str | None]:
        """The text held back, and the stop string in it if it was waiting for one that began earlier."""
        if self._found is not None:
            return "", self._found
        start, stop = self._first()
        if stop is not None:
            return self._emit(start), self._end(stop)
        return self._emit(len(self._held)), None

    def _first(self) -> tuple[int, str | None]:
        """Where the first whole stop string begins, and which it is."""
        best: tuple[int, str | None] = (len(self._held), None)
        for stop in self._stops:  # shortest first, so that it wins a tie
            start = self._held.find(stop)
            if 0 <= start < best[0]:
                best = (start, stop)
        return best

    def _first_partial(self) -> int:
        """Where the first text begins that more text could make a stop string; the end if there is none."""
        size = len(self._held)
        longest = len(self._stops[-1]) if self._stops else 0
        for start in range(max(0, size - longest + 1), size):
            tail = self._held[start:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return start
        return size

    def _emit(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _end(self, stop: str) -> str:
        self._found, self._held = stop, ""
        return stop
