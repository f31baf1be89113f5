#!/usr/bin/env python3
"""Checks of the GPU runner alone: results against transformers, times against vLLM.

Runs gpu_check on one small model of each architecture, all at once, some with KV in eight bits too, and
gpu_bench on Llama-3-8B's shape.
Where torch and transformers are, the references are made here with long prompts
(tests/reference/make_reference.py --long); elsewhere they are those of tests/data/models. Each finding is
one JSON object a line, as in check_report.h. Limits of times are what vLLM 0.25.1 took on one H200. With
two GPUs all this again for models shared between them, whose limits are the times of one.
"""

import concurrent.futures
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Milliseconds: of a decode step by batch size, to the first token by length of the prompt.
STEP_LIMITS = {1: 4.94, 8: 5.05, 32: 5.57, 128: 7.51, 256: 11.55}
FIRST_TOKEN_LIMITS = {128: 12.0, 512: 17.0, 2048: 50.8, 4000: 101.0}
CHECK_TIMEOUT_S = 150
# Models that are also checked with KV in e4m3: both widths of heads, norms, a window, many layers.
EIGHT_BIT_KV = ["llama3", "llama_biases", "qwen3", "mistral", "smollm2_shape"]

failed = False


def say(check, ok, **more):
    global failed
    failed = failed or not ok
    print(json.dumps({"check": f"engine.{check}", "ok": bool(ok), **more}), flush=True)


def program(name):
    packed = ROOT / "bin" / name
    return str(packed if packed.exists() else ROOT / "bazel-bin/worker/compute/cuda" / name)


def last_words(text):
    return " / ".join(text.strip().splitlines()[-3:])


def references(folder):
    """Files of reference models, made in `folder` if that is possible."""
    kept = sorted((ROOT / "tests/data/models").glob("*.json"))
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return kept
    eight_bits = folder / "eight_bits"
    eight_bits.mkdir()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for made in [pool.submit(make_references, eight_bits, ["--kv-dtype", "fp8_e4m3"], EIGHT_BIT_KV),
                     pool.submit(make_references, folder)]:
            made.result()
    for path in eight_bits.glob("*.json"):
        path.rename(folder / f"{path.stem}.fp8_kv.json")
    return sorted(folder.glob("*.json")) or kept


def make_references(folder, options=(), names=()):
    script = ROOT / "tests/reference/make_reference.py"
    made = subprocess.run([sys.executable, str(script), "--long", *options, str(folder), *names],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=CHECK_TIMEOUT_S, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if made.returncode != 0:
        say("reference", False, note=f"make_reference.py: {last_words(made.stdout)}")


def start_check(model, scratch, ranks):
    """gpu_check of a model: its name, the file it writes, its process."""
    name = model.stem if ranks == 1 else f"tp{ranks}.{model.stem}"
    out = scratch / f"{name}.json"
    return name, out, subprocess.Popen(
        [program("gpu_check"), "--reference", str(model), "--out", str(out), "--tp", str(ranks),
         "--gemm-cache", str(scratch / f"{name}.gemm")] + (["--short"] if ranks > 1 else []),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish_check(name, out, process):
    try:
        said, _ = process.communicate(timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        said = f"no end within {CHECK_TIMEOUT_S} s"
    if not out.exists():
        say(name, False, note=last_words(said))
        return
    for check, found in json.loads(out.read_text())["checks"].items():
        note = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                         for key, value in found.items() if key != "ok")
        say(f"{name}.{check}", found["ok"], note=note)


def check_models(models, scratch):
    for started in [start_check(model, scratch, 1) for model in models]:
        finish_check(*started)


def divides(model, ranks):
    config = json.loads(model.read_text())["config"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def check_on_two(models, scratch):
    """One after another: kernels of two GPUs wait for each other."""
    for model in models:
        if divides(model, 2):
            finish_check(*start_check(model, scratch, 2))
    out = scratch / "collectives.json"
    done = subprocess.run([program("gpu_bench"), "--collectives", "--out", str(out)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=CHECK_TIMEOUT_S)
    say("collectives", done.returncode == 0, note="" if out.exists() else last_words(done.stdout))


def bench(scratch, ranks, step_limits, first_token_limits):
    """Returns the times of decode steps and of first tokens."""
    name = "" if ranks == 1 else f"tp{ranks}."
    out = scratch / f"{name}bench.json"
    done = subprocess.run(
        [program("gpu_bench"), "--shape", "llama3-8b", "--out", str(out), "--tp", str(ranks),
         "--gemm-cache", str(scratch / f"{name}bench.gemm"),
         "--batches", ",".join(map(str, step_limits)),
         "--prompts", ",".join(map(str, first_token_limits))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CHECK_TIMEOUT_S)
    if done.returncode != 0 or not out.exists():
        say(f"{name}bench", False, note=last_words(done.stdout))
        return step_limits, first_token_limits
    result = json.loads(out.read_text())
    steps = {step["batch"]: step["ms_step"] for step in result["decode"]}
    firsts = {first["tokens"]: first["ms"] for first in result["first_token"]}
    for batch, ms in steps.items():
        say(f"{name}decode_step.{batch}", ms <= step_limits[batch], value=ms, unit="ms",
            limit=step_limits[batch])
    for tokens, ms in firsts.items():
        say(f"{name}first_token.{tokens}", ms <= first_token_limits[tokens], value=ms, unit="ms",
            limit=first_token_limits[tokens])
    return steps, firsts


def gpu_count():
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, timeout=30)
    return len(listed.stdout.splitlines())


def main():
    with tempfile.TemporaryDirectory(prefix="palimpsest-") as folder:
        scratch = pathlib.Path(folder)
        models = scratch / "models"
        models.mkdir()
        made = references(models)
        check_models(made, scratch)
        one_gpu = bench(scratch, 1, STEP_LIMITS, FIRST_TOKEN_LIMITS)
        if gpu_count() > 1:
            check_on_two(made, scratch)
            bench(scratch, 2, *one_gpu)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
