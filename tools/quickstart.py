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
import contextlib
import ctypes
import json
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A folder that tools/bundle made: programs in bin/, no Bazel.
PACKED = (ROOT / "bin/palimpsest-broker").exists()
CACHE = pathlib.Path(os.environ.get("PALIMPSEST_CACHE", pathlib.Path.home() / ".cache/palimpsest"))
MODEL = "SmolLM2-135M-Instruct"
TENANTS = ("alpha", "beta")
QUESTIONS = {
    "alpha": ["What is the capital of France?", "Write one sentence about the sea."],
    "beta": ["List three prime numbers.", "Explain in two sentences why the sky is blue."],
}
TOPICS = ["a lighthouse", "a market", "a train journey", "an old library", "a storm", "a garden",
          "a mountain path", "a busy kitchen", "a quiet harbour", "a school play", "a long winter",
          "a small island", "a broken clock", "a letter", "a bridge", "a night shift"]
KINDS = ["short", "sad", "funny", "strange"]
# Of the load on beta: kinds of stories, stories at once, tokens of each. A GPU is done with little
# of it before anybody looks.
LOADS = {"host": (1, 16, 288), "cuda": (4, 40, 500)}
CALM_CONCURRENCY = 4
# A conversation about a text, which takes longer to compute than to load.
LOGBOOK = "\n".join(
    f"Day {day}: {weather} from the {wind}; we made {11 * day % 37 + 20} miles and saw {sight}."
    for day, (weather, wind, sight) in enumerate(zip(
        ["A light breeze", "Rain", "A calm sea and fog", "A gale", "Snow"] * 8,
        ["north", "south-west", "east", "west", "south", "north-east"] * 7,
        ["three whales", "no land", "a steamer", "an island with goats", "many birds", "ice", "a wreck"] * 6),
        start=1))
TURNS = [f"This is the logbook of our ship.\n{LOGBOOK}\nSum it up in two sentences.",
         "Which day would you have stayed in port? Say why in one sentence."]
TURN_TOKENS = 40
# Between log-probabilities of the same token in two runs on a GPU.
MARGIN = 0.25
ALTERNATIVES = 20
TIERS = {"dram": "T1 (host memory)", "nvme": "T3 (disk)"}
PROGRAMS = {"palimpsest-broker": "broker/server", "palimpsest-worker": "worker/server",
            "palimpsest-router": "router/server", "palctl": "tools/palctl"}
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30

BOLD, DIM, GREEN, RED, RESET = (
    ("\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("",) * 5)


def heading(text):
    print(f"\n{BOLD}{text}{RESET}", flush=True)


def fail(message):
    raise SystemExit(f"{RED}quickstart: {message}{RESET}")


def gpus():
    """How many GPUs the driver finds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


def choose_backend(wanted):
    """The back-end and why, in words."""
    if wanted != "auto":
        return wanted, "as asked for"
    if not gpus():
        return "host", "no NVIDIA GPU here"
    toolkit = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/nvcc"
    if not PACKED and not toolkit.exists():
        return "host", f"there is a GPU, but no CUDA toolkit to build for it ({toolkit})"
    return "cuda", "there is an NVIDIA GPU"


def give_free_ports(configs):
    ports = {}
    listeners = []
    for name, text in configs.items():
        for port in set(re.findall(r"127\.0\.0\.1:(\d+)", text)) - ports.keys():
            listeners.append(socket.create_server(("127.0.0.1", 0)))
            ports[port] = str(listeners[-1].getsockname()[1])
        configs[name] = re.sub(r"127\.0\.0\.1:(\d+)", lambda m: f"127.0.0.1:{ports[m[1]]}", text)
    for listener in listeners:
        listener.close()


class Cluster:
    """The processes of one node, in a private folder that holds sockets, secrets and logs."""

    def __init__(self, folder, binaries, backend, free_ports):
        self.folder = folder
        self.binaries = binaries
        self.backend = backend
        self.free_ports = free_ports
        self.model = ROOT / "model" if PACKED else CACHE / "models" / MODEL
        self.dummy = PACKED and not list(self.model.glob("*.safetensors"))
        self.processes = []

    def prepare(self):
        if not (self.model / "config.json").exists():
            fail(f"there is no model at {self.model}; run tools/setup")
        if self.running_broker():
            fail(f"a node is already running in {self.folder}; stop it first")
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "secrets").mkdir(parents=True, mode=0o700)
        (self.folder / "models").mkdir()
        (self.folder / "models" / MODEL).symlink_to(self.model)
        tokens = {}
        for tenant in TENANTS:
            self.secret(f"secrets/{tenant}", secrets.token_hex(32))
            tokens[tenant] = secrets.token_hex(24)
            self.secret(f"secrets/{tenant}.token", tokens[tenant])
        self.secret("secrets/router", secrets.token_hex(32))
        self.secret("secrets/tenants", "".join(f"{t} {tokens[t]}\n" for t in TENANTS))
        self.copy_configs()

    def copy_configs(self):
        """deploy/local, and over it deploy/local/BACKEND."""
        configs = {}
        for folder in (ROOT / "deploy/local", ROOT / "deploy/local" / self.backend):
            configs.update((file.name, file.read_text()) for file in folder.glob("*.yaml"))
        if self.free_ports:
            give_free_ports(configs)
        if self.dummy:
            configs["broker.yaml"] = configs["broker.yaml"].replace(
                f"{MODEL}, ", f"{MODEL}, load_format: dummy, ")
        for name, text in configs.items():
            (self.folder / name).write_text(text)

    def secret(self, name, text):
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(text)

    def running_broker(self):
        pid_file = self.folder / "quickstart.pid"
        if not pid_file.exists():
            return False
        with contextlib.suppress(ValueError, ProcessLookupError, PermissionError):
            os.kill(int(pid_file.read_text()), 0)
            return True
        return False

    def program(self, name):
        return str(self.binaries / name if PACKED else self.binaries / PROGRAMS[name] / name)

    def start(self, name):
        log = open(self.folder / f"{name}.log", "ab")
        kind = "palimpsest-worker" if name in TENANTS else f"palimpsest-{name}"
        command = [self.program(kind), "--config", f"{name}.yaml"]
        process = subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=subprocess.STDOUT, start_new_session=True)
        self.processes.append((name, process))
        print(f"  started {name} (pid {process.pid})", flush=True)

    def palctl(self, *args, **kwargs):
        command = [self.program("palctl"), "--node", "node.yaml", *args]
        return subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, **kwargs)

    def status(self):
        """The broker's status as palctl prints it, or None while it does not answer."""
        process = self.palctl("status", "--json")
        out, self.last_error = process.communicate()
        return json.loads(out) if process.returncode == 0 else None

    def check_alive(self):
        for name, process in self.processes:
            if process.poll() is not None:
                log = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
                fail(f"{name} exited with {process.returncode}; its last lines:\n  " +
                     "\n  ".join(log[-15:]))

    def wait_for(self, what, condition):
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            self.check_alive()
            if time.monotonic() > deadline:
                fail(f"{what} did not happen within {START_TIMEOUT_S} s; logs are in {self.folder}\n"
                     f"{getattr(self, 'last_error', '')}")
            time.sleep(0.05)

    def serving(self):
        """The tenants with a worker, in the broker's eyes and in the router's."""
        status = self.status() or {}
        attached = {t["tenant"] for t in status.get("tenants", []) if t["attached"]}
        healthy = {t["tenant"] for t in status.get("router", [])
                   if any(w["healthy"] for w in t["workers"])}
        return attached, healthy

    def ready(self):
        return self.serving() == (set(TENANTS), set(TENANTS))

    def stop(self, *names):
        """Ends the named processes, or all, in reverse order of start; returns the names that did not end
        clean."""
        dirty = []
        for name, process in reversed(self.processes):
            if names and name not in names:
                continue
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_TIMEOUT_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.returncode != 0:
                dirty.append(f"{name} (exit {process.returncode})")
        self.processes = [p for p in self.processes if names and p[0] not in names]
        return dirty

    def restart(self, name):
        if dirty := self.stop(name):
            fail(f"did not end clean: {dirty[0]}; its log is in {self.folder}")
        self.wait_for(f"the end of {name}", lambda: not any(name in s for s in self.serving()))
        self.start(name)
        self.wait_for(f"{name}'s readiness", self.ready)


def print_slabs(status, title):
    print(f"  {DIM}{title:<34}{'parameter':>10} {'of image':>9} {'kv':>6}{RESET}")
    for tenant in status["tenants"]:
        print(f"    {tenant['tenant']:<32}{tenant['parameter_slabs']:>10} "
              f"{tenant['image_slabs']:>9} {tenant['kv_slabs']:>6}")
    print(f"    {'(free)':<32}{status['free_slabs']:>10}   of {status['pool_slabs']} slabs", flush=True)


def stage(status, name):
    return {"name": name,
            "slabs": {t["tenant"]: {"parameter": t["parameter_slabs"], "kv": t["kv_slabs"]}
                      for t in status["tenants"]}}


def generate(cluster, tenant, tokens, *args):
    """palctl, asking greedily; on a GPU with what tells a near tie."""
    extra = ["--logprobs", str(ALTERNATIVES)] if cluster.backend == "cuda" else []
    # Random weights would stop at random.
    extra += ["--ignore-eos"] if cluster.dummy else []
    return cluster.palctl("generate", "--tenant", tenant, "--chat", "--temperature", "0",
                          "--max-tokens", str(tokens), "--json", *extra, *args)


def ask(cluster, tenant, prompt):
    """Streams one answer to the terminal; returns palctl's record of it."""
    print(f"  {tenant}: {DIM}{prompt}{RESET}\n    ", end="", flush=True)
    process = generate(cluster, tenant, 64, "--stream", prompt)
    record = None
    for line in process.stdout:
        event = json.loads(line)
        if "delta" in event:
            print(event["delta"], end="", flush=True)
        else:
            record = event
    _, error = process.communicate()
    if process.returncode != 0 or record is None:
        fail(f"{tenant} gave no answer: {error.strip()}")
    print(f"\n    {DIM}first token after {record['ttft_seconds'] * 1e3:.0f} ms, "
          f"{len(record['token_ids'])} tokens{RESET}", flush=True)
    return record


class Conversation:
    """Turns of one conversation, and where the KV of their prompts came from."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.file = cluster.folder / "conversation.json"
        self.first = None

    def ask(self, tenant, turn):
        """Palctl's record of that turn, with how many blocks the broker found in which tier."""
        earlier = []
        if turn > 0:
            earlier = [{"role": "user", "content": TURNS[0]},
                       {"role": "assistant", "content": self.first["text"]}]
        self.file.write_text(json.dumps(earlier))
        before = tier_blocks(self.cluster.status(), tenant, "hit_blocks")
        process = generate(self.cluster, tenant, TURN_TOKENS, "--earlier", str(self.file), TURNS[turn])
        out, error = process.communicate()
        if process.returncode != 0:
            fail(f"{tenant} gave no answer: {error.strip()}")
        record = json.loads(out)
        after = tier_blocks(self.cluster.status(), tenant, "hit_blocks")
        record["blocks"] = {tier: after[tier] - before[tier] for tier in after}
        if turn == 0:
            self.first = record
        came = ", ".join(f"{n} blocks from {TIERS[tier]}" for tier, n in record["blocks"].items() if n)
        usage = record["usage"]
        print(f"  {tenant}, turn {turn + 1}: {usage['prompt_tokens']} tokens, "
              f"{usage['prompt_tokens'] - usage['cached_tokens']} of them computed; "
              f"{came or 'nothing from a tier'}; first token after "
              f"{BOLD}{record['ttft_seconds'] * 1e3:.0f} ms{RESET}", flush=True)
        return record


def tier_blocks(status, tenant, field):
    """One number of the tenant in each tier below T0."""
    return {tier["tier"]: row[field] for tier in status["tiers"] for row in tier["tenants"]
            if row["tenant"] == tenant}


def await_blocks(cluster, what, condition):
    cluster.wait_for(what, lambda: condition(tier_blocks(cluster.status(), "alpha", "blocks")))


def generate_many(cluster, tenant, prompts_file, concurrency):
    """Answers to every prompt of the file, in the file's order; runs in the caller's thread."""
    process = generate(cluster, tenant, LOADS[cluster.backend][2], "--concurrency", str(concurrency),
                       "--prompts-file", str(prompts_file))
    out, error = process.communicate()
    if process.returncode != 0:
        fail(f"{tenant} did not finish its load: {error.strip()}")
    records = [json.loads(line) for line in out.splitlines() if line]
    order = {prompt: i for i, prompt in enumerate(prompts_file.read_text().splitlines())}
    return sorted(records, key=lambda r: order[r["prompt"]])


def apply_pressure(cluster, prompts_file, count):
    """Runs all prompts; returns the answers and the status with the most KV slabs at beta."""
    answers = []
    thread = threading.Thread(
        target=lambda: answers.extend(
            generate_many(cluster, "beta", prompts_file, LOADS[cluster.backend][1])))
    thread.start()
    peak = None
    last = None
    while thread.is_alive():
        cluster.check_alive()
        status = cluster.status()
        if status:
            slabs = stage(status, "")["slabs"]
            if slabs != last:
                print(f"  alpha: {slabs['alpha']['parameter']:>4} parameter {slabs['alpha']['kv']:>4} kv"
                      f"    beta: {slabs['beta']['parameter']:>4} parameter {slabs['beta']['kv']:>4} kv"
                      f"    free: {status['free_slabs']:>4}", flush=True)
                last = slabs
            if peak is None or slabs["beta"]["kv"] >= stage(peak, "")["slabs"]["beta"]["kv"]:
                peak = status
        thread.join(0.1 if cluster.backend == "host" else 0.01)
    if len(answers) != count:
        fail("beta did not answer every prompt of its load")
    return answers, peak


def lead(chosen, token):
    """How far the chosen token is ahead of another at one position; infinite if that is not listed."""
    listed = [t["logprob"] for t in chosen["top"] if t["token_id"] == token]
    return chosen["logprob"] - listed[0] if listed else float("inf")


def equal(expected, got):
    """(whether two answers count as equal, whether every token is the same)"""
    if expected["token_ids"] == got["token_ids"]:
        return True, True
    for a, b in zip(expected.get("logprobs", []), got.get("logprobs", [])):
        if a["token_id"] != b["token_id"]:
            return max(lead(a, b["token_id"]), lead(b, a["token_id"])) <= 2 * MARGIN, False
        if abs(a["logprob"] - b["logprob"]) > MARGIN:
            break
    return False, False


def compare(name, expected, got):
    results = [equal(e, g) for e, g in zip(expected, got, strict=True)]
    wrong = [e["prompt"] for e, (same, _) in zip(expected, results) if not same]
    turned = sum(same and not exact for same, exact in results)
    agree = f"agree, {turned} of them up to a near tie" if turned else "have the same tokens"
    if wrong:
        print(f"  {RED}{name}: {len(wrong)} of {len(expected)} answers differ: {wrong[0]!r}{RESET}")
    else:
        print(f"  {GREEN}{name}: all {len(expected)} answers {agree}{RESET}", flush=True)
    return not wrong


def second_turn(cluster, conversation):
    """Alpha's, with nothing of the conversation in the pool: its worker has just been restarted."""
    cluster.restart("alpha")
    # So that the parameters are back, and the worker knows how long computing takes.
    ask(cluster, "alpha", QUESTIONS["alpha"][0])
    return conversation.ask("alpha", 1)


def go_on(cluster, conversation, result):
    """The conversation's second turn: from host memory, from the disk, and computed by one who has
    nothing of it. Whether its tokens are the same each time, and blocks came from both tiers."""
    heading("A conversation goes on: its KV has left the pool, and comes back from the tiers below")
    from_memory = second_turn(cluster, conversation)
    process = cluster.palctl("trim", "--tier", "dram", "--tenant", "alpha")
    out, error = process.communicate()
    if process.returncode != 0:
        fail(f"palctl trim failed: {error.strip()}")
    print(f"  palctl trim: {out.strip()} host memory for the disk", flush=True)
    await_blocks(cluster, "alpha's blocks on the disk", lambda b: b["dram"] == 0 and b["nvme"] > 0)
    from_disk = second_turn(cluster, conversation)
    print("  beta asks the same; tenants share no block, so it computes everything:")
    computed = conversation.ask("beta", 1)
    result["turns"] = [{key: t[key] for key in ("tenant", "usage", "blocks", "ttft_seconds")}
                       for t in (conversation.first, from_memory, from_disk, computed)]
    same = compare("second turn", [computed] * 2, [from_memory, from_disk])
    came = from_memory["blocks"]["dram"] > 0 and from_disk["blocks"]["nvme"] > 0
    if not came:
        print(f"  {RED}blocks did not come back from both tiers{RESET}")
    return same and came


def demonstrate(cluster):
    result = {"ok": False, "backend": cluster.backend, "weights": "dummy" if cluster.dummy else MODEL,
              "answers": [], "stages": [], "transfers": []}
    kinds, concurrency, _ = LOADS[cluster.backend]
    prompts = [f"Write a {kind} story about {topic}." for kind in KINDS[:kinds] for topic in TOPICS]
    prompts_file = cluster.folder / "prompts.txt"
    prompts_file.write_text("\n".join(prompts) + "\n")

    conversation = Conversation(cluster) if cluster.status()["tiers"] else None

    heading("Questions to both tenants, no pressure")
    if conversation:
        conversation.ask("alpha", 0)
    calm = {t: [ask(cluster, t, q) for q in QUESTIONS[t]] for t in TENANTS}
    print(f"  beta: {len(prompts)} stories, {CALM_CONCURRENCY} at a time ...", flush=True)
    calm_stories = generate_many(cluster, "beta", prompts_file, CALM_CONCURRENCY)
    before = cluster.status()
    print_slabs(before, "slabs before the pressure")

    heading(f"beta under KV pressure: {len(prompts)} stories, {concurrency} at once")
    stories, peak = apply_pressure(cluster, prompts_file, len(prompts))
    print_slabs(peak, "slabs at the height of the pressure")

    heading("alpha again: its parameters come back layer by layer, the prompt follows behind them")
    again = [ask(cluster, "alpha", q) for q in QUESTIONS["alpha"]]
    after = cluster.status()
    print_slabs(after, "slabs afterwards")

    turned = go_on(cluster, conversation, result) if conversation else True

    heading("Movements")
    for t in after["transfers"]:
        result["transfers"].append({k: t[k] for k in ("kind", "slabs", "seconds", "tenant", "role", "reason")})
    for kind in ("revoke", "scrub", "grant", "restore"):
        rows = [t for t in result["transfers"] if t["kind"] == kind]
        slabs, seconds = sum(t["slabs"] for t in rows), sum(t["seconds"] for t in rows)
        if rows:
            print(f"  {kind:<8}{len(rows):>4} times {slabs:>6} slabs {seconds * 1e3:>9.1f} ms in all")

    heading("Tokens against the unpressured run")
    same = compare("alpha", calm["alpha"], again) & compare("beta", calm_stories, stories)
    moved = (stage(peak, "")["slabs"]["alpha"]["parameter"] < stage(before, "")["slabs"]["alpha"]["parameter"]
             and stage(after, "")["slabs"]["alpha"]["parameter"] == before["tenants"][0]["image_slabs"])
    if not moved:
        print(f"  {RED}alpha's parameters were not taken and brought back: nothing was shown{RESET}")
    result["answers"] = [{key: record[key] for key in ("tenant", "prompt", "text", "token_ids")}
                         for record in calm["alpha"] + calm["beta"] + stories + again]
    result["stages"] = [stage(before, "before"), stage(peak, "during"), stage(after, "after")]
    result["ok"] = same and moved and turned
    return result


def run_node(cluster):
    cluster.start("broker")
    cluster.wait_for("the broker's answer", cluster.status)
    for tenant in TENANTS:
        cluster.start(tenant)
    cluster.start("router")
    cluster.wait_for("both workers' readiness", cluster.ready)


def serve(cluster):
    palctl = f"{cluster.program('palctl')} --node {cluster.folder}/node.yaml"
    heading("The node is running; Ctrl-C stops it")
    print(f"""  {palctl} generate --tenant alpha --chat "What is the capital of France?"
  {palctl} status
  {palctl} top
  metrics: http://127.0.0.1:9101/metrics (broker), 9102 (alpha), 9103 (beta), 9104 (router)
  gRPC:    palimpsest.v1.Router on 127.0.0.1:9100 (reflection is on), bearer tokens in
           {cluster.folder}/secrets/tenants
  logs:    {cluster.folder}/*.log""", flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    while not stop.wait(0.5):
        cluster.check_alive()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help="leave the node running until Ctrl-C")
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
    print(f"back-end: {backend} ({why}); model: {MODEL}, weights: {weights}", flush=True)
    (cluster.folder / "quickstart.pid").write_text(str(os.getpid()))
    ok = False
    try:
        heading("Starting one node")
        run_node(cluster)
        result = demonstrate(cluster)
        ok = result["ok"]
        if args.json:
            pathlib.Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
        if args.serve:
            serve(cluster)
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
    finally:
        heading("Stopping")
        dirty = cluster.stop()
        (cluster.folder / "quickstart.pid").unlink(missing_ok=True)
        if dirty:
            print(f"  {RED}did not end clean: {', '.join(dirty)}; logs are in {cluster.folder}{RESET}")
        else:
            print("  every process ended clean", flush=True)
    return 0 if ok and not dirty else 1


if __name__ == "__main__":
    sys.exit(main())
