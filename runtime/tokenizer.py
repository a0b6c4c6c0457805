"""Text in, text out: the checkpoint's own tokenizer, and text as it grows token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitnest_format.errors import GenerationError

# Any of these is enough to build a tokenizer from.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# What a decoder writes for bytes that are not yet a whole character.
UNFINISHED = "\ufffd"

Message = Mapping[str, str]


class Tokenizer:
    """A tokenizer of transformers, read from the folder alone.

    Raises `GenerationError` naming the file that is missing or broken.
    """

    def __init__(self, folder: Path):
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise GenerationError(
                f"{folder.name}: no {TOKENIZER_FILES[0]}, so text cannot be read or written. Copy the tokenizer files "
                "of the source model into the folder, or give and take token ids."
            )
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        # A broken file surfaces as nearly any exception, some of them bare ones from compiled code.
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise GenerationError(
                f"{folder.name}: its tokenizer files cannot be read ({type(error).__name__}: {reason}). "
                "Copy them from the source model again."
            ) from error
        self.folder = folder

    @property
    def pretrained(self) -> Any:
        """transformers' tokenizer itself."""
        return self._tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def end_token_id(self) -> int | None:
        """The tokenizer's own end-of-text token."""
        token = self._tokenizer.eos_token_id
        return None if token is None else int(token)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with whatever the tokenizer puts in front of one."""
        return [int(token) for token in self._tokenizer(text, verbose=False)["input_ids"]]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, up to where the answer starts. Raises as `chat_text` does."""
        text = self.chat_text(messages, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(token) for token in ids]

    def chat_text(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a conversation; `options` are those of the template and of `apply_chat_template`.

        Raises `GenerationError` where there is no chat template or it refuses the messages.
        """
        if not self.has_chat_template:
            raise GenerationError(
                f"{self.folder.name}: the tokenizer has no chat template; give the prompt as plain text"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, **options
            )
        # Templates are programs of the model's author and raise what they like.
        except Exception as error:
            raise GenerationError(f"{self.folder.name}: the chat template refuses the messages: {error}") from error
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class GrowingText:
    """The text of a growing list of ids, cut before the first stop string.

    Tokens are looked at one by one, so that the result does not depend on how many arrive together. Where a stop
    string shows, `text` ends right before it, and `kept` counts the tokens that lie wholly inside that text; of several
    that show with the same token the one that starts first counts.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]):
        self.tokenizer = tokenizer
        self.stops = stops
        self.ids: list[int] = []
        self.text = ""
        self.kept: int | None = None
        self._given = 0
        # The length of the text after each token.
        self._ends: list[int] = []

    def add(self, token: int) -> bool:
        """Take one token; True where it completes a stop string."""
        self.ids.append(token)
        self.text = self.tokenizer.decode(self.ids)
        self._ends.append(len(self.text))
        starts = [start for start in map(self.text.find, self.stops) if start >= 0]
        if not starts:
            return False
        self.text = self.text[: min(starts)]
        self.kept = self._whole_tokens()
        return True

    def fresh(self, *, final: bool) -> str:
        """Text that has not been given out yet and cannot change any more; all of it where it is `final`."""
        stop = len(self.text)
        if not final:
            stop = len(self.text.rstrip(UNFINISHED))
            stop -= _overlap(self.text[:stop], self.stops)
        piece = self.text[self._given : stop]
        self._given = max(self._given, stop)
        return piece

    def _whole_tokens(self) -> int:
        count = len(self.ids)
        while count and (self._ends[count - 1] > len(self.text) or not self._is_prefix(count)):
            count -= 1
        return count

    def _is_prefix(self, count: int) -> bool:
        return self.text.startswith(self.tokenizer.decode(self.ids[:count]))


def _overlap(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of `text` that some stop string begins with."""
    longest = max(map(len, stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
