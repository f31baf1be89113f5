#!/usr/bin/env bash
# The executable: options, exit statuses, a real model folder, a clean end on SIGTERM.
set -uo pipefail
router=$1
folder=$(mktemp -d "${TEST_TMPDIR:-/tmp}/router.XXXXXX")
trap 'rm -rf "$folder"' EXIT
fail() { echo "FAIL: $*" >&2; [ -f "$folder/log" ] && cat "$folder/log" >&2; exit 1; }

"$router" --help | grep -q 'SIGTERM' || fail "--help says nothing about SIGTERM"
"$router" >/dev/null 2>&1; [ $? -eq 2 ] || fail "no --config must be wrong usage"

cat > "$folder/router.yaml" <<YAML
listen: 127.0.0.1:0
metrics_listen: 127.0.0.1:0
auth_file: $folder/tenants
tenants:
  - name: alpha
    models: [{name: smol, path: external/cache/smollm2, workers: ["127.0.0.1:1"]}]
YAML
(umask 077; echo "alpha $(head -c 24 /dev/urandom | od -An -v -tx1 | tr -d ' \n')" > "$folder/tenants")

"$router" --config "$folder/router.yaml" --print-config > "$folder/printed" || fail "--print-config"
grep -q 'drain_timeout' "$folder/printed" || fail "--print-config leaves defaults out"
"$router" --config "$folder/printed" --print-config | cmp -s - "$folder/printed" ||
  fail "what --print-config prints does not read back"

sed 's/auth_file/auth_fill/' "$folder/router.yaml" > "$folder/wrong.yaml"
"$router" --config "$folder/wrong.yaml" 2> "$folder/error"
[ $? -eq 2 ] || fail "an unknown key must end with status 2"
grep -q 'wrong.yaml:3' "$folder/error" || fail "the error names no line: $(cat "$folder/error")"

chmod 644 "$folder/tenants"
"$router" --config "$folder/router.yaml" > "$folder/log" 2>&1
[ $? -eq 1 ] || fail "a token file that all may read must end with status 1"
grep -q 'chmod 600' "$folder/log" || fail "the error does not say what to do"
chmod 600 "$folder/tenants"

"$router" --config "$folder/router.yaml" > "$folder/log" 2>&1 &
pid=$!
# Ends when the router says that it serves, or has ended.
grep -q -m1 ' serving ' < <(timeout 60 tail -n +1 -f --pid=$pid "$folder/log") ||
  fail "it does not serve"
kill -TERM $pid
wait $pid
[ $? -eq 0 ] || fail "SIGTERM must end it with status 0"
echo "ok"
