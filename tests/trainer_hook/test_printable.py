"""Untrusted text is shown, and does nothing."""

import json
import unicodedata

import pytest

from trainer_hook.printable import printable, printable_json

ACTING = "\x00\x07\x08\t\n\r\x1b\x7f\x85\x9b\u061c\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069\ufeff"
ACTING += "\U000e0041\ud800"


def test_characters_that_act_are_written_as_escapes() -> None:
    for character in ACTING:
        shown = printable(f"a{character}b")
        assert shown.isascii()
        assert shown.isprintable()
        assert shown == f"a{character.encode('unicode_escape').decode()}b"


def test_every_control_character_of_unicode_acts() -> None:
    controls = [
        chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")
    ]
    directions = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    controls += [chr(code) for code in range(0x110000) if unicodedata.bidirectional(chr(code)) in directions]
    assert not [character for character in controls if printable(character) == character]


@pytest.mark.parametrize("text", ["plain", "Grüße, 你好, שלום, ไทย", "👩\u200d🔬", "C:\\new", "", "a\u00a0b"])
def test_what_can_be_seen_stays(text: str) -> None:
    assert printable(text) == text


def test_lines_may_be_kept() -> None:
    assert printable("a\n\tb\r\n\x1b[2J", lines=True) == "a\n\tb\\r\n\\x1b[2J"


def test_json_keeps_its_meaning() -> None:
    text = json.dumps({"answer": ACTING}, ensure_ascii=False)
    shown = printable_json(text)
    assert json.loads(shown) == {"answer": ACTING}
    assert shown.isascii()
