#!/usr/bin/env bash
# tools/setup on machines of other shapes: it may call only what every Debian has (beside stand-ins
# for the package manager), installs only what is missing, and its refusals say what to do.
set -euo pipefail
tools=$TEST_TMPDIR/tools
stubs=$TEST_TMPDIR/stubs
calls=$TEST_TMPDIR/calls
output=$TEST_TMPDIR/output
cache=$TEST_TMPDIR/cache
mkdir "$stubs" "$tools"

fail() { echo "FAIL: $*" >&2; cat "$output" "$calls" >&2; exit 1; }
stub() { printf '#!/bin/bash\n%s\n' "$2" >"$stubs/$1"; chmod +x "$stubs/$1"; }

# The essential packages' programs, and no others.
for tool in awk bash cat chmod cmp cp df dirname env flock head mkdir mktemp mv rm tail tee tr; do
  ln -s "$(type -P $tool)" "$tools/$tool"
done

# A cache that has everything.
marker() { mkdir -p "$cache/$1"; cat "${@:2}" >"$cache/$1/.made-from"; }
marker venv tools/requirements.txt
marker models/SmolLM2-135M-Instruct tools/model.txt tools/convert_gguf.py
marker third_party/jinja tools/third_party.txt
marker third_party/flashinfer tools/flashinfer.txt
mkdir "$cache/venv/bin"
ln -s /usr/bin/true "$cache/venv/bin/python"

# A machine that has every package, for an ordinary user with sudo.
machine() {
  rm -f "$stubs"/* "$calls"
  touch "$calls"
  awk '!/^#/ && NF {print $NF, "installed"}' tools/packages.txt >"$TEST_TMPDIR/installed"
  stub dpkg-query "cat $TEST_TMPDIR/installed"
  stub dpkg 'echo amd64'
  stub id 'echo 1000'
  stub sleep "echo sleep >>$calls"
  stub apt-get "echo \"apt-get \$* proxy=\$https_proxy\" >>$calls"
  # Like sudo, it takes the environment away; as root runs only what is a stand-in.
  stub sudo "echo \"sudo \$*\" >>$calls
case \"\$*\" in *apt-get*) exec env -i PATH=\$PATH \"\$@\" ;; *\ tee\ *) cat >/dev/null ;; esac"
}
lacks() { sed -i "/^$1 /s/installed/config-files/" "$TEST_TMPDIR/installed"; }
setup() {
  PATH=$stubs:$tools PALIMPSEST_CACHE=$cache https_proxy=http://proxy:1 tools/setup >"$output" 2>&1
}
called() { grep -q -e "$1" "$calls" || fail "not called: $1"; }
refused() {
  if setup; then fail "it went on"; fi
  grep -q -e "$1" "$output" || fail "the refusal does not say: $1"
}

machine
setup || fail "nothing is missing, yet it failed"
[ ! -s "$calls" ] || fail "nothing is missing, yet it called for changes"

for file in clang_pch precompiled_headers.h; do
  cmp -s "tools/bazel/$file" "$cache/clang-19/$file" || fail "$file is not where builds look for it"
done
grep -qx -e "build --repo_env=CC=$cache/clang-19/clang_pch" setup.bazelrc || fail "builds do not go by clang_pch"

machine
lacks cmake
setup || fail "one package is missing"
called 'apt-get .*update proxy=http://proxy:1$'
called 'apt-get .*install --no-install-recommends cmake proxy=http://proxy:1$'

# The lists are being fetched by another process.
machine
lacks git
stub apt-get "echo \"apt-get \$*\" >>$calls
case \"\$*\" in *update) [ -e $TEST_TMPDIR/free ] || {
  : >$TEST_TMPDIR/free; echo 'E: Could not get lock /var/lib/apt/lists/lock.' >&2; exit 100; } ;; esac"
setup || fail "it does not wait for another apt-get"
called sleep
called 'install .* git$'

machine
lacks git
stub apt-get 'exit 100'
refused 'needs a network'

machine
lacks git
rm "$stubs/sudo"
refused 'run as root: apt-get install --no-install-recommends git'

machine
lacks git
stub sudo 'exit 1'
refused 'sudo refused; run as root: apt-get install'

machine
stub dpkg 'echo arm64'
refused 'needs Debian 12 on amd64 (x86-64); this is arm64'

machine
rm "$cache/venv/.made-from"
stub df 'printf "Avail\n  12M\n"'
refused 'but 12 MiB are left there: free some, or set PALIMPSEST_CACHE'
echo ok
