"""GGUF: names, row order, quantization, config and tokenizer, on small files written here by the gguf package."""

import re
from pathlib import Path

import gguf as official
import numpy as np
import pytest

from dflax import families
from dflax.checkpoint import fill, gguf
from dflax.checkpoint.gguf_file import open_gguf
from dflax.errors import DflaxError

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEED, VOCAB, LAYERS = 4, 2, 8, 32, 64, 300, 2
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}{% if enable_thinking %}<think>{% endif %}"
)


def byte_tokens() -> list[str]:
    """The 256 tokens of byte-level BPE: printable bytes are themselves, the others move past 255 (GPT-2's table)."""
    rest = [b for b in range(256) if b not in BYTES]
    table = {b: chr(b) for b in BYTES} | {b: chr(256 + n) for n, b in enumerate(rest)}
    return [table[b] for b in range(256)]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows: half-split RoPE order to interleaved."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def hf_tensors(bias: bool = False, norms: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    out = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": draw(HIDDEN)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        out |= {f"{at}.{norm}.weight": draw(HIDDEN) for norm in ("input_layernorm", "post_attention_layernorm")}
        out |= {f"{at}.self_attn.{p}_proj.weight": draw(n, HIDDEN) for p, n in (("q", q), ("k", kv), ("v", kv))}
        out |= {f"{at}.self_attn.o_proj.weight": draw(HIDDEN, q), f"{at}.mlp.down_proj.weight": draw(HIDDEN, FEED)}
        out |= {f"{at}.mlp.{p}_proj.weight": draw(FEED, HIDDEN) for p in ("gate", "up")}
        if bias:
            out |= {f"{at}.self_attn.{p}_proj.bias": draw(n) for p, n in (("q", q), ("k", kv), ("v", kv))}
        if norms:
            out |= {f"{at}.self_attn.{p}_norm.weight": draw(HEAD_DIM) for p in "qk"}
    return out


def write(
    path: Path, architecture: str = "llama", kind: str = "F32", pre: str = "smollm", **changes
) -> dict[str, np.ndarray]:
    """A tiny model as llama.cpp's converter would write it; returns the tensors that a reader must find."""
    tensors = hf_tensors(bias=architecture == "qwen2", norms=architecture == "qwen3")
    writer = official.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if changes.get("yarn"):
        writer.add_rope_scaling_type(official.RopeScalingType.YARN)
    if changes.get("linear"):
        writer.add_rope_scaling_type(official.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    for key, value in changes.get("numbers", {}).items():
        writer.add_float32(f"{architecture}.{key}", value)
    tokens = [*byte_tokens(), "he", "hel", "<|end|>", "<|user|>", "<think>"]
    tokens += [f"unused{i}" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3, 3, 4] + [1] * (VOCAB - 261))
    writer.add_token_merges(["h e", "he l"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(258)
    writer.add_pad_token_id(258)
    writer.add_add_bos_token(changes.get("add_bos", False))
    writer.add_chat_template(TEMPLATE)
    back = {v: k for k, v in gguf.TOP.items()}
    inner = {v: k for k, v in gguf.LAYER.items()}
    quant = official.GGMLQuantizationType[kind]
    found = {}
    for name, values in tensors.items():
        part, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", part)
        place = f"blk.{layer[1]}.{inner[layer[2]]}.{suffix}" if layer else f"{back[part]}.{suffix}"
        found[name] = values
        if values.ndim == 2 and kind != "F32":
            packed = official.quants.quantize(values, quant)
            found[name] = official.quants.dequantize(packed, quant)
        if architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            values = interleave(values, HEADS if ".q_proj." in name else KV_HEADS)
        if values.ndim == 2 and kind != "F32":
            writer.add_tensor(place, official.quants.quantize(values, quant), raw_dtype=quant)
        else:
            writer.add_tensor(place, values)
    if "rope_freqs" in changes:
        writer.add_tensor("rope_freqs.weight", changes["rope_freqs"])
    for name in changes.get("extra", ()):
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_every_tensor_under_its_hugging_face_name(tmp_path, architecture, kind):
    wanted = write(tmp_path / "m.gguf", architecture, kind)
    source = gguf.GGUFSource(tmp_path / "m.gguf")
    assert source.names() == sorted(wanted)
    for name, values in wanted.items():
        assert source.shape(name) == values.shape
        got = source.read(name)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, values, err_msg=name)
    part = source.read("model.layers.1.self_attn.q_proj.weight", (slice(3, 9), slice(0, 5)))
    np.testing.assert_array_equal(part, wanted["model.layers.1.self_attn.q_proj.weight"][3:9, :5])
    source.close()
    np.testing.assert_array_equal(got, values)  # what was read outlives the file


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_config_and_rules_meet_the_file(tmp_path, architecture):
    wanted = write(tmp_path / "m.gguf", architecture)
    config = families.parse(gguf.config(tmp_path / "m.gguf"))
    assert (config.family, config.hidden_size, config.num_layers) == (architecture, HIDDEN, LAYERS)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (config.vocab_size, config.max_positions, config.rms_norm_eps) == (VOCAB, 128, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (258,)
    rules = families.tensor_rules(config)
    shapes = {path: wanted[rule.names[0]].shape for path, rule in rules.items()}
    leaves = fill(shapes, rules, gguf.GGUFSource(tmp_path / "m.gguf"), "bfloat16")
    assert len(leaves) == len(wanted)


def test_an_output_tensor_unties_the_head(tmp_path):
    write(tmp_path / "m.gguf", extra=["output.weight"])
    assert gguf.config(tmp_path / "m.gguf")["tie_word_embeddings"] is False
    assert "lm_head.weight" in gguf.GGUFSource(tmp_path / "m.gguf").names()


def test_rope_scaling(tmp_path):
    write(tmp_path / "linear.gguf", linear=True)
    assert gguf.config(tmp_path / "linear.gguf")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    for key in ("rope.scaling.factor", "rope.scale_linear"):  # without a type llama.cpp takes it for linear
        write(tmp_path / "bare.gguf", numbers={key: 4.0})
        assert gguf.config(tmp_path / "bare.gguf")["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    write(tmp_path / "one.gguf", numbers={"rope.scale_linear": 1.0})
    assert gguf.config(tmp_path / "one.gguf")["rope_scaling"] is None
    # The divisors of Llama 3.1's rule for head width 8 and theta 1e4, by hand: waves of 6.3, 63, 628 and 6283 positions,
    # so 8192 positions hold 1304, 130, 13 and 1.30 turns; more than 4 turns keep their speed, 1.30 is between.
    smooth = (8192 / (2 * np.pi * 1000) - 1) / 3
    divisors = np.array([1, 1, 1, 1 / ((1 - smooth) / 8 + smooth)], np.float32)
    write(tmp_path / "no.gguf", rope_freqs=divisors * np.float32(1.1))
    with pytest.raises(DflaxError, match="not the scaling of Llama"):
        gguf.config(tmp_path / "no.gguf")
    write(tmp_path / "yarn.gguf", yarn=True)
    with pytest.raises(DflaxError, match=r"llama\.rope\.scaling\.type is 'yarn'"):
        gguf.config(tmp_path / "yarn.gguf")


def test_a_key_that_nobody_reads_is_refused_unless_it_is_off(tmp_path):
    write(tmp_path / "m.gguf", numbers={"attention.scale": 0.5})
    with pytest.raises(DflaxError, match=r"llama\.attention\.scale is 0\.5; dflax does not know this key"):
        gguf.config(tmp_path / "m.gguf")
    write(tmp_path / "m.gguf", numbers={"attention.scale": 0.0, "vocab_size": 9.0})
    gguf.config(tmp_path / "m.gguf")


def test_llama3_divisors_are_those_of_the_rule():
    divisors = gguf._llama3_divisors({"factor": 8.0, **gguf.LLAMA3}, 500000.0, 128)
    turns = 8192 / (2 * np.pi * 500000.0 ** (np.arange(64) / 64))
    np.testing.assert_array_equal(divisors[turns > 4], 1)
    np.testing.assert_array_equal(divisors[turns < 1], 8)
    assert np.all(np.diff(divisors) >= 0)


def test_unknown_architecture_tensor_and_tokenizer_are_refused_by_name(tmp_path):
    write(tmp_path / "gemma.gguf", "gemma")
    with pytest.raises(DflaxError, match="architecture is 'gemma'; dflax supports llama, qwen2, qwen3"):
        gguf.GGUFSource(tmp_path / "gemma.gguf")
    write(tmp_path / "extra.gguf", extra=["blk.0.attn_sinks.weight"])
    with pytest.raises(DflaxError, match=r"tensor blk\.0\.attn_sinks\.weight has no counterpart"):
        gguf.GGUFSource(tmp_path / "extra.gguf")
    write(tmp_path / "spm.gguf", model="llama")
    with pytest.raises(DflaxError, match=r"tokenizer\.ggml\.model is 'llama'"):
        gguf.tokenizer(tmp_path / "spm.gguf")
    write(tmp_path / "pre.gguf", pre="tekken")
    with pytest.raises(DflaxError, match=r"tokenizer\.ggml\.pre is 'tekken'; dflax supports gpt-2, smollm"):
        gguf.tokenizer(tmp_path / "pre.gguf")


def test_damage_is_told_in_one_line(tmp_path):
    path = tmp_path / "m.gguf"
    write(path)
    whole = path.read_bytes()
    with pytest.raises(DflaxError, match="cannot read"):
        gguf.config(tmp_path / "nowhere.gguf")
    header = whole.index(b"blk.1.attn_norm")
    for cut in (0, 3, 10, 200, 5000, header):
        path.write_bytes(whole[:cut])
        with pytest.raises(DflaxError, match=r"cannot read|truncated|no GGUF"):
            open_gguf(path)
    path.write_bytes(whole[:-40])
    with pytest.raises(DflaxError, match=r"is truncated: .* ends \d+ bytes after the file does"):
        gguf.GGUFSource(path)
    path.write_bytes(b"GGUF" + b"\x00\x00\x00\x03" + whole[8:])
    with pytest.raises(DflaxError, match="big endian"):
        open_gguf(path)


def test_without_the_gguf_package_the_error_names_it(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf")
    gguf._package.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "gguf.constants", None)
    with pytest.raises(DflaxError, match="pip install gguf"):
        gguf.GGUFSource(tmp_path / "m.gguf")
    gguf._package.cache_clear()


def test_tokenizer_merges_specials_and_template(tmp_path):
    write(tmp_path / "m.gguf")
    tokenizer = gguf.tokenizer(tmp_path / "m.gguf")
    ids = tokenizer.encode("hello<|end|>")
    assert ids == [257, ord("l") - 33 + tokenizer.convert_tokens_to_ids("!"), tokenizer.convert_tokens_to_ids("o"), 258]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, 258, 258)
    for text in ("héllo  wörld\n\n  12345 ", "日本語🙂", "tabs\tand\r\nlines"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([258, 260], skip_special_tokens=True) == "<think>"  # user-defined, so not special
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>hi"
    assert tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=True) == "<|user|>hi<think>"


def words(tokenizer, text: str) -> list[str]:
    parts = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in parts]


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", " now", "!", "\n\n"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " now", "!", "\n\n"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", " now", "!\n\n"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", " now", "!\n\n"]),
    ],
)
def test_pre_tokenizers_cut_as_the_models_do(tmp_path, pre, wanted):
    write(tmp_path / "m.gguf", pre=pre)
    assert words(gguf.tokenizer(tmp_path / "m.gguf"), "I'll pay 12345 now!\n\n") == wanted


def test_begin_token_where_the_file_asks_for_it(tmp_path):
    write(tmp_path / "m.gguf", add_bos=True)
    tokenizer = gguf.tokenizer(tmp_path / "m.gguf")
    assert tokenizer.encode("h")[0] == 258
    assert tokenizer.encode("h", add_special_tokens=False)[0] != 258
