#!/usr/bin/env bash
# What is generated from the metric table is up to date, and Prometheus's own checker accepts it.
set -uo pipefail
failed=0
for pair in markdown:docs/metrics.md dashboard:deploy/grafana/palimpsest.json; do
  if ! diff -u "${pair#*:}" <(tools/metrics/generate "${pair%%:*}"); then
    echo "${pair#*:} is out of date: run tools/metrics/update" >&2
    failed=1
  fi
done
for process in broker worker router; do
  if ! tools/metrics/generate exposition "$process" | promtool check metrics; then
    echo "promtool refuses the metrics of $process" >&2
    failed=1
  fi
done
promtool check config deploy/prometheus/prometheus.yml || failed=1
exit $failed
