#!/usr/bin/env bash
# The quickstart on the real model: memory moves between two tenants, a conversation's KV comes back from
# the tiers below, no token changes, and its JSON holds what it promises. Then it serves as it says that it
# does, and a signal ends it with all that it started.
set -euo pipefail
fail() { echo "quickstart_test: $*" >&2; exit 1; }
out=$TEST_TMPDIR/quickstart.json
# Bazel's own folder is too deep for the path of a Unix socket.
node=$(mktemp -d /tmp/palimpsest-XXXXXX)
quickstart=
trap '[ -z "$quickstart" ] || { kill "$quickstart"; wait "$quickstart"; } || true; rm -rf "$node"' EXIT
mkfifo "$TEST_TMPDIR/output"
python3 tools/quickstart.py --dir "$node" --binaries . --free-ports --json "$out" --serve >"$TEST_TMPDIR/output" &
quickstart=$!
exec 3<"$TEST_TMPDIR/output"

printed=
while IFS= read -r line <&3; do
  echo "$line"
  printed+=$line$'\n'
  [[ $line != "  logs: "* ]] || break
done
[[ $printed == *"The node is running"* ]] || fail "it did not come to serve"

# What is awaited is shown as it begins and ends.
grep -q "^  waiting for both workers' readiness ...$" <<<"$printed" || fail "nothing said of the wait for the workers"
grep -qE "^  both workers' readiness: after [0-9.]+ s$" <<<"$printed" || fail "nothing said of its end"
# How far images are is read from the workers' logs, which tell it unless the images were there first.
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=tools python3 - "$node"/{alpha,beta}.log <<'PYTHON'
import pathlib
import sys

from demo.node import image_progress

for line in "".join(pathlib.Path(log).read_text() for log in sys.argv[1:]).splitlines():
    assert image_progress(line) or " phase=" not in line, line
PYTHON

# What it printed is enough to talk to it. Asked greedily it answers as in the demonstration.
command=$(grep -m 1 ' generate --tenant alpha ' <<<"$printed")
answer=$(eval "$command --temperature 0 --max-tokens 64")
python3 - "$printed" "$node/node.yaml" "$answer" "$out" <<'PYTHON'
import json
import re
import sys
import urllib.request

pages = re.findall(r"metrics: (\S+) \((\w+)\)", sys.argv[1])
assert [name for _, name in pages] == ["broker", "alpha", "beta", "router"], pages
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for url, name in pages:
    page = opener.open(url).read().decode()
    process = name if name in ("broker", "router") else "worker"
    assert f"# TYPE palimpsest_{process}_" in page, (url, page[:1000])
router, = re.findall(r"palimpsest\.v1\.Router on (\S+)", sys.argv[1])
assert f"router: {router}\n" in open(sys.argv[2]).read(), router
assert sys.argv[3] == json.load(open(sys.argv[4]))["answers"][0]["text"].rstrip("\n"), sys.argv[3]
PYTHON

kill -TERM "$quickstart"
ending=$(cat <&3)
echo "$ending"
status=0
wait "$quickstart" || status=$?
quickstart=
[ "$status" = 0 ] || fail "it ended with $status"
[[ $ending == *"every process ended clean"* ]] || fail "it did not end clean"
pids=$(sed -n 's/^  started .* (pid \([0-9]*\))$/\1/p' <<<"$printed")
# Broker, workers and router; alpha's worker was started twice more.
[ "$(wc -l <<<"$pids")" = 6 ] || fail "it started $(wc -l <<<"$pids") processes"
for pid in $pids; do
  ! kill -0 "$pid" 2>/dev/null || fail "process $pid is left"
done

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
