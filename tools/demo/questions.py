"""Questions to the tenants through palctl: one at a time, many at once, and so many that memory moves."""

import concurrent.futures
import json

from demo.output import DIM, RESET, Waiting, fail, say, stage

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
ALTERNATIVES = 20


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
    say(f"\n    {DIM}first token after {record['ttft_seconds'] * 1e3:.0f} ms, "
        f"{len(record['token_ids'])} tokens{RESET}")
    return record


class Stories:
    """The load on beta: prompts in a file, which palctl asks several at a time."""

    def __init__(self, cluster):
        kinds, self.concurrency, self.tokens = LOADS[cluster.backend]
        self.cluster = cluster
        self.prompts = [f"Write a {kind} story about {topic}." for kind in KINDS[:kinds] for topic in TOPICS]
        self.file = cluster.folder / "prompts.txt"
        self.file.write_text("\n".join(self.prompts) + "\n")

    def generate(self, concurrency, answered=lambda count: None):
        """The answers in the order of the prompts; `answered` is told how many there are so far."""
        process = generate(self.cluster, "beta", self.tokens, "--concurrency", str(concurrency),
                           "--prompts-file", str(self.file))
        records = []
        for line in process.stdout:
            records.append(json.loads(line))
            answered(len(records))
        _, error = process.communicate()
        if process.returncode != 0:
            fail(f"beta did not finish its load: {error.strip()}")
        return sorted(records, key=lambda r: self.prompts.index(r["prompt"]))

    def calm(self):
        count = len(self.prompts)
        with Waiting(f"beta's {count} stories, {CALM_CONCURRENCY} at a time") as waiting:
            return self.generate(CALM_CONCURRENCY, lambda done: waiting.update(f"{done} of {count}"))

    def pressure(self):
        """All at once, while slabs are shown as they move; returns the answers and the status with the most
        KV slabs at beta."""
        peak = self.cluster.status()
        last = None
        # Not a context: an interrupt must not wait for the answers.
        executor = concurrent.futures.ThreadPoolExecutor(1)
        answers = executor.submit(self.generate, self.concurrency)
        executor.shutdown(wait=False)
        while not answers.done():
            self.cluster.check_alive()
            status = self.cluster.status()
            if status:
                slabs = stage(status, "")["slabs"]
                if slabs != last:
                    say(f"  alpha: {slabs['alpha']['parameter']:>4} parameter {slabs['alpha']['kv']:>4} kv"
                        f"    beta: {slabs['beta']['parameter']:>4} parameter {slabs['beta']['kv']:>4} kv"
                        f"    free: {status['free_slabs']:>4}")
                    last = slabs
                if slabs["beta"]["kv"] >= stage(peak, "")["slabs"]["beta"]["kv"]:
                    peak = status
            concurrent.futures.wait([answers], 0.1 if self.cluster.backend == "host" else 0.01)
        return answers.result(), peak
