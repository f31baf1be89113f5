#!/usr/bin/env python3
"""Decode time by batch size and time to the first token of vLLM on one GPU, beside gpu_bench.

Needs vLLM in a Python of your own. The model has the exact shape that gpu_bench measures and dummy
weights. Attention and sampling are vLLM's choice; the figures in docs/gpu were taken with

    VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 vllm_bench.py llama3-8b out.json
"""
import argparse
import json
import pathlib
import random
import tempfile
import time

from vllm import LLM, SamplingParams

COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}
SHAPES = {
    "llama3-8b": COMMON | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "rope_theta": 500000.0, "max_position_embeddings": 8192, "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "llama2-13b": COMMON | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32000,
        "rope_theta": 10000.0, "max_position_embeddings": 4096, "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
DECODE_TOKENS = 256


class Bench:
    def __init__(self, shape):
        self.vocabulary = SHAPES[shape]["vocab_size"]
        self.random = random.Random(0)
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
        self.llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
            max_model_len=4096, gpu_memory_utilization=0.9, enable_prefix_caching=False,
            max_num_seqs=512, disable_log_stats=True,
        )

    def seconds(self, batch, prompt_tokens, tokens):
        """Of one call that answers `batch` random prompts."""
        prompts = [
            {"prompt_token_ids": [self.random.randrange(10, self.vocabulary - 1000)
                                  for _ in range(prompt_tokens)]}
            for _ in range(batch)
        ]
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.monotonic()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.monotonic() - start

    def decode(self, batch):
        first = self.seconds(batch, 128, 1)
        step = (self.seconds(batch, 128, 1 + DECODE_TOKENS) - first) / DECODE_TOKENS
        return {"batch": batch, "ms_step": step * 1e3, "tokens_per_s": batch / step}

    def first_token(self, tokens):
        return {"tokens": tokens, "ms": min(self.seconds(1, tokens, 1) for _ in range(5)) * 1e3}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=pathlib.Path, help="file for the JSON")
    arguments = parser.parse_args()
    bench = Bench(arguments.shape)
    bench.seconds(4, 64, 8)
    result = {
        "shape": arguments.shape,
        "decode": [bench.decode(batch) for batch in (1, 8, 32, 128, 256)],
        "first_token": [bench.first_token(tokens) for tokens in (128, 512, 2048, 4000)],
    }
    text = json.dumps(result, indent=1)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
