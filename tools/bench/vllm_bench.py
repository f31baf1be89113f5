#!/usr/bin/env python3
"""What `palctl bench engine` measures, of vLLM: decode steps by batch size, first tokens, start.

Needs vLLM in this Python. The model is the folder's config.json with dummy weights. Time of a decode
step: what N more tokens add to the time of one, of a whole batch that is asked at once.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import time

# What the figures in docs/gpu were taken with; attention is vLLM's choice.
for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_DEEP_GEMM", "VLLM_ALLREDUCE_USE_SYMM_MEM"):
    os.environ.setdefault(name, "0")
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
    os.environ.setdefault(name, "1")

PROMPT = 128
LONG_CONTEXT_TOKENS = 64
FIRST_TOKEN_ROUNDS = 5


class Bench:
    def __init__(self, arguments):
        from vllm import LLM, SamplingParams
        self.params = SamplingParams
        self.random = random.Random(0)
        self.rounds = arguments.rounds
        config = json.loads((arguments.folder / "config.json").read_text())
        self.vocabulary = config["vocab_size"]
        longest = max([PROMPT + arguments.decode_tokens, arguments.long_prompt + LONG_CONTEXT_TOKENS,
                       *arguments.prompts])
        start = time.monotonic()
        self.llm = LLM(
            model=str(arguments.folder), load_format="dummy", skip_tokenizer_init=True,
            dtype="bfloat16", max_model_len=longest + 1, gpu_memory_utilization=0.9,
            enable_prefix_caching=False, max_num_seqs=512, disable_log_stats=True,
            tensor_parallel_size=arguments.gpus,
        )
        self.start_ms = (time.monotonic() - start) * 1e3

    def seconds(self, batch, prompt_tokens, tokens):
        """Of one call that answers `batch` random prompts."""
        prompts = [{"prompt_token_ids": [self.random.randrange(self.vocabulary)
                                         for _ in range(prompt_tokens)]} for _ in range(batch)]
        params = self.params(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True,
                             detokenize=False)
        start = time.monotonic()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.monotonic() - start

    def decode(self, batch, prompt_tokens, tokens, rounds):
        steps = []
        for _ in range(rounds):
            one = self.seconds(batch, prompt_tokens, 1)
            steps.append((self.seconds(batch, prompt_tokens, 1 + tokens) - one) / tokens * 1e3)
        step = statistics.median_high(steps)
        return {"batch": batch, "prompt_tokens": prompt_tokens, "ms_step": step,
                "ms_step_least": min(steps), "ms_step_most": max(steps),
                "tokens_per_s": batch * 1e3 / step}

    def first_token(self, tokens):
        times = [self.seconds(1, tokens, 1) * 1e3 for _ in range(FIRST_TOKEN_ROUNDS)]
        return {"tokens": tokens, "ms": min(times), "ms_median": statistics.median_high(times)}


def numbers(text):
    return [int(number) for number in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="holds config.json")
    parser.add_argument("out", type=pathlib.Path, help="file for the JSON")
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128, 256])
    parser.add_argument("--prompts", type=numbers, default=[128, 512, 2048, 4000])
    parser.add_argument("--decode-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-batch", type=int, default=32, help="0: none")
    parser.add_argument("--long-prompt", type=int, default=4000)
    parser.add_argument("--gpus", type=int, default=1)
    arguments = parser.parse_args()
    bench = Bench(arguments)
    import vllm
    bench.seconds(4, PROMPT, 32)
    result = {
        "version": vllm.__version__,
        "start_ms": bench.start_ms,
        "decode": [bench.decode(batch, PROMPT, arguments.decode_tokens, arguments.rounds)
                   for batch in arguments.batches],
        "first_token": [bench.first_token(tokens) for tokens in arguments.prompts],
    }
    if arguments.long_batch:
        result["long_context"] = bench.decode(arguments.long_batch, arguments.long_prompt,
                                              LONG_CONTEXT_TOKENS, 1)
    text = json.dumps(result, indent=1)
    arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
