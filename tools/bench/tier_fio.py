#!/usr/bin/env python3
"""A broker's way between T1 and a disk beside fio on the same file: blocks of 2 MiB, as many under way, as many bytes,
in turn. Prints a table of medians and ratios. Exit status 1 if a ratio is below what it is to be.

Needs fio (a Debian package) and the benchmark: bazel build -c opt //broker/blocks:tier_move_benchmark
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

from remap_report import table

TARGET = 0.9
BLOCK = 2 << 20
HEAD = 64 << 10  # what a tier looks at to tell whether a file is its own


def fio(arguments, kind, depth, size):
    """Bytes a second; `kind` as fio's --rw, `size` of the bytes that it moves."""
    said = subprocess.run(
        [arguments.fio, "--name=tier", f"--filename={arguments.file}", f"--size={arguments.gib}g", f"--bs={BLOCK}",
         "--direct=1", "--ioengine=io_uring", f"--iodepth={depth}", f"--rw={kind}", f"--io_size={size}",
         "--fallocate=none", "--output-format=json"], check=True, stdout=subprocess.PIPE).stdout
    [job] = json.loads(said)["jobs"]
    return job["read" if kind.endswith("read") else "write"]["bw_bytes"]


def broker(arguments):
    with open(arguments.file, "r+b") as file:
        file.write(bytes(HEAD))
        os.fsync(file.fileno())
    said = subprocess.run(
        [arguments.benchmark.absolute(), "--file", arguments.file.absolute(), "--size", f"{arguments.gib}GiB",
         "--blocks", str(arguments.blocks), "--depth", str(arguments.depth)], check=True, stdout=subprocess.PIPE,
        cwd=arguments.runfiles).stdout
    return json.loads(said.splitlines()[-1])


def measure(arguments):
    """Every round of each, in bytes a second."""
    size = arguments.blocks * BLOCK
    rounds = {"store": [], "fio store": [], "load": [], "fio load": []}
    # The file's blocks exist before anything is measured.
    fio(arguments, "write", arguments.depth, arguments.gib << 30)
    for number in range(arguments.rounds):
        moved = broker(arguments)
        rounds["store"].append(moved["store_bytes_per_s"])
        rounds["load"].append(moved["load_bytes_per_s"])
        rounds["fio store"].append(fio(arguments, "randwrite", moved["stores_in_flight"], size))
        rounds["fio load"].append(fio(arguments, "randread", moved["loads_in_flight"], size))
        print(f"round {number}: " + ", ".join(f"{k} {v[-1] / 1e6:.0f} MB/s" for k, v in rounds.items()), file=sys.stderr)
    return rounds


def judge(rounds):
    """A row for each direction, and whether both are fast enough."""
    rows, met = [], True
    for title, name in (("T1 to T3", "store"), ("T3 to T1", "load")):
        own, other = (statistics.median(rounds[key]) for key in (name, f"fio {name}"))
        met = met and own >= TARGET * other
        cells = (f"{value / 1e6:,.0f} ({min(all_) / 1e6:,.0f}-{max(all_) / 1e6:,.0f})"
                 for value, all_ in ((other, rounds[f"fio {name}"]), (own, rounds[name])))
        rows.append([title, *cells, f"{own / other:.2f}", f"{TARGET:g}"])
    return table(["MB/s", "fio", "broker", "broker / fio", "target"], rows), met


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=pathlib.Path, required=True, help="on the disk; it is overwritten and stays")
    parser.add_argument("--gib", type=int, default=3, help="its size")
    parser.add_argument("--blocks", type=int, default=256, help="that a round moves each way")
    parser.add_argument("--depth", type=int, default=16, help="the tier's depth: loads under way, and twice the stores")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fio", default="fio")
    parser.add_argument("--benchmark", type=pathlib.Path,
                        default=pathlib.Path("bazel-bin/broker/blocks/tier_move_benchmark"))
    parser.add_argument("--json", type=pathlib.Path, help="write all rounds to this file")
    arguments = parser.parse_args()
    # Bazel's programs find each other from there.
    arguments.runfiles = pathlib.Path(f"{arguments.benchmark}.runfiles/palimpsest")
    rounds = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(rounds, indent=1) + "\n")
    text, met = judge(rounds)
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
