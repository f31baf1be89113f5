#!/usr/bin/env bash
# What a fault of one client of a GPU does to its neighbour: time-sliced, and as clients of one MPS
# server. Needs nvcc and a GPU; starts an MPS daemon of its own, with folders of its own, and ends it.
# Usage: mps_faults.sh [OUT.json]
set -u
cd "$(dirname "$0")"
out=${1:-/dev/stdout}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
nvcc -O1 -arch=native -o "$work/client" mps_fault.cu || exit 1

# Prints the neighbour's status: 0 if it lived.
neighbour_of_a_fault() {
  "$work/client" work 6 > "$work/neighbour.log" 2>&1 &
  local neighbour=$!
  for _ in $(seq 100); do
    grep -q ready "$work/neighbour.log" && break
    sleep 0.1
  done
  timeout 20 "$work/client" fault > "$work/faulty.log" 2>&1
  wait "$neighbour"
  local status=$?
  sed 's/^/  neighbour: /' "$work/neighbour.log" >&2
  sed 's/^/  faulty: /' "$work/faulty.log" >&2
  echo "$status"
}

echo "time-sliced:" >&2
sliced=$(neighbour_of_a_fault)

export CUDA_MPS_PIPE_DIRECTORY=$work/pipe CUDA_MPS_LOG_DIRECTORY=$work/log
mkdir "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
echo "MPS:" >&2
mps=null
if timeout 20 nvidia-cuda-mps-control -d >&2 && [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]; then
  mps=$(neighbour_of_a_fault)
  grep -h -i "new client" "$CUDA_MPS_LOG_DIRECTORY"/*.log | sed 's/^/  /' >&2
  echo quit | timeout 20 nvidia-cuda-mps-control >&2
else
  echo "  no MPS daemon can be started here" >&2
fi
gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | head -1)
lived() { case $1 in 0) echo true ;; null) echo null ;; *) echo false ;; esac; }
printf '{"date": "%s", "gpu": "%s", "neighbour_lives": {"time_sliced": %s, "mps": %s}}\n' \
  "$(date -u +%F)" "$gpu" "$(lived "$sliced")" "$(lived "$mps")" > "$out"
