#!/usr/bin/env python3
"""vLLM with static shares of one GPU under the loads of `palctl bench remap`: what users do today.

Needs vLLM in this Python. LOADS is what `palctl bench remap --config FILE --schedules LOADS` wrote: the
same arrivals and lengths that our systems had. Each tenant is an AsyncLLM in a process of its own with
its share of the memory (gpu_memory_utilization); weights are random, of the exact shape. The result has
the same fields as ours: `palctl bench remap --from ours.json vllm.json` and remap_report.py show both.
"""
import argparse
import asyncio
import datetime
import json
import math
import multiprocessing
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

# What the figures in docs were taken with; attention is vLLM's choice.
for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_DEEP_GEMM", "VLLM_ALLREDUCE_USE_SYMM_MEM"):
    os.environ.setdefault(name, "0")
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
    os.environ.setdefault(name, "1")


def llama(layers, hidden, heads, kv_heads, intermediate, vocabulary):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
            "vocab_size": vocabulary, "max_position_embeddings": 8192, "bos_token_id": 1,
            "eos_token_id": 2}


def opt(layers, hidden, heads):
    return {"architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
            "do_layer_norm_before": True, "torch_dtype": "bfloat16", "num_hidden_layers": layers,
            "hidden_size": hidden, "word_embed_proj_dim": hidden, "num_attention_heads": heads,
            "ffn_dim": 4 * hidden, "vocab_size": 50272, "max_position_embeddings": 8192,
            "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}


# As in tools/palctl/bench_shapes.cc.
SHAPES = {
    "llama3-8b": llama(32, 4096, 32, 8, 14336, 128256),
    "llama2-13b": llama(40, 5120, 40, 40, 13824, 32000),
    "opt-6.7b": opt(32, 4096, 32),
    "opt-13b": opt(40, 5120, 40),
    "opt-30b": opt(48, 7168, 56),
}


def kv_bytes_of_a_token(shape):
    heads = shape.get("num_key_value_heads", shape["num_attention_heads"])
    return 4 * shape["num_hidden_layers"] * heads * (shape["hidden_size"] // shape["num_attention_heads"])


def make_engine(tenant, utilization, longest, options):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    shape = SHAPES[tenant["shape"]]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="palimpsest-peer."))
    (folder / "config.json").write_text(json.dumps(shape))
    told = {}
    if "kv_tokens" in tenant:
        told["kv_cache_memory_bytes"] = tenant["kv_tokens"] * kv_bytes_of_a_token(shape)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=longest, gpu_memory_utilization=utilization, enable_prefix_caching=False,
        max_num_seqs=options.max_batch, max_num_batched_tokens=options.max_step_tokens,
        disable_log_stats=True, cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64, 128], **told))


class Tenant:
    """Runs in a process of its own; speaks with the main one through a pipe."""

    def __init__(self, engine, vocabulary):
        self.engine = engine
        self.vocabulary = vocabulary

    async def ask(self, name, start, request, record):
        """Fills the record as the answer comes; times count from `start`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        due, prompt, tokens = request
        ids = random.Random(name).choices(range(10, self.vocabulary - 10), k=prompt)
        await asyncio.sleep(max(0.0, start + due - time.monotonic()))
        record["sent"] = time.monotonic() - start
        params = SamplingParams(temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True,
                                detokenize=False, output_kind=RequestOutputKind.DELTA)
        async for output in self.engine.generate({"prompt_token_ids": ids}, params, name):
            now = time.monotonic() - start
            record["tokens"] += [now] * len(output.outputs[0].token_ids)
        record["end"] = time.monotonic() - start
        record["finished"] = True

    async def run(self, point, start, requests, cutoff):
        records = [{"due": due, "sent": due, "tokens": [], "end": cutoff, "finished": False}
                   for due, _, _ in requests]
        tasks = [asyncio.create_task(self.ask(f"{point}-{i}", start, request, record))
                 for i, (request, record) in enumerate(zip(requests, records))]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, start + cutoff - time.monotonic()))
        for task in tasks:
            task.cancel()
        for record, end in zip(records, await asyncio.gather(*tasks, return_exceptions=True)):
            if isinstance(end, Exception):
                record["error"] = repr(end)
        return records


def serve(tenant, utilization, longest, options, pipe):
    async def main():
        begin = time.monotonic()
        server = Tenant(make_engine(tenant, utilization, longest, options),
                        SHAPES[tenant["shape"]]["vocab_size"])
        await server.run("warm", time.monotonic(), [(0, 64, 16)] * 4, 300)
        pipe.send(time.monotonic() - begin)
        loop = asyncio.get_running_loop()
        while (message := await loop.run_in_executor(None, pipe.recv)) is not None:
            pipe.send(await server.run(*message))
        server.engine.shutdown()
    asyncio.run(main())


def quantile(values, q):
    """Nearest rank, as tools/load/latency.h has it."""
    values = sorted(values)
    return values[max(1, math.ceil(q * len(values) - 1e-9)) - 1] if values else 0


def gaps_of(record):
    times = record["tokens"] + ([] if record["finished"] or not record["tokens"] else [record["end"]])
    return [later - earlier for earlier, later in zip(times, times[1:])]


def is_good(record, objective):
    if not record["finished"] or record["tokens"][0] - record["due"] > objective["ttft_s"]:
        return False
    gaps = gaps_of(record)
    return sum(gap <= objective["tbt_s"] for gap in gaps) >= 0.99 * len(gaps)


def summarize(records, objective, window):
    """The fields of SummaryJson in tools/palctl/remap_results.h."""
    counted = [r for r in records if "error" not in r]
    ttft = [(r["tokens"][0] if r["tokens"] else r["end"]) - r["due"] for r in counted]
    tbt = [gap for r in counted for gap in gaps_of(r)]
    late = [r["sent"] - r["due"] for r in records]
    good = sum(is_good(r, objective) for r in counted)
    finished = sum(r["finished"] for r in counted)
    return {
        "requests": len(records), "finished": finished, "failed": len(records) - len(counted),
        "unfinished": len(counted) - finished, "good": good, "goodput": good / window,
        "goodput_share": good / len(records) if records else 0,
        "ttft": {"p50": quantile(ttft, 0.5), "p90": quantile(ttft, 0.9), "p99": quantile(ttft, 0.99),
                 "mean": sum(ttft) / len(ttft) if ttft else 0},
        "tbt": {"p50": quantile(tbt, 0.5), "p90": quantile(tbt, 0.9), "p99": quantile(tbt, 0.99),
                "max": quantile(tbt, 1)},
        "output_tokens": sum(len(r["tokens"]) for r in records),
        "output_tokens_per_s": sum(t <= window for r in records for t in r["tokens"]) / window,
        "makespan_s": max((r["end"] for r in records), default=0),
        # vLLM does not say of a request whether it was preempted.
        "preempted_share": None,
        "late": {"p99": quantile(late, 0.99), "max": quantile(late, 1)},
    }


def measure(loads, point, pipes):
    start, cutoff = time.monotonic() + 1, loads["duration_s"] + loads["drain_s"]
    name = f"{point['run']}-{point['load']}"
    for pipe, requests in zip(pipes, point["requests"]):
        pipe.send((name, start, requests, cutoff))
    records = [pipe.recv() for pipe in pipes[:len(point["requests"])]]
    result = {"run": point["run"], "system": "vllm",
              **{key: point[key] for key in ("tenants", "rate", "prompt_tokens", "load")}}
    window = loads["duration_s"]
    everything = [record for tenant in records for record in tenant]
    result.update(summarize(everything, loads["objective"], window))
    result["by_tenant"] = [{**summarize(tenant, loads["objective"], window), "name": spec["name"]}
                           for tenant, spec in zip(records, loads["tenants"])]
    return result


def gpu_bytes():
    text = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
                          check=True, capture_output=True, text=True).stdout
    return int(text.split()[0]) << 20


def start_tenants(loads, options):
    """One after another, as each looks at how much of the GPU is free when it starts; all at once if
    none needs to."""
    total, pipes, processes = gpu_bytes(), [], []
    for i, tenant in enumerate(loads["tenants"]):
        if options.kv_tokens:
            tenant["kv_tokens"] = options.kv_tokens[i]
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(
            target=serve, args=(tenant, tenant["share"] * loads["memory_bytes"] / total,
                                loads["max_sequence_tokens"], options, theirs))
        process.start()
        theirs.close()  # so that its end is seen
        pipes.append(ours)
        processes.append(process)
        if not options.kv_tokens:
            ours.poll(None)
    for tenant, pipe in zip(loads["tenants"], pipes):
        print(f"{tenant['name']}: ready after {pipe.recv():.0f} s", file=sys.stderr, flush=True)
    return pipes, processes


def run(loads, options):
    import vllm
    result = {key: loads[key] for key in ("name", "objective", "duration_s", "drain_s")}
    result["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    result["vllm"] = vllm.__version__
    if options.kv_tokens:
        result["kv_tokens"] = options.kv_tokens
    result["points"] = []
    pipes, processes = start_tenants(loads, options)
    saturated = set()
    for point in loads["points"]:
        series = (point["run"], point["prompt_tokens"])
        if point["tenants"] != len(loads["tenants"]) or series in saturated:
            continue
        if options.runs and point["run"] not in options.runs:
            continue
        if options.rates and point["rate"] not in options.rates:
            continue
        measured = measure(loads, point, pipes)
        if measured["goodput_share"] < loads["stop_below"]:
            saturated.add(series)
        result["points"].append(measured)
        print(json.dumps(measured), file=sys.stderr, flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("loads", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path, help="file for the JSON")
    parser.add_argument("--runs", nargs="*", help="only these (default: all)")
    parser.add_argument("--rates", type=float, nargs="*", help="only these (default: all)")
    parser.add_argument("--kv-tokens", type=int, nargs="*", metavar="TOKENS",
                        help="of each tenant's KV cache: what vLLM says when it starts without this "
                             "option. Then all start at once")
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--max-step-tokens", type=int, default=2048)
    options = parser.parse_args()
    loads = json.loads(options.loads.read_text())
    if options.kv_tokens and len(options.kv_tokens) != len(loads["tenants"]):
        parser.error(f"--kv-tokens: expected {len(loads['tenants'])} numbers")
    multiprocessing.set_start_method("spawn")
    run(loads, options)


if __name__ == "__main__":
    main()
