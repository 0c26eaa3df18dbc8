"""Prompts of every kind, chat templates, stop tokens, and streaming that never shows half of a character."""

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dflax import text
from dflax.errors import DflaxError

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}<s>{{ m['content'] }}"
    "{% endfor %}{% if enable_thinking is defined %}{{ 'think' if enable_thinking else 'quick' }}{% endif %}"
)


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, <s> = 256 first, </s> = 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    inner.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 256)])
    out = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    out.chat_template = TEMPLATE
    return out


def sentence_piece() -> PreTrainedTokenizerFast:
    """A decoder like Llama 2's: ▁ for spaces, bytes as <0xNN>, the first space dropped."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁a": 256, "b": 257, "▁": 258}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("<x>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


def test_a_prompt_of_each_kind(tokenizer):
    hello = tokenizer.encode("hi", add_special_tokens=False)
    assert text.encode(tokenizer, "hi") == [256, *hello]
    assert text.encode(tokenizer, hello) == hello
    assert text.encode(None, np.array([1, 2]).tolist()) == [1, 2]
    assert text.encode(None, [np.int32(7), 8]) == [7, 8]
    chat = [{"role": "user", "content": "hi"}]
    assert text.encode(tokenizer, chat) == [256, *hello]  # the template wrote <s>, so it is not added again
    quick = tokenizer.encode("quick", add_special_tokens=False)
    assert text.encode(tokenizer, chat, enable_thinking=False) == [256, *hello, *quick]
    assert text.render_chat(tokenizer, chat, True) == "<s>hithink"
    assert text.encode_all(tokenizer, ["hi", chat, [3]]) == [[256, *hello], [256, *hello], [3]]


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ([], "prompt is empty"),
        ([1.5], "holds 1.5, which is no integer"),
        ([True], "holds True"),
        (7, "must be text, a list of token ids or a list of chat messages, not int"),
        (b"x", "not bytes"),
        ([258], "token id 258 of the prompt is outside the vocabulary of 258"),
        ([-1], "token id -1"),
        ([{"role": "user"}], "a chat message must be"),
        ([{"role": "robot", "content": "x"}], "the chat template refuses the messages: no robots"),
    ],
)
def test_bad_prompts(tokenizer, prompt, complaint):
    with pytest.raises(DflaxError, match=complaint) as caught:
        text.encode(tokenizer, prompt, vocab_size=258)
    assert "\n" not in str(caught.value)
    with pytest.raises(DflaxError, match=r"^prompt 1: "):
        text.encode_all(tokenizer, ["fine", prompt], vocab_size=258)


def test_text_needs_a_tokenizer_and_chats_a_template():
    with pytest.raises(DflaxError, match="no tokenizer"):
        text.encode(None, "hi")
    with pytest.raises(DflaxError, match="no chat template"):
        text.encode(sentence_piece(), [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("prompts", ["hi", [], [1, 2], [{"role": "user", "content": "x"}]])
def test_one_prompt_is_not_a_list_of_prompts(tokenizer, prompts):
    with pytest.raises(DflaxError, match="prompts must be a list"):
        text.encode_all(tokenizer, prompts)


def test_stop_tokens_are_the_union(tokenizer):
    assert text.stop_token_ids({"eos_token_id": 5}, {"eos_token_id": [9, 5]}, tokenizer) == (5, 9, 257)
    assert text.stop_token_ids({}, {}, None) == ()


def test_the_end_of_a_turn_is_an_end_where_the_tokenizer_has_it(tokenizer):
    assert text.turn_end_ids(tokenizer) == text.turn_end_ids(None) == ()
    llada = byte_level()
    llada.add_special_tokens({"additional_special_tokens": ["<|other|>", "<|eot_id|>"]})
    assert text.turn_end_ids(llada) == (259,)


def test_tokenizer_of_a_folder(tmp_path, tokenizer):
    assert text.load_tokenizer(tmp_path) is None
    tokenizer.save_pretrained(tmp_path)
    loaded = text.load_tokenizer(tmp_path)
    assert loaded.encode("hi") == tokenizer.encode("hi")
    assert text.render_chat(loaded, [{"role": "user", "content": "hi"}]) == "<s>hi"
    with open(tmp_path / "tokenizer.json", "r+b") as file:
        file.truncate(os.path.getsize(tmp_path / "tokenizer.json") // 2)
    with pytest.raises(DflaxError, match="cannot load the tokenizer in") as caught:
        text.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_the_code_of_a_checkpoint_is_neither_run_nor_asked_about(tmp_path, tokenizer, where, monkeypatch):
    tokenizer.save_pretrained(tmp_path)
    named = {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoTokenizer": ["tokenization_dream.DreamTokenizer", None],
    }
    path = tmp_path / where
    kept = json.loads(path.read_text()) if path.is_file() else {"model_type": "llada"}
    path.write_text(json.dumps(kept | {"auto_map": named}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    assert text.load_tokenizer(tmp_path).encode("hi") == tokenizer.encode("hi")


def test_vocabulary_and_merges_as_dream_has_them(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "he", "llo"])} | {"<|mask|>": 258}
    (tmp_path / "vocab.json").write_text(json.dumps({**vocab, "ll": 259}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\nl l\nll o\n")
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}, "tokenizer_class": "DreamTokenizer",
        "mask_token": "<|mask|>", "chat_template": TEMPLATE,
        "added_tokens_decoder": {"258": {"content": "<|mask|>", "special": True}},
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = text.load_tokenizer(tmp_path)
    assert loaded.encode("hello<|mask|>") == [256, 257, 258]
    assert text.render_chat(loaded, [{"role": "user", "content": "hi"}]) == "<s>hi"


def stream(tokenizer, ids, sizes):
    detokenizer, pieces, at = text.Detokenizer(tokenizer), [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[at : at + size]))
        at += size
    pieces.append(detokenizer.push(ids[at:]))
    return pieces, detokenizer.flush()


BYTE_LEVEL, SENTENCE_PIECE = byte_level(), sentence_piece()


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="aé日🙂 \n", max_size=12), st.lists(st.integers(1, 4), max_size=12))
def test_streamed_text_is_whole_at_every_moment(written, sizes):
    ids = BYTE_LEVEL.encode(written, add_special_tokens=False)
    pieces, rest = stream(BYTE_LEVEL, ids, sizes)
    assert "".join(pieces) == written
    assert rest == ""
    assert not any(text.REPLACEMENT in piece for piece in pieces)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 257), max_size=16), st.lists(st.integers(1, 4), max_size=16))
def test_any_tokens_stream_to_what_decoding_them_gives(ids, sizes):
    """Bytes that are no UTF-8 included."""
    pieces, rest = stream(BYTE_LEVEL, ids, sizes)
    assert "".join(pieces) + rest == text.decode(BYTE_LEVEL, ids)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([(256,), (257,), (258,), (259,), tuple("🙂".encode()), tuple("é".encode())]), max_size=8)
)
def test_sentence_piece_keeps_its_spaces_and_bytes(parts):
    ids = [i for part in parts for i in part]
    pieces, rest = stream(SENTENCE_PIECE, ids, [1] * len(ids))
    assert "".join(pieces) + rest == text.decode(SENTENCE_PIECE, ids)
    assert not any(text.REPLACEMENT in piece for piece in pieces)


def test_a_character_goes_out_with_its_last_byte_and_what_came_before_at_once():
    ids = BYTE_LEVEL.encode("a🙂b", add_special_tokens=False)
    detokenizer = text.Detokenizer(BYTE_LEVEL)
    assert [detokenizer.push(ids[:3]), detokenizer.push(ids[3:4]), detokenizer.push(ids[4:])] == ["a", "", "🙂b"]
    detokenizer.push(ids[1:3])
    assert detokenizer.flush() == text.REPLACEMENT


def test_bytes_that_never_become_a_character_do_not_stop_the_stream():
    detokenizer = text.Detokenizer(SENTENCE_PIECE)
    assert detokenizer.push("🙂".encode()) == "🙂"
    assert detokenizer.push([0xF0]) == ""
    assert detokenizer.push([257]).endswith("b")
    assert detokenizer.push([257, 257]) == "bb"
