#!/usr/bin/env python3
"""Checks of the GPU runner alone: results against transformers, times against vLLM.

Runs gpu_check on one small model of each architecture, all at once, and gpu_bench on Llama-3-8B's shape.
Where torch and transformers are, the references are made here with long prompts
(tests/reference/make_reference.py --long); elsewhere they are those of tests/data/models. Each finding is
one JSON object a line, as in check_report.h. Limits of times are what vLLM 0.25.1 took on one H200.
"""

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
    script = ROOT / "tests/reference/make_reference.py"
    made = subprocess.run([sys.executable, str(script), "--long", str(folder)],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=CHECK_TIMEOUT_S, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if made.returncode != 0:
        say("reference", False, note=f"make_reference.py: {last_words(made.stdout)}")
    return sorted(folder.glob("*.json")) or kept


def check_models(models, scratch):
    running = []
    for model in models:
        out = scratch / f"{model.stem}.json"
        running.append((model.stem, out, subprocess.Popen(
            [program("gpu_check"), "--reference", str(model), "--out", str(out),
             "--gemm-cache", str(scratch / f"{model.stem}.gemm")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
    for name, out, process in running:
        try:
            said, _ = process.communicate(timeout=CHECK_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            said = f"no end within {CHECK_TIMEOUT_S} s"
        if not out.exists():
            say(name, False, note=last_words(said))
            continue
        for check, found in json.loads(out.read_text())["checks"].items():
            note = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                             for key, value in found.items() if key != "ok")
            say(f"{name}.{check}", found["ok"], note=note)


def bench(scratch):
    out = scratch / "bench.json"
    done = subprocess.run(
        [program("gpu_bench"), "--shape", "llama3-8b", "--out", str(out),
         "--gemm-cache", str(scratch / "bench.gemm"),
         "--batches", ",".join(map(str, STEP_LIMITS)),
         "--prompts", ",".join(map(str, FIRST_TOKEN_LIMITS))],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=CHECK_TIMEOUT_S)
    if done.returncode != 0 or not out.exists():
        say("bench", False, note=last_words(done.stdout))
        return
    result = json.loads(out.read_text())
    for step in result["decode"]:
        limit = STEP_LIMITS[step["batch"]]
        say(f"decode_step.{step['batch']}", step["ms_step"] <= limit, value=step["ms_step"], unit="ms",
            limit=limit)
    for first in result["first_token"]:
        limit = FIRST_TOKEN_LIMITS[first["tokens"]]
        say(f"first_token.{first['tokens']}", first["ms"] <= limit, value=first["ms"], unit="ms",
            limit=limit)


def main():
    with tempfile.TemporaryDirectory(prefix="palimpsest-") as folder:
        scratch = pathlib.Path(folder)
        models = scratch / "models"
        models.mkdir()
        check_models(references(models), scratch)
        bench(scratch)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
