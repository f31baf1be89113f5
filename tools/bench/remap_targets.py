#!/usr/bin/env python3
"""What remapping gains over the baselines at each load, beside what it is to gain, from results of `palctl bench
remap` and vllm_remap.py. Exit status 1 if a target is missed.

A system whose name begins with "remap" is held against recompute, swap, static and vllm at the same load of the same
run; one whose name ends in "_temporal" against those that do. Where its parameters come from a peer GPU ("peer" in
its name) or turns go round, and recompute preempts at least 1 % of its requests, it has targets against recompute,
and at its best points higher ones; elsewhere it is to be within 2 % of the best baseline. Over PCIe with all tenants
at once nothing is asked. Against swap the best load counts. More than one result of a point: the last one.
"""
import argparse
import json
import pathlib
import sys

from remap_report import cell, load_of, percent, table, varying

# P99 until the first token and between tokens lower by so many percent, tokens a second higher.
AT_EACH_POINT = {"ttft": 20.7, "tbt": 44.8, "tokens": 6.6}
AT_THE_BEST = {"ttft": 99.3, "tbt": 82.5, "tokens": 86.7}
AGAINST_SWAP = {"ttft": 93.6, "tbt": 35.0, "tokens": 47.0}
WITHIN = -2.0
PREEMPTS = 0.01
TITLES = {"ttft": "P99 TTFT lower", "tbt": "P99 TBT lower", "tokens": "tokens/s higher"}
BASELINES = ("recompute", "swap", "static", "vllm")


def values(point):
    return {"ttft": point["ttft"]["p99"], "tbt": point["tbt"]["p99"], "tokens": point["output_tokens_per_s"]}


def gain(quantity, base, value):
    """In percent of the baseline; None where that is nothing."""
    if not base or value is None:
        return None
    return 100 * (value / base - 1 if quantity == "tokens" else 1 - value / base)


def best(quantity, found):
    known = [value for value in found if value is not None]
    return (max if quantity == "tokens" else min)(known) if known else None


def baselines_of(point, points):
    suffix = "_temporal" if point["system"].endswith("_temporal") else ""
    found = {p["system"].removesuffix("_temporal"): p for p in points
             if load_of(p) == load_of(point) and p["system"].endswith("_temporal") == bool(suffix)}
    return {name: found[name] for name in BASELINES if name in found}


def judge(point, points):
    """The gains over recompute, over the best of all and over swap; what is asked of them; and of what is missed."""
    bases = baselines_of(point, points)
    if "recompute" not in bases:
        return None
    own = values(point)
    preempted = bases["recompute"]["preempted_share"] or 0
    over = {name: {q: gain(q, values(base)[q], own[q]) for q in own} for name, base in bases.items()}
    over["best"] = {q: gain(q, best(q, [values(base)[q] for base in bases.values()]), own[q]) for q in own}
    of_interest = "peer" in point["system"] or point["system"].endswith("_temporal")
    if not of_interest:
        kind, asked, against = "none", {}, "recompute"
    elif preempted >= PREEMPTS:
        kind, asked, against = "gain", AT_EACH_POINT, "recompute"
    else:
        kind, asked, against = "even", dict.fromkeys(own, WITHIN), "best"
    missed = [q for q, least in asked.items() if over[against][q] is None or over[against][q] < least]
    return {"point": point, "preempted": preempted, "over": over, "against": against, "kind": kind, "missed": missed}


def signed(value):
    return "" if value is None else f"{value:+.1f} %"


def rows_of(judged):
    columns = varying([j["point"] for j in judged])
    asked = {"gain": "gain", "even": "within 2 % of the best", "none": "nothing"}
    rows = []
    for j in judged:
        verdict = {"none": "", "gain": "met", "even": "met"}[j["kind"]]
        if j["missed"]:
            verdict = "missed: " + ", ".join(TITLES[q].rsplit(" ", 1)[0] for q in j["missed"])
        rows.append([j["point"]["system"], *(cell(j["point"], key) for key, _ in columns), percent(j["preempted"]),
                     j["against"] if j["against"] == "recompute" else "the best",
                     *(signed(j["over"][j["against"]][q]) for q in TITLES), asked[j["kind"]], verdict])
    return table(["system", *(title for _, title in columns), "recompute preempts", "against",
                  *TITLES.values(), "asked", ""], rows)


def summary(judged):
    """The best points of all runs, and those against swap."""
    gaining = [j for j in judged if j["kind"] == "gain"]
    rows, missed = [], False
    for title, targets, name, chosen in (
            ("at the best point over recompute", AT_THE_BEST, "recompute", gaining),
            ("at the best load over swap", AGAINST_SWAP, "swap",
             [j for j in judged if j["kind"] != "none" and "swap" in j["over"]])):
        for quantity, target in targets.items():
            found = [(j["over"][name][quantity], j["point"]) for j in chosen if j["over"][name][quantity] is not None]
            value, point = max(found, key=lambda pair: pair[0], default=(None, None))
            met = value is not None and value >= target
            missed = missed or not met
            where = "no such point" if point is None else f"{point['system']}, {point['run']}, {point['rate']:g}/s"
            rows.append([TITLES[quantity], title, signed(value), f"{target:+.1f} %", where, "met" if met else "missed"])
    return table(["", "", "measured", "target", "where", ""], rows), missed


def report(results):
    points = list({(load_of(p), p["system"]): p for result in results for p in result["points"]}.values())
    judged = [j for j in (judge(p, points) for p in points if p["system"].startswith("remap")) if j is not None]
    parts = []
    for run in dict.fromkeys(j["point"]["run"] for j in judged):
        parts += [f"#### {run}", rows_of([j for j in judged if j["point"]["run"] == run])]
    best_points, missed = summary(judged)
    asked = [j for j in judged if j["kind"] != "none"]
    parts += ["#### Best points", best_points,
              f"{sum(not j['missed'] for j in asked)} of {len(asked)} points with a target meet it."]
    return "\n\n".join(parts), not missed and not any(j["missed"] for j in asked)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=pathlib.Path, nargs="+")
    text, met = report([json.loads(file.read_text()) for file in parser.parse_args().files])
    print(text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
