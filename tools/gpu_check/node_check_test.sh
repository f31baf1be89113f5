#!/usr/bin/env bash
# What node_check.py says of programs that pass, fail, skip, die and hang: shell scripts that talk like tests.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/tools/gpu_check" "$work/bin"
# A hang is noticed after a second.
sed 's/"chaos_test": (150,/"chaos_test": (1,/' tools/gpu_check/node_check.py >"$work/tools/gpu_check/node_check.py"
fail() { echo "node_check_test: $*" >&2; exit 1; }
fake() { { echo '#!/bin/bash'; cat; } >"$work/bin/$1"; chmod 755 "$work/bin/$1"; }

fake turns_test <<'END'
echo '[ RUN      ] Backends/TurnsTest.Passes/Cuda'
echo 'a line of a log'
echo '[       OK ] Backends/TurnsTest.Passes/Cuda (1500 ms)'
echo '[ RUN      ] Backends/TurnsTest.Fails/Cuda'
echo 'tests/turns_test.cc:7: Failure'
echo 'Value of: holder'
echo '[  FAILED  ] Backends/TurnsTest.Fails/Cuda, where GetParam() = 4-byte object <01-00 00-00> (20 ms)'
echo '[ RUN      ] Backends/TurnsTest.Skips/Cuda'
echo '[  SKIPPED ] Backends/TurnsTest.Skips/Cuda (0 ms)'
echo '[  FAILED  ] Backends/TurnsTest.Fails/Cuda, where GetParam() = 4-byte object <01-00 00-00>'
exit 1
END
fake hibernation_test <<'END'
echo '[ RUN      ] Backends/HibernationTest.Dies/Cuda'
echo 'last words'
kill -SEGV $$
END
fake chaos_test <<'END'
echo '[ RUN      ] Backends/ChaosTest.Passes/Cuda'
echo '[       OK ] Backends/ChaosTest.Passes/Cuda (5 ms)'
echo '[ RUN      ] Backends/ChaosTest.Hangs/Cuda'
sleep 1000 &
echo "$!" >"$(dirname "$0")/child"
wait
END

status=0
python3 "$work/tools/gpu_check/node_check.py" turns_test hibernation_test chaos_test >"$work/out" 2>"$work/err" || status=$?
cat "$work/out" "$work/err"
[ "$status" = 1 ] || fail "expected exit status 1, got $status"
python3 - "$work/out" <<'END' || fail "the findings above are not what the programs said"
import json, sys
found = {}
for line in open(sys.argv[1]):
    finding = json.loads(line)
    assert finding["check"] not in found, finding
    found[finding["check"]] = finding
found.pop("node.no_memory_left_behind", None)
assert set(found) == {"node.turns_test.Passes", "node.turns_test.Fails", "node.turns_test.Skips",
                      "node.hibernation_test", "node.chaos_test.Passes", "node.chaos_test"}, sorted(found)
passes = found["node.turns_test.Passes"]
assert passes["ok"] and passes["value"] == 1.5 and "note" not in passes, passes
fails = found["node.turns_test.Fails"]
assert not fails["ok"] and fails["note"] == "tests/turns_test.cc:7: Failure / Value of: holder", fails
assert found["node.turns_test.Skips"]["ok"] and found["node.turns_test.Skips"]["note"] == "skipped", found
died = found["node.hibernation_test"]
assert not died["ok"] and "HibernationTest.Dies/Cuda: last words" in died["note"], died
hung = found["node.chaos_test"]
assert not hung["ok"] and "chaos_test did not end within 1 s; in Backends/ChaosTest.Hangs/Cuda" in hung["note"], hung
assert found["node.chaos_test.Passes"]["ok"], found
END
! kill -0 "$(cat "$work/bin/child")" 2>/dev/null || [ "$(ps -o stat= -p "$(cat "$work/bin/child")" | cut -c1)" = Z ] ||
  fail "what a program had started outlived it"
python3 "$work/tools/gpu_check/node_check.py" nosuch 2>/dev/null && fail "an unknown part was accepted" || true
