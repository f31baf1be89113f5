"""The processes of one node, from the YAML files under deploy/local: prepared, started, awaited, stopped."""

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
import time

from demo.output import Waiting, fail, say

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# A folder that tools/bundle made: programs in bin/, no Bazel.
PACKED = (ROOT / "bin/palimpsest-broker").exists()
CACHE = pathlib.Path(os.environ.get("PALIMPSEST_CACHE", pathlib.Path.home() / ".cache/palimpsest"))
MODEL = "SmolLM2-135M-Instruct"
TENANTS = ("alpha", "beta")
PROGRAMS = {"palimpsest-broker": "broker/server", "palimpsest-worker": "worker/server",
            "palimpsest-router": "router/server", "palctl": "tools/palctl"}
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30
# What a worker's log says of the broker's work on its image.
IMAGE_PROGRESS = re.compile(r'the broker prepares the parameter image phase=(\w+) done="(.*?)" total="(.*?)"')
LOG_TAIL_BYTES = 4096


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


def image_progress(log):
    """How far a worker's parameter image is, from the end of the worker's log; empty if that is about
    something else."""
    lines = log.splitlines()
    found = IMAGE_PROGRESS.search(lines[-1]) if lines else None
    return "{} {} of {}".format(*found.groups()) if found else ""


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
        self.last_error = ""

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

    def address(self, name, key):
        """HOST:PORT at which the process of that name listens: `key` of its YAML file."""
        return re.search(rf"^{key}: *(\S+)", (self.folder / f"{name}.yaml").read_text(), re.MULTILINE)[1]

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
        say(f"  started {name} (pid {process.pid})")

    def start_all(self):
        self.start("broker")
        self.wait_for("the broker's answer", self.status)
        for tenant in TENANTS:
            self.start(tenant)
        self.start("router")
        self.wait_for("both workers' readiness", self.ready)

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

    def loading(self):
        """How far the images of the started workers are, in words."""
        found = []
        for name, _ in self.processes:
            with open(self.folder / f"{name}.log", "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                if progress := image_progress(log.read().decode(errors="replace")):
                    found.append(f"{name}'s image: {progress}")
        return ", ".join(found)

    def wait_for(self, what, condition, timeout_s=START_TIMEOUT_S):
        """Shows the wait; fails when a process ends or after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        with Waiting(what) as waiting:
            while not condition():
                self.check_alive()
                if time.monotonic() > deadline:
                    fail(f"{what} did not happen within {timeout_s} s; logs are in {self.folder}\n"
                         f"{self.last_error}")
                waiting.update(self.loading())
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
