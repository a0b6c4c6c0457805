"""Text from tokens: stop strings, pieces that are certain, and what a missing tokenizer says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bitnest_format.errors import GenerationError
from bitnest_format.runtime.tokenizer import GrowingText, Tokenizer


class Pieces:
    """A tokenizer whose token i decodes to the i-th piece."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in ids)


class Bytes:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def _grow(stops: Sequence[str], *pieces: str) -> GrowingText:
    text = GrowingText(Pieces(*pieces), stops)  # type: ignore[arg-type]
    for token in range(len(pieces)):
        if text.add(token):
            break
    return text


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "kept"),
    [
        (["XY"], list("abcXYdef"), "abc", 3),
        (["XY"], ["ab", "cX", "Yd"], "abc", 1),
        (["XY"], ["ab", "c", "XYd"], "abc", 2),
        (["cXYd"], ["ab", "cX", "Yde"], "ab", 1),
        (["XY"], ["XY"], "", 0),
        (["XY", "c"], list("abcXY"), "ab", 2),
        (["XYZ", "Y"], list("aXYZ"), "aX", 2),
        (["XYZ", "Y"], ["a", "XYZ"], "a", 1),
        (["bc", "abcd"], ["ab", "cd"], "", 0),
        (["zz"], list("abc"), "abc", None),
    ],
)
def test_text_ends_before_the_stop(stops: list[str], pieces: list[str], text: str, kept: int | None) -> None:
    grown = _grow(stops, *pieces)
    assert (grown.text, grown.kept) == (text, kept)


def test_pieces_hold_back_what_may_become_a_stop() -> None:
    text = GrowingText(Pieces("a", "X", "b", "X", "Y"), ["XYZ"])  # type: ignore[arg-type]
    given = []
    for token in range(5):
        text.add(token)
        given.append(text.fresh(final=token == 4))
    assert given == ["a", "", "Xb", "", "XY"]


def test_pieces_hold_back_unfinished_characters() -> None:
    text = GrowingText(Bytes(), [])  # type: ignore[arg-type]
    given = []
    for byte in "né€".encode():
        text.add(byte)
        given.append(text.fresh(final=False))
    assert given == ["n", "", "é", "", "", "€"]


def test_an_unfinished_character_at_the_end_is_given_in_the_end() -> None:
    text = GrowingText(Bytes(), [])  # type: ignore[arg-type]
    text.add("é".encode()[0])
    assert text.fresh(final=False) == ""
    assert text.fresh(final=True) == "\ufffd"


def test_round_trip(tmp_path: Path, toy_tokenizer: Callable[..., None], toy_ids_of: Callable[[str], list[int]]) -> None:
    toy_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("abc XY") == toy_ids_of("abc XY")
    assert tokenizer.decode([*toy_ids_of("abc XY"), 2]) == "abc XY"
    assert tokenizer.end_token_id == 2


def test_a_chat_template_and_its_absence(tmp_path: Path, toy_tokenizer: Callable[..., None]) -> None:
    toy_tokenizer(tmp_path)
    with pytest.raises(GenerationError) as error:
        Tokenizer(tmp_path).encode_chat([{"role": "user", "content": "hi"}])
    assert str(error.value) == (f"{tmp_path.name}: the tokenizer has no chat template; give the prompt as plain text")
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{{ raise_exception('no') if messages[0]['role'] == 'system' }}:"
    )
    toy_tokenizer(tmp_path, template=template)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "<user>hi:"
    with pytest.raises(GenerationError, match="the chat template refuses the messages: no"):
        tokenizer.encode_chat([{"role": "system", "content": "hi"}])


def test_a_missing_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(GenerationError) as error:
        Tokenizer(tmp_path)
    assert str(error.value) == (
        f"{tmp_path.name}: no tokenizer.json, so text cannot be read or written. Copy the tokenizer files "
        "of the source model into the folder, or give and take token ids."
    )


def test_a_broken_tokenizer_is_one_sentence(tmp_path: Path, toy_tokenizer: Callable[..., None]) -> None:
    toy_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(GenerationError, match="its tokenizer files cannot be read"):
        Tokenizer(tmp_path)
