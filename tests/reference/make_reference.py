#!/usr/bin/env python3
"""Writes the reference logits of tests/data/models: small random models, run by transformers.

Needs torch, transformers and numpy. For each architecture a small config is filled with the weights
of `load_format: dummy` (worker/model/dummy_weights.h, implemented here a second time), run in
float32 on the CPU and in bfloat16 (on a GPU if there is one), and written as one JSON file:

  config         config.json as transformers writes it
  seed           of the weights
  tensors        name -> shape of every weight, and its first numbers as a check of the generator
  tokens         the prompt
  positions      rows of `logits`: positions whose next-token logits are given
  logits         float32, the whole vocabulary
  bf16_error     largest and mean difference of the bfloat16 logits from them, over those positions

With --long the prompts are longer, more positions are given, and there are more models; too much to
keep, for checks on the machine that computes it (tools/gpu_check/engine_check.py).

With --kv-dtype fp8_e4m3 both runs round keys (after rotation) and values to e4m3, as a cache of that
type would, and there is also what this does to them without anything else:

  kv_dtype       fp8_e4m3
  exact_logits   float32, nothing rounded
  kv_error       largest and mean difference of logits from them

Usage: make_reference.py [--long] [--kv-dtype TYPE] OUTPUT_FOLDER [NAME...]
"""
import argparse
import json
import pathlib
import sys
import traceback

import numpy
import torch
import transformers
from transformers import AutoModelForCausalLM

SEED = 20240607
TOKENS = 48
POSITIONS = [0, 6, 17, 30, 39, 47]
VOCAB = 320

LONG_TOKENS = 300
LONG_POSITIONS = range(5, LONG_TOKENS, 7)

# Heads are as wide as GPU kernels take them, all else is as narrow as it may be.
COMMON = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=256, num_hidden_layers=3,
              num_attention_heads=4, num_key_value_heads=2, head_dim=64,
              max_position_embeddings=512, rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2,
              pad_token_id=0)
LATENT = {k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}
LATENT.update(num_key_value_heads=4, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
              v_head_dim=128, first_k_dense_replace=3, n_routed_experts=4, n_group=1, topk_group=1,
              num_experts_per_tok=2, tie_word_embeddings=False)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, beta_fast=32, beta_slow=1,
            original_max_position_embeddings=24)
GEMMA2 = dict(COMMON, tie_word_embeddings=True, num_hidden_layers=4, query_pre_attn_scalar=24,
              attn_logit_softcapping=3.0, final_logit_softcapping=8.0, sliding_window=11)

CONFIGS = {
    "llama3": ("LlamaConfig", "LlamaForCausalLM", dict(
        COMMON, tie_word_embeddings=False, rope_parameters=dict(
            rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
            high_freq_factor=4.0, original_max_position_embeddings=32))),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", dict(
        COMMON, tie_word_embeddings=True, num_hidden_layers=4, num_attention_heads=28,
        num_key_value_heads=4, use_sliding_window=True, sliding_window=9, max_window_layers=2)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(
        COMMON, head_dim=128, tie_word_embeddings=False, rope_parameters=YARN)),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(
        COMMON, tie_word_embeddings=False, sliding_window=13)),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", dict(
        COMMON, head_dim=256, num_key_value_heads=1, tie_word_embeddings=True,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh")),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", dict(GEMMA2, head_dim=256)),
    "opt": ("OPTConfig", "OPTForCausalLM", dict(
        vocab_size=VOCAB, hidden_size=256, ffn_dim=256, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=512, word_embed_proj_dim=256, bos_token_id=2, eos_token_id=2,
        pad_token_id=1)),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", dict(
        LATENT, q_lora_rank=None, topk_method="greedy",
        rope_parameters=dict(YARN, mscale=0.707, mscale_all_dim=0.707))),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", dict(
        LATENT, q_lora_rank=64, num_mtp_layers=0,
        rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.5))),
}
LONG_CONFIGS = {
    "deepseek_v3_128_heads": ("DeepseekV3Config", "DeepseekV3ForCausalLM", dict(
        LATENT, num_attention_heads=128, num_key_value_heads=128, qk_nope_head_dim=64, v_head_dim=64,
        q_lora_rank=64, num_mtp_layers=0,
        rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=0.5))),
    "llama_biases": ("LlamaConfig", "LlamaForCausalLM", dict(
        COMMON, head_dim=128, num_attention_heads=8, num_key_value_heads=1, attention_bias=True,
        mlp_bias=True, tie_word_embeddings=False,
        rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0))),
    "gemma2_128": ("Gemma2Config", "Gemma2ForCausalLM", dict(GEMMA2, head_dim=128)),
    "smollm2_shape": ("LlamaConfig", "LlamaForCausalLM", dict(
        COMMON, vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=100000.0))),
}

MASK = (1 << 64) - 1


def mix(z):
    """SplitMix64's finalizer, of an int or of an array of uint64."""
    if isinstance(z, int):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        return z ^ (z >> 31)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return z ^ (z >> numpy.uint64(31))


def round_to_bf16(x):
    bits = numpy.asarray(x, dtype=numpy.float32).view(numpy.uint32)
    bits = (bits + numpy.uint32(0x7FFF) + (bits >> numpy.uint32(16) & numpy.uint32(1)))
    return (bits & numpy.uint32(0xFFFF0000)).view(numpy.float32)


def dummy_range(name, shape, norm_center):
    """Middle and half width of a tensor's numbers."""
    if len(shape) == 1:
        return (0.0 if name.endswith(".bias") else norm_center), 0.25
    if "embed_" in name:
        return 0.0, 0.25
    root = numpy.sqrt(numpy.float32(3.0) / numpy.float32(shape[1]))
    return 0.0, float(round_to_bf16(root.reshape(1))[0])


def dummy_tensor(seed, name, shape, norm_center):
    count = int(numpy.prod(shape))
    hashed = 0xCBF29CE484222325
    for byte in name.encode():
        hashed = (hashed ^ byte) * 0x100000001B3 & MASK
    key = mix((seed ^ mix(hashed)) & MASK)
    counters = numpy.arange((count + 3) // 4, dtype=numpy.uint64)
    words = mix(numpy.uint64(key) + counters * numpy.uint64(0x9E3779B97F4A7C15))
    lanes = words.astype("<u8").view("<i2")[:count].astype(numpy.float32)
    center, spread = dummy_range(name, shape, norm_center)
    scaled = numpy.float32(spread) * (lanes / numpy.float32(32768.0))
    return round_to_bf16(numpy.float32(center) + scaled).reshape(shape)


def build(config, dtype, norm_center):
    torch.set_default_dtype(dtype)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    finally:
        torch.set_default_dtype(torch.float32)
    tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = dummy_tensor(SEED, name, tuple(parameter.shape), norm_center)
            assert parameter.dtype == dtype, (name, parameter.dtype)
            parameter.copy_(torch.from_numpy(values.copy()))
            tensors[name] = {"shape": list(parameter.shape),
                             "first": [float(v) for v in values.reshape(-1)[:5]]}
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            assert buffer.dtype == torch.float32, (name, buffer.dtype)
    return model.eval(), tensors


class E4m3Cache(transformers.DynamicCache):
    """Gives back what an 8-bit cache would hold; too large numbers saturate."""

    def update(self, keys, values, *rest, **more):
        return super().update(self.rounded(keys), self.rounded(values), *rest, **more)

    @staticmethod
    def rounded(x):
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def difference(got, want):
    error = (got - want).abs()
    return {"max": float(error.max()), "mean": float(error.mean())}


def rows(logits):
    return [[round(float(v), 6) for v in row] for row in logits]


def reference(name, long, kv_dtype):
    config_class, architecture, settings = (CONFIGS | LONG_CONFIGS)[name]
    config = getattr(transformers, config_class)(**settings)
    config.architectures = [architecture]
    norm_center = 0.0 if name.startswith("gemma") else 1.0
    tokens = [mix(SEED + i) % config.vocab_size for i in range(LONG_TOKENS if long else TOKENS)]
    positions = list(LONG_POSITIONS) if long else POSITIONS
    if config.vocab_size > VOCAB:
        positions = positions[::8]
    exact, tensors = build(config, torch.float32, norm_center)
    rounded, _ = build(config, torch.bfloat16, norm_center)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rounded.to(device)
    ids = torch.tensor([tokens])
    eight_bits = kv_dtype == "fp8_e4m3"

    def run(model, ids, eight_bits):
        cache = {"past_key_values": E4m3Cache(), "use_cache": True} if eight_bits else {}
        with torch.no_grad():
            return model(ids, **cache).logits[0, positions].float().cpu()

    want = run(exact, ids, eight_bits)
    error = difference(run(rounded, ids.to(device), eight_bits), want)
    print(f"{name}: logits up to {want.abs().max():.3f}, deviation {want.std():.3f}, bf16 error "
          f"max {error['max']:.5f}, mean {error['mean']:.5f}", flush=True)
    more = {}
    if eight_bits:
        plain = run(exact, ids, False)
        more = {"kv_dtype": kv_dtype, "exact_logits": rows(plain),
                "kv_error": difference(want, plain)}
    return {
        "name": name,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, bfloat16 "
                     f"on {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}",
        "config": json.loads(config.to_json_string(use_diff=False)),
        "seed": SEED,
        "tensors": tensors,
        "tokens": tokens,
        "positions": positions,
        "logits": rows(want),
        "bf16_error": error,
    } | more


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--kv-dtype", choices=["bf16", "fp8_e4m3"], default="bf16")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.names or CONFIGS | (LONG_CONFIGS if arguments.long else {}):
        try:
            made = reference(name, arguments.long, arguments.kv_dtype)
        except Exception:  # the other architectures are still wanted
            traceback.print_exc()
            failed.append(name)
            continue
        text = json.dumps(made, separators=(",", ":")) + "\n"
        (arguments.folder / f"{name}.json").write_text(text)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
