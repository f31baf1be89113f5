#!/usr/bin/env bash
# The quickstart on the real model: memory moves between two tenants, a conversation's KV comes back from
# the tiers below, no token changes, and its JSON holds what it promises.
set -euo pipefail
out=$TEST_TMPDIR/quickstart.json
# Bazel's own folder is too deep for the path of a Unix socket.
node=$(mktemp -d /tmp/palimpsest-XXXXXX)
trap 'rm -rf "$node"' EXIT
python3 tools/quickstart.py --dir "$node" --binaries . --free-ports --json "$out"
python3 - "$out" <<'PYTHON'
import json
import sys

result = json.load(open(sys.argv[1]))
assert result["ok"] is True
assert {a["tenant"] for a in result["answers"]} == {"alpha", "beta"}
assert all(a["prompt"] and a["text"] and a["token_ids"] for a in result["answers"])
stages = {s["name"]: s["slabs"] for s in result["stages"]}
assert stages["during"]["alpha"]["parameter"] < stages["before"]["alpha"]["parameter"]
assert stages["after"]["alpha"]["parameter"] == stages["before"]["alpha"]["parameter"]
assert stages["during"]["beta"]["kv"] > stages["before"]["beta"]["kv"]
kinds = {t["kind"] for t in result["transfers"]}
assert {"revoke", "grant", "restore"} <= kinds, kinds
assert all(t["slabs"] > 0 and t["seconds"] >= 0 for t in result["transfers"])
first, from_memory, from_disk, computed = result["turns"]
assert first["usage"]["cached_tokens"] == 0 and not any(first["blocks"].values()), first
# Nearly all of the first turn; how much comes from the disk in time depends on what else runs.
assert from_memory["blocks"]["dram"] * 16 >= first["usage"]["prompt_tokens"] - 32, from_memory
assert from_memory["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 32, from_memory
assert from_disk["blocks"]["nvme"] > 0, from_disk
assert from_disk["usage"]["cached_tokens"] >= 16 * from_disk["blocks"]["nvme"], from_disk
assert computed["tenant"] == "beta" and not any(computed["blocks"].values()), computed
assert from_memory["ttft_seconds"] < computed["ttft_seconds"], result["turns"]
PYTHON
