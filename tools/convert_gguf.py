#!/usr/bin/env python3
"""Makes a Hugging Face model folder of a GGUF file of the Llama architecture.

Writes config.json, generation_config.json, model.safetensors (bf16, rounded to nearest even),
tokenizer.json and tokenizer_config.json. The folder appears under its name only when it is
complete. GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

# tokenizer.ggml.token_type
CONTROL, USER_DEFINED = 3, 4

# The splitting step before ByteLevel, by tokenizer.ggml.pre.
PRE_TOKENIZERS = {"smollm": {"type": "Digits", "individual_digits": True}}

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


class ConversionError(Exception):
    """The file is not one this script can convert; the text says why."""


class Metadata:
    """The key-value pairs of a GGUF file."""

    def __init__(self, reader):
        self._fields = reader.fields

    def get(self, key, default=None):
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key):
        value = self.get(key)
        if value is None:
            raise ConversionError(f"the GGUF file has no {key!r}")
        return value


def shortest_float(value):
    """The shortest decimal that reads back as the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def make_config(meta, tied):
    architecture = meta.require("general.architecture")
    if architecture != "llama":
        raise ConversionError(f"expected architecture 'llama', the file has {architecture!r}")
    heads = meta.require("llama.attention.head_count")
    hidden = meta.require("llama.embedding_length")
    head_dim = meta.get("llama.rope.dimension_count", hidden // heads)
    if meta.get("llama.rope.scaling.type", "none") != "none":
        raise ConversionError("rope scaling in a GGUF file is not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(meta.require("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": meta.require("llama.feed_forward_length"),
        "num_hidden_layers": meta.require("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": meta.require("llama.context_length"),
        "rms_norm_eps": shortest_float(meta.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest_float(meta.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }
    config.update(special_ids(meta))
    return config


def special_ids(meta):
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    ids = {hf: meta.get(f"tokenizer.ggml.{ggml}_token_id") for ggml, hf in names.items()}
    return {name: value for name, value in ids.items() if value is not None}


def make_tokenizer(meta):
    if meta.require("tokenizer.ggml.model") != "gpt2":
        raise ConversionError(
            f"expected a byte-level BPE tokenizer ('gpt2'), the file has "
            f"{meta.require('tokenizer.ggml.model')!r}")
    pre = meta.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ConversionError(
            f"unknown pre-tokenizer {pre!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}")
    tokens = meta.require("tokenizer.ggml.tokens")
    types = meta.require("tokenizer.ggml.token_type")
    added = []
    for token_id, (content, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (CONTROL, USER_DEFINED):
            continue
        added.append({
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": kind == USER_DEFINED,
            "special": kind == CONTROL,
        })
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [PRE_TOKENIZERS[pre], byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {content: token_id for token_id, content in enumerate(tokens)},
            "merges": meta.require("tokenizer.ggml.merges"),
        },
    }


def make_tokenizer_config(meta):
    tokens = meta.require("tokenizer.ggml.tokens")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": bool(meta.get("tokenizer.ggml.add_space_prefix", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.require("llama.context_length"),
    }
    for name, token_id in special_ids(meta).items():
        config[name.removesuffix("_id")] = tokens[token_id]
    template = meta.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config


def hf_name(name):
    """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_TENSORS:
        return f"model.layers.{int(parts[1])}.{LAYER_TENSORS[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in GLOBAL_TENSORS:
        return f"{GLOBAL_TENSORS[parts[0]]}.{parts[1]}"
    raise ConversionError(f"unexpected tensor {name!r}")


def unpermute(rows, heads):
    """Undoes the row order that GGUF uses for q and k (pairs of a rotation side by side)."""
    head_dim = rows.shape[0] // heads
    return rows.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def to_bf16(values):
    """float32 -> bfloat16 bits, rounded to nearest, ties to even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")


def hf_tensors(reader, config):
    """Yields (name, shape, function that gives the bf16 bits)."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            raise ConversionError("rope scaling in a GGUF file is not supported")
        shape = [int(n) for n in reversed(tensor.shape)]
        permuted = heads.get(tensor.name.split(".")[-2])

        def bits(tensor=tensor, shape=shape, permuted=permuted):
            values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            return to_bf16(unpermute(values, permuted) if permuted else values)

        yield hf_name(tensor.name), shape, bits


def write_safetensors(path, tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, _ in tensors:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for done, (_, _, bits) in enumerate(tensors, 1):
            bits().tofile(out)
            show_progress(done, len(tensors))
        out.flush()
        os.fsync(out.fileno())


def show_progress(done, total):
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r  weights: {done}/{total} tensors", end=end, file=sys.stderr, flush=True)


def write_json(path, value, **kwargs):
    with open(path, "w", encoding="utf-8") as out:
        json.dump(value, out, ensure_ascii=False, **kwargs)
        out.write("\n")


def convert(gguf_path, folder):
    reader = GGUFReader(gguf_path)
    meta = Metadata(reader)
    names = {tensor.name for tensor in reader.tensors}
    config = make_config(meta, tied="output.weight" not in names)
    tensors = sorted(hf_tensors(reader, config), key=lambda t: t[0])
    write_json(f"{folder}/config.json", config, indent=2)
    write_json(f"{folder}/generation_config.json", special_ids(meta), indent=2)
    write_json(f"{folder}/tokenizer.json", make_tokenizer(meta), indent=1)
    write_json(f"{folder}/tokenizer_config.json", make_tokenizer_config(meta), indent=2)
    write_safetensors(f"{folder}/model.safetensors", tensors)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", help="the GGUF file")
    parser.add_argument("folder", help="the folder to make; must not exist")
    args = parser.parse_args()
    folder = os.path.abspath(args.folder)
    if os.path.exists(folder):
        sys.exit(f"convert_gguf: {folder} exists already; remove it to convert again")
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    partial = tempfile.mkdtemp(prefix=".partial-", dir=os.path.dirname(folder))
    try:
        os.chmod(partial, 0o755)
        convert(args.gguf, partial)
        os.rename(partial, folder)
    except ConversionError as error:
        sys.exit(f"convert_gguf: {args.gguf}: {error}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    main()
