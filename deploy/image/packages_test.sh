#!/usr/bin/env bash
# The packages that the image installs, and what they depend on, hold every shared library that the
# programs load.
set -uo pipefail
programs=(broker/server/palimpsest-broker worker/model/packer worker/server/palimpsest-worker
  router/server/palimpsest-router tools/palctl/palctl)
available=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts \
  --no-breaks --no-replaces --no-enhances $(cat deploy/image/packages.txt) | grep '^[a-z]' | cut -d: -f1 | sort -u)
libraries=$(ldd "${programs[@]}" | awk '$3 ~ /^\// {print $3}' | sort -u | xargs -n1 readlink -f | sort -u)
[ "$(wc -l <<<"$libraries")" -gt 20 ] || { echo "the programs load too few libraries: the check is broken" >&2; exit 1; }
# dpkg knows a file by the path it was installed under, with or without /usr.
owners=$( (echo "$libraries"; sed 's|^/usr||' <<<"$libraries") | xargs dpkg -S 2>/dev/null)
failed=0
for library in $libraries; do
  package=$(grep -F -e ": $library" -e ": ${library#/usr}" <<<"$owners" | head -1 | cut -d: -f1)
  grep -qx "${package:-none}" <<<"$available" && continue
  echo "$library of package '${package:-none}' is loaded, but deploy/image/packages.txt does not bring it" >&2
  failed=1
done
exit $failed
