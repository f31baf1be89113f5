#!/usr/bin/env bash
# The quickstart on the real model: memory moves between two tenants, no token changes, and its JSON
# holds what it promises.
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
PYTHON
