#!/usr/bin/env python3
"""What tiers below T0 gain over a prefix cache in T0 alone, at every point of results of `palctl bench remap` with
conversations, beside what they are to gain at the best one. Exit status 1 if a target is missed.

Every system is held against `t0_lru` at the same load of the same run. Times until the first token are compared by
their means; P50, P90 and P99 stand beside. More than one result of a point: the last one.
"""
import argparse
import json
import pathlib
import sys

from remap_report import cell, load_of, number, table, varying

BASELINE = "t0_lru"
JUDGED = "all_tiers"
# Times lower, times higher.
TARGETS = {"ttft": 2.1, "tokens": 2.9}
TITLES = {"ttft": "TTFT lower", "tokens": "tokens/s higher"}
QUANTILES = ("mean", "p50", "p90", "p99")


def over(a, b):
    return a / b if b else None


def times(value):
    return "" if value is None else f"{value:.2f}x"


def gains(base, point):
    """How many times lower and higher; None where that cannot be said."""
    found = {q: over(base["ttft"][q], point["ttft"][q]) for q in QUANTILES}
    found["tokens"] = over(point["output_tokens_per_s"], base["output_tokens_per_s"])
    return found


def pairs(points):
    bases = {load_of(p): p for p in points if p["system"] == BASELINE}
    return [(p, gains(bases[load_of(p)], p)) for p in points if p["system"] != BASELINE and load_of(p) in bases]


def tier_names(points):
    return list(dict.fromkeys(tier["tier"] for p in points for tier in p["hits"]["tiers"]))


def hits(point, name):
    return next((f"{100 * tier['hits']:.1f} %" for tier in point["hits"]["tiers"] if tier["tier"] == name), "")


def measured(points):
    columns, tiers = varying(points), tier_names(points)
    rows = [[p["system"], *(cell(p, key) for key, _ in columns), *(number(p["ttft"][q]) for q in QUANTILES),
             number(p["output_tokens_per_s"], 1), p["finished"], p["unfinished"], p["failed"],
             f"{100 * p['hits']['t0']:.1f} %", *(hits(p, name) for name in tiers),
             f"{100 * p['hits']['computed']:.1f} %", p["preemptions"]] for p in points]
    return table(["system", *(title for _, title in columns), "TTFT mean s", "P50", "P90", "P99", "tokens/s", "finished",
                  "unfinished", "failed", "hits T0", *tiers, "computed", "preemptions"], rows)


def compared(points):
    columns = varying(points)
    rows = [[p["system"], *(cell(p, key) for key, _ in columns), *(times(found[q]) for q in QUANTILES),
             times(found["tokens"])] for p, found in pairs(points)]
    return table(["system", *(title for _, title in columns), "TTFT mean lower", "P50", "P90", "P99", "tokens/s higher"],
                 rows)


def best_points(points):
    rows, met = [], True
    for quantity, target in TARGETS.items():
        key = "mean" if quantity == "ttft" else quantity
        found = [(g[key], p) for p, g in pairs(points) if p["system"] == JUDGED and g[key] is not None]
        value, point = max(found, key=lambda pair: pair[0], default=(None, None))
        reached = value is not None and value >= target
        met = met and reached
        where = "no such point" if point is None else f"{point['run']}, {point['rate']:g}/s"
        rows.append([TITLES[quantity], times(value), times(target), where, "met" if reached else "missed"])
    return table(["at the best point", "measured", "target", "where", ""], rows), met


def report(results):
    points = list({(load_of(p), p["system"]): p for r in results for p in r["points"] if "hits" in p}.values())
    parts = []
    for run in dict.fromkeys(p["run"] for p in points):
        chosen = [p for p in points if p["run"] == run]
        parts += [f"#### {run}", measured(chosen), f"Against {BASELINE}:", compared(chosen)]
    best, met = best_points(points)
    return "\n\n".join([*parts, best]), met


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    text, met = report([json.loads(file.read_text()) for file in parser.parse_args().files])
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
