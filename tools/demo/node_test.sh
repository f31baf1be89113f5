#!/usr/bin/env bash
# Waiting for a node's processes and answers, and where they listen, without a node: what is shown on a
# terminal and on a pipe, and what a wait ends with.
set -euo pipefail
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=tools python3 - "$TEST_TMPDIR" <<'PYTHON'
import io
import json
import pathlib
import subprocess
import sys

from demo.node import Cluster, image_progress
from demo.output import Waiting
from demo.questions import Stories


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, error=None):
    """What a wait of 3 seconds writes, of which the first update comes too early to be drawn."""
    now = 10.0
    try:
        with Waiting("the broker", stream, lambda: now) as waiting:
            now = 10.01
            waiting.update("too early")
            now = 12.0
            waiting.update("pack 1 of 2 MiB")
            now = 13.0
            if error:
                raise error
    except RuntimeError:
        pass
    return stream.getvalue()


begun = "  waiting for the broker ...\n"
assert shown(io.StringIO()) == begun + "  the broker: after 3.0 s\n"
assert shown(io.StringIO(), RuntimeError()) == begun
drawn = "\r\033[K  waiting for the broker: 0.0 s\r\033[K  waiting for the broker: 2.0 s; pack 1 of 2 MiB"
assert shown(Terminal()) == drawn + "\r\033[K  the broker: after 3.0 s\n", repr(shown(Terminal()))
assert shown(Terminal(), RuntimeError()) == drawn + "\n"

# Only while the log's last line is about the image.
line = '2026-01-01T00:00:00.000Z info worker: the broker prepares the parameter image phase=pack done="1.5 MiB" total="257 MiB"\n'
assert image_progress(f"started\n{line}") == "pack 1.5 MiB of 257 MiB"
assert image_progress(f"{line}attached\n") == image_progress("") == ""

folder = pathlib.Path(sys.argv[1]) / "node"
folder.mkdir()
cluster = Cluster(folder, folder, "host", True)


def failure(act):
    try:
        act()
    except SystemExit as error:
        return error.code
    raise AssertionError("no failure")


# A wait ends when the condition holds, after its time, or with a process.
answers = iter([None, False, True])
cluster.wait_for("the third answer", lambda: next(answers))
cluster.last_error = "nobody answers"
said = failure(lambda: cluster.wait_for("the broker's answer", lambda: False, timeout_s=0))
assert said == (f"quickstart: the broker's answer did not happen within 0 s; logs are in {folder}\n"
                "nobody answers"), said
(folder / "alpha.log").write_text(f"started\n{line}")
assert cluster.loading() == ""
process = subprocess.Popen(["false"])
cluster.processes = [("alpha", process)]
assert cluster.loading() == "alpha's image: pack 1.5 MiB of 257 MiB"
process.wait()
said = failure(lambda: cluster.wait_for("alpha's readiness", lambda: False))
assert said.startswith("quickstart: alpha exited with 1; its last lines:\n  started\n  2026"), said
assert cluster.stop() == ["alpha (exit 1)"] and cluster.processes == []

# Free ports: each process has its own, and those that are to find it know it.
cluster.copy_configs()
listening = [cluster.address(name, key) for name in ("alpha", "beta", "router") for key in ("listen", "metrics_listen")]
listening.append(cluster.address("broker", "metrics_listen"))
assert len(set(listening)) == 7, listening
assert cluster.address("node", "router") == cluster.address("router", "listen")
for tenant in ("alpha", "beta"):
    assert f"workers: [{cluster.address(tenant, 'listen')}]" in (folder / "router.yaml").read_text()

# A load that fails says why, also from its thread; one that answers in any order has the prompts' order.
palctl = folder / "tools/palctl/palctl"
palctl.parent.mkdir(parents=True)
slabs = {"parameter_slabs": 1, "kv_slabs": 2}
status = {"free_slabs": 3, "tenants": [{"tenant": t} | slabs for t in ("alpha", "beta")]}
(folder / "status.json").write_text(json.dumps(status))
stories = Stories(cluster)


def answering(script):
    palctl.write_text(f"#!/bin/sh\ncase $3 in status) exec cat status.json ;; esac\n{script}\n")
    palctl.chmod(0o755)


answering("echo 'no quota' >&2; exit 1")
for load in (stories.calm, stories.pressure):
    assert failure(load) == "quickstart: beta did not finish its load: no quota"
(folder / "answers").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in stories.prompts[::-1]))
answering("exec cat answers")
assert [r["prompt"] for r in stories.calm()] == stories.prompts
answers, peak = stories.pressure()
assert [r["prompt"] for r in answers] == stories.prompts and peak == status
PYTHON
