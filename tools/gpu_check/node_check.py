#!/usr/bin/env python3
"""Checks of a whole node on a GPU: broker, two workers that compute on it, router and palctl.

The model has the shape and the tokenizer of the folder --model and weights without a checkpoint
(load_format: dummy). Tenants stream; pressure of one makes the broker take the other's parameters, which come back; a
worker is killed in mid-stream, then the broker; at the end everything is free again. Each finding is
one JSON object a line, as in check_report.h.

Answers are greedy and compared token by token with those of a calm run. Steps are not the same ones in
both runs, and steps of other sizes use other kernels, so bfloat16's last bits may differ: on an H200
the log-probabilities of the same tokens were up to 0.17 apart in two runs. Two answers agree if before
their first difference those of their tokens are within MARGIN, and if at that position each run ranks
the other's token at most 2 * MARGIN behind its own, which is what errors of both tokens can turn round.
What comes behind a first difference is another text and is not compared. How sharp this is: answers to
different questions must not agree, which is checked; of prompts that differ in one digit one pair in
fifteen does.

With --backend host the same runs on the CPU.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve()
ROOT = HERE.parent.parent.parent
TENANTS = ("alpha", "beta")
MARGIN = 0.25
TIMEOUT_S = 90
MIB = 1 << 20
# Where each program lies below bazel-bin; in a bundle all are in bin/.
PROGRAMS = {
    "palimpsest-broker": "broker/server",
    "palimpsest-worker": "worker/server",
    "palimpsest-router": "router/server",
    "palctl": "tools/palctl",
    "packer": "worker/model",
}
# Sizes that give alpha's parameters away under beta's pressure and take seconds. A CPU is slow.
SIZES = {
    "cuda": dict(slab=8 * MIB, workspace=192 * MIB, sequence=2048, stories=48, story=400, long=1500,
                 spare=20, engine="device: cuda, max_step_tokens: 2048, max_batch_sequences: 64"),
    "host": dict(slab=2 * MIB, workspace=0, sequence=512, stories=12, story=120, long=400,
                 spare=4, engine="threads: 2"),
}

failed = False


def say(check, ok, **more):
    global failed
    failed = failed or not ok
    print(json.dumps({"check": f"node.{check}", "ok": bool(ok), **more}), flush=True)


def program(name):
    packed = ROOT / "bin" / name
    return str(packed if packed.exists() else ROOT / "bazel-bin" / PROGRAMS[name] / name)


def gpu_mebibytes():
    """Used on GPU 0 by everybody; -1 where nvidia-smi does not tell."""
    try:
        query = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return float(subprocess.run(query, capture_output=True, text=True, timeout=30).stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return -1


def shapes(config):
    """Tensors of a Llama-like model: name and shape."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight", (hidden,)
        yield at + "post_attention_layernorm.weight", (hidden,)
        yield at + "self_attn.q_proj.weight", (queries, hidden)
        yield at + "self_attn.k_proj.weight", (keys, hidden)
        yield at + "self_attn.v_proj.weight", (keys, hidden)
        yield at + "self_attn.o_proj.weight", (hidden, queries)
        yield at + "mlp.gate_proj.weight", (inner, hidden)
        yield at + "mlp.up_proj.weight", (inner, hidden)
        yield at + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def image_slabs(config, slab):
    """Every stage (embeddings, layers, head) fills whole slabs. Padding of matrices: 1 %."""
    stages = {}
    for name, shape in shapes(config):
        parts = name.split(".")
        stage = parts[2] if parts[1] == "layers" else parts[1]
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        stages[stage] = stages.get(stage, 0) + size
    return sum(-(-int(size * 1.01) // slab) for size in stages.values())


class Node:
    def __init__(self, folder, model, backend):
        self.folder, self.backend, self.sizes = folder, backend, SIZES[backend]
        self.processes = {}
        self.tokens = {}
        self.image = 0
        self.write_model(model)
        self.write_configs()

    def write_model(self, source):
        model = self.folder / "model"
        model.mkdir()
        for file in source.glob("*.json"):
            shutil.copy(file, model)
        self.config = json.loads((model / "config.json").read_text())

    def secret(self, name, text):
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(text)

    def write_configs(self):
        size = self.sizes
        slab, sequence = size["slab"], size["sequence"]
        token_bytes = 4 * self.config["num_key_value_heads"] * self.config["head_dim"]
        token_bytes *= self.config["num_hidden_layers"]
        # Two blocks of 16 tokens more than the sequence: its unfilled block and the null block.
        floor = (image_slabs(self.config, slab) - (-size["workspace"] // slab) -
                 (-(sequence + 32) * token_bytes // slab) + 1)
        self.pool = 2 * floor + size["spare"]
        (self.folder / "secrets").mkdir(mode=0o700)
        for tenant in TENANTS:
            self.tokens[tenant] = secrets.token_hex(24)
            self.secret(f"secrets/{tenant}", secrets.token_hex(32))
            self.secret(f"secrets/{tenant}.token", self.tokens[tenant])
        self.secret("secrets/router", secrets.token_hex(32))
        self.secret("secrets/tenants", "".join(f"{t} {self.tokens[t]}\n" for t in TENANTS))
        broker = [
            "node: check", "state_dir: state", "control_socket: broker.sock",
            "descriptor_socket: descriptors.sock", "metrics_listen: 127.0.0.1:0",
            f"packer: {program('packer')}",
            "policy: {min_residence: 10ms, residence_restores: 0}",
            f"pool: {{backend: {self.backend}, slab_bytes: {slab // MIB} MiB, "
            f"bytes: {self.pool * slab // MIB} MiB}}", "tenants:",
        ]
        router = [
            "listen: unix:router.sock", "metrics_listen: 127.0.0.1:0", "auth_file: secrets/tenants",
            "worker_token_file: secrets/router", "health: {interval: 100ms, timeout: 2s}", "tenants:",
        ]
        for tenant in TENANTS:
            broker += [
                f"  - name: {tenant}", f"    secret_file: secrets/{tenant}",
                f"    model: {{path: model, load_format: dummy, max_sequence_tokens: {sequence}}}",
                f"    workspace: {size['workspace'] // MIB} MiB",
                f"    floor: {floor * slab // MIB} MiB",
            ]
            router += [
                f"  - name: {tenant}",
                f"    models: [{{name: dummy, path: model, workers: [\"unix:{tenant}.sock\"]}}]",
            ]
            (self.folder / f"{tenant}.yaml").write_text("\n".join([
                f"tenant: {tenant}", f"secret_file: secrets/{tenant}",
                f"model: {{name: dummy, path: model, max_sequence_tokens: {sequence}}}",
                "broker: {control_socket: broker.sock, descriptor_socket: descriptors.sock}",
                f"listen: unix:{tenant}.sock", "router_token_file: secrets/router",
                f"engine: {{{size['engine']}, kv_shrink_delay: 500ms}}",
            ]) + "\n")
        (self.folder / "broker.yaml").write_text("\n".join(broker) + "\n")
        (self.folder / "router.yaml").write_text("\n".join(router) + "\n")
        (self.folder / "node.yaml").write_text(
            "broker: broker.sock\nrouter: unix:router.sock\ntokens:\n" +
            "".join(f"  {t}: secrets/{t}.token\n" for t in TENANTS))

    def start(self, name):
        kind = "palimpsest-worker" if name in TENANTS else f"palimpsest-{name}"
        log = open(self.folder / f"{name}.log", "ab")
        self.processes[name] = subprocess.Popen(
            [program(kind), "--config", f"{name}.yaml"], cwd=self.folder, stdin=subprocess.DEVNULL,
            stdout=log, stderr=subprocess.STDOUT)

    def kill(self, name):
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def palctl(self, *arguments):
        return subprocess.Popen([program("palctl"), "--node", "node.yaml", *arguments], cwd=self.folder,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def status(self):
        process = self.palctl("status", "--json")
        out, _ = process.communicate()
        return json.loads(out) if process.returncode == 0 else None

    def tenant(self, name, status=None):
        status = status or self.status()
        return next((t for t in status["tenants"] if t["tenant"] == name), {}) if status else {}

    def wait_for(self, what, condition):
        """Seconds until the condition held; ends the check if it does not."""
        start = time.monotonic()
        while not condition():
            dead = [n for n, p in self.processes.items() if p.poll() is not None]
            late = time.monotonic() - start > TIMEOUT_S
            if dead or late:
                logs = "\n".join(self.log_end(n) for n in dead or self.processes)
                say("run", False, note=f"{what}: {dead or 'nothing'} ended while waiting; {logs}")
                raise SystemExit(1)
            time.sleep(0.02)
        return time.monotonic() - start

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def log_end(self, name):
        return f"{name}: " + " / ".join(self.log(name).splitlines()[-6:])

    def ready(self):
        status = self.status()
        if not status:
            return False
        healthy = {t["tenant"] for t in status["router"] if all(w["healthy"] for w in t["workers"])}
        return healthy == {t["tenant"] for t in status["tenants"] if t["attached"]} == set(TENANTS)

    def generate(self, tenant, prompts, tokens, concurrency=1):
        """The answers in the order of the prompts; None if one failed."""
        file = self.folder / f"prompts-{tenant}-{threading.get_ident()}"
        file.write_text("\n".join(prompts) + "\n")
        process = self.palctl("generate", "--tenant", tenant, "--chat", "--temperature", "0",
                              "--ignore-eos", "--max-tokens", str(tokens), "--logprobs", "20",
                              "--concurrency", str(concurrency), "--prompts-file", str(file), "--json",
                              "--timeout", str(TIMEOUT_S))
        out, error = process.communicate()
        if process.returncode != 0:
            say("answers", False, note=f"{tenant}: {error.strip()}")
            return None
        answers = {a["prompt"]: a for a in map(json.loads, out.splitlines())}
        return [answers[p] for p in prompts]

    def stop(self):
        dirty = []
        for name in ("router", *TENANTS):
            if name in self.processes:
                self.processes[name].send_signal(signal.SIGTERM)
        for name in ("router", *TENANTS):
            if name in self.processes and self.processes.pop(name).wait(TIMEOUT_S) != 0:
                dirty.append(name)
        return dirty

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def lead(chosen, token):
    """How far the chosen token is before another at one position; infinite if that is not listed."""
    listed = [t["logprob"] for t in chosen["top"] if t["token_id"] == token]
    return chosen["logprob"] - listed[0] if listed else float("inf")


def agree(calm, got):
    """(whether two answers agree, None or the first difference: position and larger lead there, largest
    difference of log-probabilities before it)."""
    largest = 0.0
    for i, (a, b) in enumerate(zip(calm["logprobs"], got["logprobs"])):
        if a["token_id"] != b["token_id"]:
            behind = max(lead(a, b["token_id"]), lead(b, a["token_id"]))
            return behind <= 2 * MARGIN and largest <= MARGIN, (i, behind), largest
        largest = max(largest, abs(a["logprob"] - b["logprob"]))
    return largest <= MARGIN and len(calm["token_ids"]) == len(got["token_ids"]), None, largest


def compare(check, calm, got):
    if calm is None or got is None:
        say(check, False, note="a run gave no answers")
        return
    results = [agree(a, b) for a, b in zip(calm, got)]
    equal = sum(r[1] is None for r in results)
    firsts = [r[1] for r in results if r[1] is not None]
    compared = sum(len(a["token_ids"]) if r[1] is None else r[1][0] for a, r in zip(calm, results))
    note = (f"{equal} of {len(results)} answers have the same tokens throughout, {compared} tokens in all "
            f"before first differences; largest difference of log-probabilities there "
            f"{max(r[2] for r in results):.3g}, allowed {MARGIN}")
    if firsts:
        note += (f"; first differences at tokens {min(firsts)[0]} to {max(firsts)[0]}, leads there up to "
                 f"{max(f[1] for f in firsts):.3g}, allowed {2 * MARGIN}")
    say(check, len(calm) == len(got) and all(r[0] for r in results), value=equal / len(results),
        unit="equal", note=note)


class InBackground:
    def __init__(self, function, *arguments):
        self.value = None
        self.thread = threading.Thread(target=self.run, args=(function, arguments))
        self.thread.start()

    def run(self, function, arguments):
        self.value = function(*arguments)

    def running(self):
        return self.thread.is_alive()

    def result(self):
        self.thread.join()
        return self.value


def pressure(node, stories, stories_calm, questions, questions_calm):
    """beta tells all stories at once; as soon as that has cost alpha parameters, alpha is asked."""
    size = node.sizes
    telling = InBackground(node.generate, "beta", stories, size["story"], size["stories"])
    answering = None
    least, most = node.image, 0
    while telling.running():
        status = node.status()
        if status:
            least = min(least, node.tenant("alpha", status)["parameter_slabs"])
            most = max(most, node.tenant("beta", status)["kv_slabs"])
        if least < node.image and answering is None:
            answering = InBackground(node.generate, "alpha", questions, size["story"])
        time.sleep(0.02)
    say("pressure_takes_parameters", least < node.image, value=node.image - least, unit="slabs",
        note=f"of alpha's {node.image} while beta held up to {most} slabs of KV cache")
    compare("tokens_under_pressure", stories_calm, telling.result())
    answers = answering.result() if answering else None
    compare("tokens_of_the_one_that_gave_way", questions_calm, answers)
    if answers:
        say("first_token_after_restore", True, value=answers[0]["ttft_seconds"] * 1e3, unit="ms",
            note="of the tenant that gave way, while the other still streams")
    moved, preempted = (sum(map(int, re.findall(rf"{word}=(\d+)", node.log("beta"))))
                        for word in ("moved_blocks", "preempted"))
    say("blocks_moved", True, value=moved, unit="blocks",
        note=f"to give KV slabs back; {preempted} sequences preempted")


def restored(node):
    status = node.status()
    restores = [t for t in status["transfers"] if t["kind"] == "restore" and t["tenant"] == "alpha"]
    back = node.tenant("alpha", status)["parameter_slabs"]
    say("parameters_come_back", back == node.image and len(restores) > 1,
        note=f"{back} of {node.image} slabs; {len(restores)} restores, the last of "
             f"{restores[-1]['slabs']} slabs in {restores[-1]['seconds'] * 1e3:.1f} ms"
        if restores else "no restore")


def kill_worker(node, question, long_calm, beta_calm):
    size = node.sizes
    doomed = node.palctl("generate", "--tenant", "beta", "--chat", "--temperature", "0", "--ignore-eos",
                         "--max-tokens", str(size["long"]), "--stream", "--json", question)
    doomed.stdout.readline()
    alive = InBackground(node.generate, "alpha", [question], size["long"])
    for _ in range(10):
        doomed.stdout.readline()
    node.kill("beta")
    killed = time.monotonic()
    node.wait_for("the return of beta's slabs", lambda: (lambda t: t and not t["attached"] and not (
        t["parameter_slabs"] + t["kv_slabs"] + t["workspace_slabs"]))(node.tenant("beta")))
    say("killed_workers_slabs_return", True, value=(time.monotonic() - killed) * 1e3, unit="ms",
        note="SIGKILL in mid-stream to the last slab, as palctl saw it")
    doomed.communicate()
    say("killed_workers_request_ends", doomed.returncode != 0)
    compare("other_tenants_stream_is_unharmed", [long_calm], alive.result())
    node.start("beta")
    seconds = node.wait_for("beta's return", node.ready)
    say("worker_start", True, value=seconds, unit="s", note="to ready, with the image in memory")
    compare("tokens_after_kill", beta_calm, node.generate("beta", [question], size["story"]))


def kill_broker(node, question, long_calm):
    alive = InBackground(node.generate, "alpha", [question], node.sizes["long"])
    node.wait_for("alpha's stream", lambda: node.tenant("alpha").get("running_sequences"))
    node.kill("broker")
    node.start("broker")
    compare("stream_survives_the_broker", [long_calm], alive.result())
    node.wait_for("the workers' return", lambda: (lambda s: s and all(
        t["attached"] for t in s["tenants"]) and not s["quarantined_slabs"])(node.status()))
    node.wait_for("readiness", node.ready)
    status = node.status()
    states = ("free", "granted", "revoking", "cleaning", "quarantined")
    total = sum(status[f"{s}_slabs"] for s in states)
    say("every_slab_survives_the_broker", total == node.pool, note=f"{total} of {node.pool}")


def finish(node, before):
    say("processes_end_clean", not (dirty := node.stop()), note=", ".join(dirty))
    node.wait_for("free slabs", lambda: (node.status() or {}).get("free_slabs") == node.pool)
    say("every_slab_free_at_the_end", True, note=f"{node.pool} of {node.pool}")
    node.processes["broker"].send_signal(signal.SIGTERM)
    code = node.processes.pop("broker").wait(TIMEOUT_S)
    say("broker_ends_clean", code == 0, note=f"exit status {code}")
    if before >= 0:
        deadline = time.monotonic() + 5
        while (after := gpu_mebibytes()) > before + 64 and time.monotonic() < deadline:
            time.sleep(0.2)
        say("no_memory_left_behind", after <= before + 64, note=f"{before} MiB before, {after} after")


def run(node, before):
    size = node.sizes
    node.start("broker")
    node.wait_for("the broker's answer", node.status)
    if before >= 0:
        say("broker_memory", True, value=gpu_mebibytes() - before - node.pool * size["slab"] / MIB,
            unit="MiB", note="what the broker takes of the GPU beside the pool")
    used = gpu_mebibytes()
    for name in (*TENANTS, "router"):
        node.start(name)
    seconds = node.wait_for("readiness", node.ready)
    say("ready", True, value=seconds, unit="s",
        note="both workers, the image packed and algorithms measured in between")
    if before >= 0:
        say("worker_memory", True, value=(gpu_mebibytes() - used) / 2, unit="MiB",
            note="what each worker takes beside the pool: context, kernels, graphs")
    node.image = node.tenant("alpha")["image_slabs"]

    questions = ["List three prime numbers.", "Why is the sky blue?", "How do I repair a broken clock?",
                 "What does a baker do before dawn, and why?"]
    stories = [f"Write story number {i}." for i in range(size["stories"])]
    calm_alpha = node.generate("alpha", questions, size["story"])
    calm_beta = node.generate("beta", stories, size["story"], 4)
    long_calm = node.generate("alpha", questions[:1], size["long"])
    killed_calm = node.generate("beta", questions[:1], size["story"])
    if None in (calm_alpha, calm_beta, long_calm, killed_calm):
        return
    alone = long_calm[0]
    say("token_of_one_stream", True, unit="ms",
        value=(alone["seconds"] - alone["ttft_seconds"]) * 1e3 / (len(alone["token_ids"]) - 1),
        note=f"as the client sees it, over {len(alone['token_ids'])} tokens")
    say("different_questions_disagree",
        not any(agree(a, b)[0] for a, b in itertools.combinations(calm_alpha, 2)))
    compare("tenants_agree", [calm_alpha[0]], killed_calm)
    compare("tokens_when_repeated", calm_alpha, node.generate("alpha", questions, size["story"]))
    pressure(node, stories, calm_beta, questions, calm_alpha)
    compare("tokens_after_restore", calm_alpha, node.generate("alpha", questions, size["story"]))
    restored(node)
    kill_worker(node, questions[0], long_calm[0], killed_calm)
    kill_broker(node, questions[0], long_calm[0])
    finish(node, before)


def default_model():
    packed = ROOT / "model"
    cache = pathlib.Path(os.environ.get("PALIMPSEST_CACHE", pathlib.Path.home() / ".cache/palimpsest"))
    return packed if packed.exists() else cache / "models/SmolLM2-135M-Instruct"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=SIZES, default="cuda")
    parser.add_argument("--model", type=pathlib.Path, default=default_model(),
                        help="folder of config.json and tokenizer (default: %(default)s)")
    parser.add_argument("--logs", type=pathlib.Path, help="folder that gets the processes' logs")
    arguments = parser.parse_args()
    # Short: a Unix socket's path has at most 107 characters.
    folder = pathlib.Path(tempfile.mkdtemp(prefix="palimpsest-", dir="/tmp"))
    before = gpu_mebibytes() if arguments.backend == "cuda" else -1
    node = None
    try:
        node = Node(folder, arguments.model, arguments.backend)
        run(node, before)
    finally:
        if node:
            node.end()
        if arguments.logs:
            arguments.logs.mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy(log, arguments.logs)
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
