#!/usr/bin/env bash
# The packages that the image installs, and what they depend on, hold every shared library that the
# programs load.
set -uo pipefail
mapfile -t wanted < deploy/image/packages.txt
available=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts \
  --no-breaks --no-replaces --no-enhances "${wanted[@]}" | grep '^[a-z]' | cut -d: -f1 | sort -u)
failed=0
for program in broker/server/palimpsest-broker worker/model/packer worker/server/palimpsest-worker \
  router/server/palimpsest-router tools/palctl/palctl; do
  [ -x "$program" ] || { echo "no $program" >&2; exit 1; }
  while read -r library; do
    real=$(readlink -f "$library")
    package=$( (dpkg -S "$real" || dpkg -S "${real#/usr}") 2>/dev/null | head -1 | cut -d: -f1)
    grep -qx "${package:-none}" <<<"$available" || {
      echo "$program loads $library of package '${package:-none}', which deploy/image/packages.txt does not bring" >&2
      failed=1
    }
  done < <(ldd "$program" | awk '$3 ~ /^\// {print $3}')
done
exit $failed
