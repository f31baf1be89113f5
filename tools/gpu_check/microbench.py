#!/usr/bin/env python3
"""Microbenchmarks of memory that moves, each as a ratio to what the machine can do at most, measured in the
same run. Each finding is one JSON object a line, as in check_report.h.

Mapping, granting, scrubbing and restoring slabs (microbench_main.cc); then a whole node, broker and two workers
with Llama-3-8B's shape, whose images do not fit together: how long a request to the one whose parameters were
all taken waits for its first token, beside copying that image over the link (palctl bench activation).
"""

import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILT = {"microbench": "tools/gpu_check", "palctl": "tools/palctl"}
MEMORY_TIMEOUT_S = 60
ACTIVATION_TIMEOUT_S = 150
# First token of an activation against the bytes of the image over the bandwidth of the link.
ACTIVATION_LIMIT = 1.15

failed = False


def say(check, ok, **more):
    global failed
    failed = failed or not ok
    print(json.dumps({"check": check, "ok": bool(ok), **more}), flush=True)


def program(name):
    packed = ROOT / "bin" / name
    return str(packed if packed.exists() else ROOT / "bazel-bin" / BUILT[name] / name)


def output_of(command, seconds):
    """(what it said, how it ended: empty if well)"""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds)
        return done.stdout, "" if done.returncode in (0, 1) else f"exit status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        said = getattr(error, "stdout", None) or ""
        return said.decode() if isinstance(said, bytes) else said, str(error)


def memory():
    """Findings of microbench; the link's bytes per second, None if it did not say."""
    said, end = output_of([program("microbench")], MEMORY_TIMEOUT_S)
    link = None
    for line in said.splitlines():
        finding = json.loads(line)
        if finding["check"] == "restore.link":
            link = finding["value"] * 1e9
        say(**finding)
    if end or not said:
        say("microbench", False, note=end or "it said nothing")
    return link


def activation(link, scratch):
    out = scratch / "activation.json"
    _, end = output_of([program("palctl"), "bench", "activation", "--json", str(out)], ACTIVATION_TIMEOUT_S)
    if not out.exists():
        say("activation", False, note=end or "it wrote no result")
        return
    found = json.loads(out.read_text())
    bound = 1e3 * found["image_bytes_of_a_rank"] / link
    say("activation.bound", True, value=bound, unit="ms",
        note=f"{found['image_bytes_of_a_rank']} bytes, as many as are copied, at restore.link's speed")
    say("activation.first_token", True, value=found["first_token_ms"], unit="ms",
        note=f"median of {len(found['rounds'])}, from the request; slowest {found['first_token_ms_most']:.1f}")
    ratio = found["first_token_ms"] / bound
    say("activation.first_token.ratio", ratio <= ACTIVATION_LIMIT, value=ratio, limit=ACTIVATION_LIMIT)
    say("activation.resident_first_token", True, value=found["resident_first_token_ms"], unit="ms",
        note="with the parameters in place")
    for part in ("first_slabs_clean_ms", "last_slabs_clean_ms", "restored_ms", "restoring_ms"):
        middle = sorted(r[part] for r in found["rounds"])[len(found["rounds"]) // 2]
        say(f"activation.{part.removesuffix('_ms')}", True, value=middle, unit="ms",
            note="since the request, as the broker saw it" if part != "restoring_ms" else "")


def main():
    with tempfile.TemporaryDirectory(prefix="palimpsest-") as folder:
        link = memory()
        if link is not None:
            activation(link, pathlib.Path(folder))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
