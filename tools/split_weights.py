#!/usr/bin/env python3
"""Carries a file of bf16 weights to a machine that takes files of bounded size only.

    tools/split_weights.py split model.safetensors PARTS --mib 48
    tools/split_weights.py join PARTS model.safetensors

The upper bytes of the numbers (sign and most of the exponent) are few different ones and are
compressed; the lower ones are noise and are kept. What comes out is the same file, which is checked.
"""

import argparse
import hashlib
import json
import lzma
import pathlib
import sys

MIB = 1 << 20


def split(file, folder, part_bytes):
    content = file.read_bytes()
    even, odd = content[0::2], content[1::2]
    packed = lzma.compress(odd, preset=1)
    folder.mkdir(parents=True, exist_ok=True)
    stream = even + packed
    parts = range(0, len(stream), part_bytes)
    for number, begin in enumerate(parts):
        (folder / f"part{number}").write_bytes(stream[begin:begin + part_bytes])
    about = {"parts": len(parts), "even_bytes": len(even), "bytes": len(stream),
             "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "about.json").write_text(json.dumps(about) + "\n")
    print(f"{len(parts)} parts, {len(stream) / len(content):.0%} of {len(content) / MIB:.0f} MiB")


def join(folder, file):
    about = json.loads((folder / "about.json").read_text())
    stream = b"".join((folder / f"part{n}").read_bytes() for n in range(about["parts"]))
    if len(stream) != about["bytes"]:
        sys.exit(f"{folder}: {len(stream)} bytes of parts, expected {about['bytes']}")
    even, odd = stream[:about["even_bytes"]], lzma.decompress(stream[about["even_bytes"]:])
    content = bytearray(len(even) + len(odd))
    content[0::2], content[1::2] = even, odd
    if hashlib.sha256(content).hexdigest() != about["sha256"]:
        sys.exit(f"{folder}: the parts do not give the file that they were made from")
    file.write_bytes(content)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split")
    splitting.add_argument("file", type=pathlib.Path)
    splitting.add_argument("parts", type=pathlib.Path, help="folder for part0, part1, ... and about.json")
    splitting.add_argument("--mib", type=int, default=48, help="largest part (default: %(default)s)")
    joining = commands.add_parser("join")
    joining.add_argument("parts", type=pathlib.Path)
    joining.add_argument("file", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.command == "split":
        split(arguments.file, arguments.parts, arguments.mib * MIB)
    else:
        join(arguments.parts, arguments.file)


if __name__ == "__main__":
    main()
