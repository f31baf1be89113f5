#!/usr/bin/env python3
"""Checks of a whole node on a GPU. Each finding is one JSON object a line, as in check_report.h.

The tests of a node (PROGRAMS, tests/*.cc) with their CUDA back-end, one finding a test, and with models shared
between two GPUs where there are two; then what only a GPU can show: how long a worker takes to start and a stream for
a token, with SmolLM2's shape through the whole engine (palctl bench engine), and that no memory of the GPU is left
taken when all processes have ended. Arguments name the parts to run; all of them without any. What ends says so at
once.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Tests, the seconds that a program may take, and the back-ends that it has.
PROGRAMS = {
    "node_test": (240, ("Cuda", "TwoGpus")),
    "turns_test": (120, ("Cuda",)),
    "hibernation_test": (90, ("Cuda",)),
    "blocks_test": (120, ("Cuda", "TwoGpus")),
    "node_rotation_test": (200, ("Cuda", "TwoGpus")),
    "chaos_test": (150, ("Cuda", "TwoGpus")),
}
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
    built = "tools/palctl" if name == "palctl" else "tests"
    return str(packed if packed.exists() else ROOT / "bazel-bin" / built / name)


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


RUNS = re.compile(r"\[ RUN +\] (\S+)")
ENDED = re.compile(r"\[ +(OK|FAILED|SKIPPED) +\] ([^\s,]+).*\((\d+) ms\)")


def follow(lines, at):
    """Says what each test came to as soon as it has; the one that had begun last and not ended, and what came after
    the last that had."""
    running, said = "", []
    for line in lines:
        begun_now, ended = RUNS.match(line), ENDED.match(line)
        if begun_now:
            running, said = begun_now.group(1), []
        elif ended and running == ended.group(2):
            how, name, milliseconds = ended.groups()
            test = name.removesuffix("/" + name.rsplit("/", 1)[-1]).rsplit(".", 1)[-1]
            # A test that is skipped for want of a tool says so itself; without a GPU all would be.
            note = {"FAILED": " / ".join(said)[:4000], "SKIPPED": "skipped"}.get(how)
            say(f"{at}.{test}", how != "FAILED", value=int(milliseconds) / 1000, unit="s",
                **({"note": note} if note is not None else {}))
            running, said = "", []
        else:
            said.append(line.rstrip())
    return running, said


def run_tests(name, backend, scratch):
    limit, _ = PROGRAMS[name]
    at = name if backend == "Cuda" else f"{name}.{backend}"
    try:
        tests = subprocess.Popen(
            [program(name), f"--gtest_filter=*/{backend}"], cwd=folder_of_runs(name), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "TEST_TMPDIR": str(scratch)})
    except OSError as error:
        say(at, False, note=str(error))
        return
    late = threading.Event()

    def stop():
        # With the processes that it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tests.pid, signal.SIGKILL)

    def stop_late():
        late.set()
        stop()

    watch = threading.Timer(limit, stop_late)
    watch.start()
    try:
        running, said = follow(tests.stdout, at)
        status = tests.wait()
    finally:
        watch.cancel()
        stop()
    if late.is_set():
        say(at, False, note=f"{name} did not end within {limit} s; in {running or 'no test'}: " + " / ".join(said[-4:]))
    elif status not in (0, 1) or running:
        say(at, False, note=f"{name} ended with {status} in {running or 'no test'}: " + " / ".join(said[-4:]))


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
    parts = sys.argv[1:] or [*PROGRAMS, "bench"]
    unknown = set(parts) - {*PROGRAMS, "bench"}
    if unknown:
        print(f"node_check: unknown: {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)} and bench",
              file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    before = gpu_mebibytes()
    with tempfile.TemporaryDirectory(prefix="palimpsest-") as folder:
        scratch = pathlib.Path(folder)
        for name in parts:
            if name == "bench":
                bench(scratch)
                continue
            for backend in PROGRAMS[name][1]:
                if backend == "Cuda" or (before is not None and len(before) > 1):
                    run_tests(name, backend, scratch)
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
