#!/usr/bin/env bash
# The kustomize base renders, every object fits its Kubernetes schema, and every config file in it
# and in deploy/local is accepted by its process.
set -uo pipefail
cache=${PALIMPSEST_CACHE:-$HOME/.cache/palimpsest}
validate=$cache/venv/bin/kubernetes-validate
[ -x "$validate" ] || { echo "there is no $validate: run tools/setup" >&2; exit 1; }
rendered=$TEST_TMPDIR/rendered.yaml
failed=0

kubectl kustomize "$(dirname "$(readlink -f deploy/kubernetes/base/kustomization.yaml)")" >"$rendered" || exit 1
objects=$(grep -c '^kind:' "$rendered")
[ "$objects" -ge 12 ] || { echo "only $objects objects were rendered" >&2; failed=1; }
"$validate" --strict "$rendered" || failed=1

for folder in deploy/local deploy/local/cuda deploy/kubernetes/base/config; do
  for pair in broker:broker/server/palimpsest-broker alpha:worker/server/palimpsest-worker \
    beta:worker/server/palimpsest-worker router:router/server/palimpsest-router; do
    config=$folder/${pair%%:*}.yaml
    # What is the same on a GPU is not there again.
    [ -e "$config" ] || [[ "$folder" != deploy/local/* ]] || continue
    "${pair#*:}" --config "$config" --print-config >/dev/null || {
      echo "$config was refused" >&2
      failed=1
    }
  done
done
exit $failed
