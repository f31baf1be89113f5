#!/usr/bin/env python3
"""Writes small random models with the logits that transformers computes for them.

    make_reference.py OUTPUT_FOLDER [NAME...]

Needs torch and transformers; uses a GPU if there is one. For each model OUTPUT_FOLDER/NAME gets
config.json and model.safetensors (bfloat16), tokens.bin (int32), logits_fp32.bin and
logits_bf16.bin (float32, [tokens, vocabulary]): the same weights run in either precision, so that
the second tells how far bfloat16 alone is from the first. The seed is fixed.
"""

import json
import os
import sys

import torch
import transformers
from safetensors.torch import save_file

TOKENS = 300

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1003, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "torch_dtype": "bfloat16",
}

MODELS = {
    "llama3": LLAMA | {
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "llama-linear-biases": LLAMA | {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "attention_bias": True,
        "mlp_bias": True, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128},
    "llama-gqa8-128": LLAMA | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
    "qwen2": LLAMA | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 448,
        "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64,
        "tie_word_embeddings": True},
    "mistral-window": LLAMA | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 72},
    "smollm2-shape": LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "rope_theta": 100000.0, "tie_word_embeddings": True},
}


def initialise(model):
    """Weights at which every part of the model matters; all exact in bfloat16."""
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape)
        if name.endswith("bias"):
            values *= 0.2
        elif parameter.dim() == 1:
            values = 1 + 0.1 * values
        elif "embed_tokens" not in name or model.config.tie_word_embeddings:
            values /= parameter.shape[1] ** 0.5
        parameter.data.copy_(values.bfloat16())


def logits(model, tokens):
    with torch.inference_mode():
        return model(tokens.unsqueeze(0)).logits[0].float().cpu()


def make(folder, config):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file, indent=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parsed = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
    initialise(model)
    tokens = torch.randint(0, config["vocab_size"], (TOKENS,))
    weights = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    model.eval().to(device)
    tokens.to(torch.int32).numpy().tofile(os.path.join(folder, "tokens.bin"))
    tokens = tokens.to(device)
    exact = logits(model, tokens)
    # A new model and not model.bfloat16(), which would round the rotary frequencies as well.
    rounded_model = transformers.AutoModelForCausalLM.from_config(parsed, dtype=torch.bfloat16)
    rounded_model.load_state_dict(weights, strict=not config["tie_word_embeddings"])
    rounded = logits(rounded_model.eval().to(device), tokens)
    exact.numpy().tofile(os.path.join(folder, "logits_fp32.bin"))
    rounded.numpy().tofile(os.path.join(folder, "logits_bf16.bin"))
    error = (exact - rounded).abs()
    print(f"{os.path.basename(folder)}: logits of deviation {exact.std():.3f}, bfloat16 is off by "
          f"{error.mean():.5f} on average and {error.max():.4f} at most")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in sys.argv[2:] or MODELS:
        make(os.path.join(sys.argv[1], name), MODELS[name])


if __name__ == "__main__":
    main()
