#!/usr/bin/env python3
"""Tables in Markdown from results of `palctl bench remap` and vllm_remap.py, so that every number in a
document comes from a file. Points of all files stand together; the first file names the machine.

With --against BASELINE also what each system gains over that one at the same load: how much lower its
P99 latencies are and how much higher its throughput.
"""
import argparse
import json
import pathlib


def number(value, digits=3):
    return "" if value is None else f"{value:.{digits}f}"


def percent(value):
    return "" if value is None else f"{100 * value:.1f} %"


def table(titles, rows):
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def total(point, key):
    """Of all tenants' memory; None for a peer, of whose memory nothing is known."""
    if "memory" not in point:
        return None
    return sum(tenant[key] for tenant in point["memory"]["tenants"])


def gib(value):
    return "" if value is None else f"{value / 2**30:.2f}"


def varying(points):
    """Columns beside the system, without those that never change."""
    columns = (("tenants", "tenants"), ("prompt_tokens", "prompt"), ("rate", "requests/s"))
    return [c for c in columns if c[0] == "rate" or len({p[c[0]] for p in points}) > 1]


def load_of(point):
    return tuple(point[key] for key in ("run", "tenants", "prompt_tokens", "rate"))


def cell(point, key):
    return "trace" if key == "prompt_tokens" and point[key] == 0 else f"{point[key]:g}"


def latencies(points):
    columns = varying(points)
    titles = ["system", *(title for _, title in columns), "TTFT P50 s", "P90", "P99", "TBT P50 ms",
              "P99", "tokens/s", "goodput", "preempted", "unfinished", "failed"]
    rows = []
    for p in points:
        rows.append([p["system"], *(cell(p, key) for key, _ in columns),
                     *(number(p["ttft"][q]) for q in ("p50", "p90", "p99")),
                     *(number(1e3 * p["tbt"][q], 1) for q in ("p50", "p99")),
                     number(p["output_tokens_per_s"], 1), percent(p["goodput_share"]),
                     percent(p["preempted_share"]), p["unfinished"], p["failed"]])
    return table(titles, rows)


def memory(points):
    points = [p for p in points if "memory" in p]
    if not points:
        return ""
    columns = varying(points)
    titles = ["system", *(title for _, title in columns), "freed layers (mean, most)", "parameters missing GiB", "stalled s",
              "rotated GiB", "restored GiB", "reversions", "preemptions"]
    rows = []
    for p in points:
        freed = ", ".join(f"{t['name']} {t['mean_freed_layers']:.1f}, {t['most_freed_layers']:.0f}"
                          for t in p["memory"]["tenants"] if t["most_freed_layers"] > 0)
        rows.append([p["system"], *(cell(p, key) for key, _ in columns), freed or "none",
                     gib(total(p, "most_missing_bytes")), number(total(p, "stall_seconds"), 2), gib(total(p, "rotation_bytes")),
                     gib(total(p, "restored_bytes")), total(p, "reversions"), p["preemptions"]])
    return table(titles, rows)


def lower(base, value):
    return f"{100 * (1 - value / base):+.1f} %" if base > 0 else ""


def higher(base, value):
    return f"{100 * (value / base - 1):+.1f} %" if base > 0 else ""


def gains(points, baseline):
    bases = {load_of(p): p for p in points if p["system"] == baseline}
    columns = varying(points)
    rows = []
    for p in points:
        base = bases.get(load_of(p))
        if base is None or p is base:
            continue
        rows.append([p["system"], *(cell(p, key) for key, _ in columns),
                     percent(base["preempted_share"]), lower(base["ttft"]["p99"], p["ttft"]["p99"]),
                     lower(base["tbt"]["p99"], p["tbt"]["p99"]),
                     higher(base["output_tokens_per_s"], p["output_tokens_per_s"])])
    if not rows:
        return ""
    return table(["system", *(title for _, title in columns), f"{baseline} preempts",
                  "P99 TTFT lower by", "P99 TBT lower by", "throughput higher by"], rows)


def report(results, against):
    first = results[0]
    hardware = ", ".join(f"{key} {value}" for key, value in first.get("hardware", {}).items())
    parts = [f"### {first['name']}",
             f"{first['date'][:10]}, commit {first.get('commit', '')[:12]}; {hardware}. Objective: first "
             f"token within {first['objective']['ttft_s']:g} s, 99 % of a request's tokens within "
             f"{1e3 * first['objective']['tbt_s']:g} ms of the one before. Requests arrive for "
             f"{first['duration_s']:g} s."]
    points = [point for result in results for point in result["points"]]
    for run in dict.fromkeys(point["run"] for point in points):
        chosen = [point for point in points if point["run"] == run]
        parts += [f"#### {run}", latencies(chosen), memory(chosen)]
        if against:
            parts.append(gains(chosen, against))
    for result in results:
        for kind in ("refused", "failed"):
            parts += [f"{kind}: {entry['system']}: {entry['message'].splitlines()[0]}"
                      for entry in result.get(kind, [])]
    return "\n\n".join(part for part in parts if part)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    parser.add_argument("--against", metavar="BASELINE", help="a system to compare the others with")
    arguments = parser.parse_args()
    print(report([json.loads(file.read_text()) for file in arguments.files], arguments.against))


if __name__ == "__main__":
    main()
