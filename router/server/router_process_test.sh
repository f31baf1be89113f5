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

# Starts the router in the background and waits until it says that it serves; sets pid and port.
start() {
  "$router" --config "$1" > "$folder/log" 2>&1 &
  pid=$!
  grep -q -m1 ' serving ' < <(timeout 60 tail -n +1 -f --pid=$pid "$folder/log") ||
    fail "it does not serve"
  port=$(sed -n 's/.* port=\([0-9]*\).*/\1/p' "$folder/log")
}
stop() {
  kill -TERM $pid
  wait $pid
  [ $? -eq 0 ] || fail "SIGTERM must end it with status 0"
}

start "$folder/router.yaml"
stop

openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout "$folder/key.pem" \
  -out "$folder/cert.pem" 2>/dev/null || fail "openssl made no certificate"
{ cat "$folder/router.yaml"; echo "tls: {cert: $folder/cert.pem, key: $folder/key.pem}"; } \
  > "$folder/tls.yaml"
start "$folder/tls.yaml"
openssl s_client -connect "127.0.0.1:$port" -CAfile "$folder/cert.pem" -alpn h2 < /dev/null \
  > "$folder/handshake" 2>&1
grep -q 'ALPN protocol: h2' "$folder/handshake" || fail "no HTTP/2 over TLS: $(cat "$folder/handshake")"
grep -q 'Verify return code: 0' "$folder/handshake" || fail "another certificate was served"
stop
echo "ok"
