#!/usr/bin/env python3
"""Runs a one-machine Palimpsest cluster and shows memory moving between two tenants.

Starts the broker, a worker for each of the tenants alpha and beta, and the router as separate
processes from the YAML files under deploy/local. Asks both tenants questions, puts beta under KV
pressure so that alpha's parameter slabs are revoked and granted to beta, then asks alpha again so
that they come back. Where the broker has tiers, alpha also goes on with a conversation whose KV
blocks have left the pool meanwhile: they come back from host memory, and once more, when alpha's
worker has been restarted, from the disk. Exits 0 only if every token equals that of an unpressured
run.

Where there is an NVIDIA GPU, memory and models are there (--backend). Steps of other sizes use other
kernels on a GPU, so low bits differ and near ties may turn: answers count as equal if their
log-probabilities agree before the first different token, and at that token each run had the other's
close behind its own.

Run it through tools/quickstart, which installs and builds first, or in a folder that tools/bundle made.
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import threading

sys.dont_write_bytecode = True

from demo.answers import Verdict, compare, parameters_moved  # noqa: E402
from demo.conversation import Conversation, go_on  # noqa: E402
from demo.node import CACHE, MODEL, PACKED, ROOT, TENANTS, Cluster, choose_backend  # noqa: E402
from demo.output import GREEN, RED, RESET, heading, print_movements, print_slabs, say, stage  # noqa: E402
from demo.questions import QUESTIONS, Stories, ask  # noqa: E402


def print_verdict(verdict):
    for comparison in verdict.comparisons:
        text = str(comparison).replace("\n", "\n    ")
        say(f"  {GREEN if comparison.ok else RED}{text}{RESET}")
    for failure in verdict.failures:
        say(f"  {RED}{failure}{RESET}")


def demonstrate(cluster):
    """The verdict, and what --json writes."""
    stories = Stories(cluster)
    count = len(stories.prompts)
    conversation = Conversation(cluster) if cluster.status()["tiers"] else None

    heading("Questions to both tenants, no pressure")
    if conversation:
        conversation.ask("alpha", 0)
    calm = {t: [ask(cluster, t, q) for q in QUESTIONS[t]] for t in TENANTS}
    calm_stories = stories.calm()
    before = cluster.status()
    print_slabs(before, "slabs before the pressure")

    heading(f"beta under KV pressure: {count} stories, {stories.concurrency} at once")
    hurried_stories, peak = stories.pressure()
    print_slabs(peak, "slabs at the height of the pressure")

    heading("alpha again: its parameters come back layer by layer, the prompt follows behind them")
    again = [ask(cluster, "alpha", q) for q in QUESTIONS["alpha"]]
    after = cluster.status()
    print_slabs(after, "slabs afterwards")

    verdict = Verdict([compare("alpha", calm["alpha"], again), compare("beta", calm_stories, hurried_stories)])
    result = {"ok": False, "backend": cluster.backend, "weights": "dummy" if cluster.dummy else MODEL}
    result["answers"] = [{key: record[key] for key in ("tenant", "prompt", "text", "token_ids")}
                         for record in calm["alpha"] + calm["beta"] + hurried_stories + again]
    result["stages"] = [stage(before, "before"), stage(peak, "during"), stage(after, "after")]
    result["transfers"] = [{k: t[k] for k in ("kind", "slabs", "seconds", "tenant", "role", "reason")}
                           for t in after["transfers"]]
    if not parameters_moved(result["stages"], "alpha", before["tenants"][0]["image_slabs"]):
        verdict.failures.append("alpha's parameters were not taken and brought back: nothing was shown")

    if conversation:
        from_memory, from_disk, computed = go_on(cluster, conversation)
        result["turns"] = [{key: t[key] for key in ("tenant", "usage", "blocks", "ttft_seconds")}
                           for t in (conversation.first, from_memory, from_disk, computed)]
        verdict.comparisons += [compare("second turn from host memory", [computed], [from_memory]),
                                compare("second turn from the disk", [computed], [from_disk])]
        if not (from_memory["blocks"]["dram"] and from_disk["blocks"]["nvme"]):
            verdict.failures.append("blocks did not come back from both tiers")

    heading("Movements")
    print_movements(result["transfers"])
    heading("Tokens against the unpressured run")
    print_verdict(verdict)
    result["ok"] = verdict.ok
    return verdict, result


def serve(cluster):
    """Says how to talk to the node; returns when a signal asks for its end."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    palctl = f"{cluster.program('palctl')} --node {cluster.folder}/node.yaml"
    heading("The node is running; Ctrl-C stops it")
    say(f"""  {palctl} generate --tenant alpha --chat "{QUESTIONS["alpha"][0]}"
  {palctl} status
  {palctl} top""")
    for name in ("broker", *TENANTS, "router"):
        say(f"  metrics: http://{cluster.address(name, 'metrics_listen')}/metrics ({name})")
    say(f"""  gRPC:    palimpsest.v1.Router on {cluster.address("router", "listen")} (reflection is on), bearer tokens in
           {cluster.folder}/secrets/tenants
  logs:    {cluster.folder}/*.log""")
    while not stop.wait(0.5):
        cluster.check_alive()


def interrupt(*_):
    raise KeyboardInterrupt


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true",
                        help="leave the node running until Ctrl-C, and say how to talk to it")
    parser.add_argument("--json", metavar="FILE", help="write what happened to FILE")
    parser.add_argument("--dir", metavar="DIR", default=str(CACHE / "local"),
                        help="folder for sockets, secrets and logs (default: %(default)s)")
    parser.add_argument("--binaries", metavar="DIR",
                        default=str(ROOT / ("bin" if PACKED else "bazel-bin")),
                        help="where the programs are (default: %(default)s)")
    parser.add_argument("--backend", choices=("auto", "host", "cuda"), default="auto",
                        help="where memory and models are (default: on a GPU if there is one)")
    parser.add_argument("--free-ports", action="store_true",
                        help="use free TCP ports in place of those of deploy/local")
    args = parser.parse_args()

    backend, why = choose_backend(args.backend)
    cluster = Cluster(pathlib.Path(args.dir).resolve(), pathlib.Path(args.binaries).resolve(), backend,
                      args.free_ports)
    cluster.prepare()
    weights = "random numbers, as this folder has no weights" if cluster.dummy else "the checkpoint's"
    say(f"back-end: {backend} ({why}); model: {MODEL}, weights: {weights}")
    (cluster.folder / "quickstart.pid").write_text(str(os.getpid()))
    # Without a comparison it is not ok.
    verdict = Verdict([])
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupt)
        heading("Starting one node")
        cluster.start_all()
        verdict, result = demonstrate(cluster)
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
        if args.serve:
            serve(cluster)
    except KeyboardInterrupt:
        say("\ninterrupted")
    finally:
        # Bounded, and cut short it would leave processes behind.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        heading("Stopping")
        if dirty := cluster.stop():
            verdict.failures.append(f"did not end clean: {', '.join(dirty)}; logs are in {cluster.folder}")
            say(f"  {RED}{verdict.failures[-1]}{RESET}")
        else:
            say("  every process ended clean")
        (cluster.folder / "quickstart.pid").unlink(missing_ok=True)
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
