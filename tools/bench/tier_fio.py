#!/usr/bin/env python3
"""A broker's way between T1 and a disk beside fio on the same file: blocks of 2 MiB, as many under way, as many bytes,
in turn. Prints a table of medians and ratios. Exit status 1 if a ratio is below what it is to be.

A broker's buffers are huge pages, with which a disk may be twice as fast. fio takes them too where the machine has some
to give (as root: echo 64 >/proc/sys/vm/nr_hugepages), and the better fio counts.

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


def free_huge_pages():
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("HugePages_Free")))


def fio(arguments, kind, depth, size, memory="malloc"):
    """Bytes a second over the file's first `size` bytes; `kind` as fio's --rw."""
    said = subprocess.run(
        [arguments.fio, "--name=tier", f"--filename={arguments.file}", f"--size={size}", f"--bs={BLOCK}",
         "--direct=1", "--ioengine=io_uring", f"--iodepth={depth}", f"--rw={kind}", f"--mem={memory}",
         "--fallocate=none", "--output-format=json"], check=True, stdout=subprocess.PIPE).stdout
    [job] = json.loads(said)["jobs"]
    return job[kind]["bw_bytes"]


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
    kinds = {"fio": "malloc"}
    if free_huge_pages() > arguments.depth:
        kinds["fio, huge pages"] = "mmaphuge"
    rounds = {f"{who} {what}": [] for what in ("store", "load") for who in ("broker", *kinds)}
    # The file's blocks exist before anything is measured.
    fio(arguments, "write", arguments.depth, arguments.gib << 30)
    for number in range(arguments.rounds):
        moved = broker(arguments)
        rounds["broker store"].append(moved["store_bytes_per_s"])
        rounds["broker load"].append(moved["load_bytes_per_s"])
        for who, memory in kinds.items():
            # In order, as a tier writes that fills; then what was just written, as the broker does.
            rounds[f"{who} store"].append(fio(arguments, "write", moved["stores_in_flight"], size, memory))
            rounds[f"{who} load"].append(fio(arguments, "read", moved["loads_in_flight"], size, memory))
        print(f"round {number}: " + ", ".join(f"{k} {v[-1] / 1e6:.0f} MB/s" for k, v in rounds.items()), file=sys.stderr)
    return rounds


def judge(rounds):
    """A row for each direction, and whether both are fast enough."""
    who = [key.removesuffix(" store") for key in rounds if key.endswith(" store") and not key.startswith("broker")]
    rows, met = [], True
    for title, what in (("T1 to T3", "store"), ("T3 to T1", "load")):
        medians = {name: statistics.median(rounds[f"{name} {what}"]) for name in (*who, "broker")}
        ratio = medians["broker"] / max(medians[name] for name in who)
        met = met and ratio >= TARGET
        cells = (f"{value / 1e6:,.0f} ({min(rounds[f'{name} {what}']) / 1e6:,.0f}-{max(rounds[f'{name} {what}']) / 1e6:,.0f})"
                 for name, value in medians.items())
        rows.append([title, *cells, f"{ratio:.2f}", f"{TARGET:g}"])
    return table(["MB/s", *who, "broker", "broker / best fio", "target"], rows), met


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
