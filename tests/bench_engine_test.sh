#!/usr/bin/env bash
# `palctl bench engine` on the CPU with a model of a few MiB: its own node starts, is measured through
# the worker's interface and ends, and the JSON holds what was asked for. Likewise `palctl bench activation`.
set -euo pipefail
out=$TEST_TMPDIR/bench.json
tools/palctl/palctl bench engine --device cpu --shape tiny --binaries . --json "$out" --rounds 1 \
  --batches 1,4 --prompts 32,100 --decode-tokens 16 --long-batch 2 --long-prompt 200 --max-step-tokens 128
python3 - "$out" <<'PYTHON'
import json
import sys

found = json.load(open(sys.argv[1]))
ours = found["palimpsest"]
assert found["shape"] == "tiny" and found["device"] == "cpu" and "vllm" not in found
assert [d["batch"] for d in ours["decode"]] == [1, 4]
for decode in (*ours["decode"], ours["long_context"]):
    # A step for each token and the prompt's, all of which were counted. Times are a difference of
    # two, which a busy machine can make anything.
    assert decode["engine"]["steps"] >= 16 and decode["engine"]["launch_ms"] > 0, decode
    assert decode["engine"]["graph_steps"] == 0, decode
assert [p["tokens"] for p in ours["first_token"]] == [32, 100]
start = ours["start"]
assert 0 < start["serving_ms"] <= start["first_token_ms"] <= start["resident_ms"], start
PYTHON

tools/palctl/palctl bench activation --device cpu --shape tiny --binaries . --json "$out" --rounds 3 --prompt 32
python3 - "$out" <<'PYTHON'
import json
import sys

found = json.load(open(sys.argv[1]))
assert [r["tenant"] for r in found["rounds"]] == ["beta", "alpha", "beta"], found
for activation in found["rounds"]:
    # All slabs of the image came anew, and no token before the last of them.
    assert activation["parameter_slabs"] * (2 << 20) == found["image_bytes_of_a_rank"], found
    assert 0 < activation["first_slabs_clean_ms"] <= activation["last_slabs_clean_ms"], found
    assert 0 < activation["restoring_ms"] <= activation["first_token_ms"], found
assert found["bound_ms"] > 0 and found["of_bound"] > 0, found
PYTHON
