#!/usr/bin/env python3
"""Checks of a whole node on a GPU. Each finding is one JSON object a line, as in check_report.h.

The tests of a node (tests/node_test.cc, node_rotation_test.cc, chaos_test.cc) with their CUDA back-end, one finding a
test, and with models shared between two GPUs where there are two; then what only a GPU can show: how long
a worker takes to start and a stream for a token, with SmolLM2's shape through the whole engine (palctl
bench engine), and that no memory of the GPU is left taken when all processes have ended.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# In a bundle all programs are in bin/.
BUILT = {"node_test": "tests", "node_rotation_test": "tests", "chaos_test": "tests", "palctl": "tools/palctl"}
TESTS_TIMEOUT_S = 240
BENCH_TIMEOUT_S = 90
# The driver's own, which comes and goes.
LEFT_BEHIND_MIB = 64

failed = False


def say(check, ok, **more):
    global failed
    failed = failed or not ok
    print(json.dumps({"check": f"node.{check}", "ok": bool(ok), **more}), flush=True)


def program(name):
    packed = ROOT / "bin" / name
    return str(packed if packed.exists() else ROOT / "bazel-bin" / BUILT[name] / name)


def folder_of_runs(name):
    """Bazel's tests find programs below their folder of run files, those of a bundle beside them."""
    runfiles = pathlib.Path(program(name) + ".runfiles/palimpsest")
    return runfiles if runfiles.exists() else ROOT


def gpu_mebibytes():
    """Used on each GPU by everybody; None where nvidia-smi does not tell."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return [float(line) for line in out.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def run_tests(name, backend, scratch):
    out = scratch / f"{name}-{backend}.json"
    at = name if backend == "Cuda" else f"{name}.{backend}"
    try:
        done = subprocess.run(
            [program(name), f"--gtest_filter=*/{backend}", f"--gtest_output=json:{out}"],
            cwd=folder_of_runs(name), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TESTS_TIMEOUT_S, env={**os.environ, "TEST_TMPDIR": str(scratch)})
        end = f"exit status {done.returncode}: " + " / ".join(done.stdout.splitlines()[-4:])
    except (OSError, subprocess.TimeoutExpired) as error:
        end = str(error)
    if not out.exists():
        say(at, False, note=end)
        return
    for suite in json.loads(out.read_text())["testsuites"]:
        for test in suite["testsuite"]:
            said = " / ".join(f["failure"][:600] for f in test.get("failures", []))
            ran = test.get("result") == "COMPLETED"
            # A test that is skipped for want of a tool says so itself; without a GPU all would be.
            say(f"{at}.{test['name'].removesuffix('/' + backend)}", not said,
                value=float(test["time"].rstrip("s")), unit="s",
                **({"note": said} if said else {} if ran else {"note": "skipped"}))


def bench(scratch):
    out = scratch / "bench.json"
    try:
        done = subprocess.run(
            [program("palctl"), "bench", "engine", "--shape", "smollm2-135m", "--json", str(out),
             "--batches", "1,64", "--prompts", "128", "--long-batch", "0", "--rounds", "1",
             "--gemm-cache", str(scratch / "gemm"), "--no-vllm"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BENCH_TIMEOUT_S)
        end = " / ".join(done.stdout.splitlines()[-4:])
    except (OSError, subprocess.TimeoutExpired) as error:
        end = str(error)
    if not out.exists():
        say("bench", False, note=end)
        return
    found = json.loads(out.read_text())["palimpsest"]
    for what in ("serving", "resident", "first_token"):
        say(f"worker_start.{what}", True, value=found["start"][f"{what}_ms"], unit="ms",
            note="with the image in memory and algorithms in their file")
    for step in found["decode"]:
        say(f"decode_step.{step['batch']}", True, value=step["ms_step"], unit="ms",
            note="as a client of the worker sees it")


def main():
    before = gpu_mebibytes()
    with tempfile.TemporaryDirectory(prefix="palimpsest-") as folder:
        scratch = pathlib.Path(folder)
        for name in ("node_test", "node_rotation_test", "chaos_test"):
            run_tests(name, "Cuda", scratch)
            if before is not None and len(before) > 1:
                run_tests(name, "TwoGpus", scratch)
        bench(scratch)
    if before is not None:
        deadline = time.monotonic() + 5
        before = sum(before)
        while (after := sum(gpu_mebibytes())) > before + LEFT_BEHIND_MIB and time.monotonic() < deadline:
            time.sleep(0.2)
        say("no_memory_left_behind", after <= before + LEFT_BEHIND_MIB,
            note=f"{before:.0f} MiB before, {after:.0f} after")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
