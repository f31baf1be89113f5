#!/usr/bin/env python3
"""A real model on a GPU against transformers: SmolLM2's greedy answers of a whole node beside
tests/data/smollm2/reference.json, which transformers gave in float32.

Needs the model's weights: model/model.safetensors of a bundle (tools/split_weights.py brings them to a
machine without a network), or what tools/setup installed. Our weights, keys and values are bfloat16:
a token may differ where the reference's best two were closer than twice the error of a logit; what
follows it is another text.
"""

import json
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
sys.dont_write_bytecode = True

from demo import node, questions  # noqa: E402
from demo.answers import lead  # noqa: E402

REFERENCE = ROOT / "tests/data/smollm2/reference.json"
# Of the CPU runner's test on the same reference.
LOGIT_ERROR = 0.15

failed = False


def say(check, ok, **more):
    global failed
    failed = failed or not ok
    print(json.dumps({"check": f"model.{check}", "ok": bool(ok), **more}), flush=True)


def compare(case, record):
    """(whether the answer may be the reference's, tokens before the first difference, note)"""
    expected, got = case["greedy_ids"], record["token_ids"]
    for i, (a, b) in enumerate(zip(expected, got)):
        if a != b:
            behind = lead(record["logprobs"][i], a)
            note = f"token {i} is {b} instead of {a}, by {behind:.3g}; least margin {case['min_margin']}"
            return behind < 2 * LOGIT_ERROR and case["min_margin"] < 2 * LOGIT_ERROR, i, note
    return expected == got[:len(expected)], len(expected), ""


def main():
    backend = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="palimpsest-", dir="/tmp"))
    binaries = ROOT / ("bin" if node.PACKED else "bazel-bin")
    cluster = node.Cluster(folder / "node", binaries, backend, True)
    if cluster.dummy or not (cluster.model / "model.safetensors").exists():
        say("weights", True, note=f"not run: {cluster.model} has no weights")
        return 0
    cluster.prepare()
    try:
        cluster.start_all()
        tokens = exact = 0
        for case in json.loads(REFERENCE.read_text())["cases"]:
            process = questions.generate(cluster, "alpha", 64, case["question"])
            out, error = process.communicate()
            if process.returncode != 0:
                say("answer", False, note=error.strip())
                continue
            ok, same, note = compare(case, json.loads(out))
            tokens, exact = tokens + same, exact + (not note)
            say("answer", ok, value=same, unit="tokens", note=note or case["question"])
        say("tokens", True, value=tokens, unit="tokens",
            note=f"equal to those of transformers; {exact} answers to the end")
    finally:
        dirty = cluster.stop()
    say("processes_end_clean", not dirty, note=", ".join(dirty))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
