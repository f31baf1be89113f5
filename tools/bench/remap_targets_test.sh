#!/usr/bin/env bash
# The verdicts of remap_targets.py on results made up so that each rule decides once.
set -euo pipefail
cd "$(dirname "$0")"
PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
import copy
import remap_targets


def point(system, rate, ttft, tbt, tokens, preempted=0.0, run="temporal"):
    return {"run": run, "system": system, "rate": rate, "tenants": 3, "prompt_tokens": 0,
            "ttft": {"p99": ttft}, "tbt": {"p99": tbt}, "output_tokens_per_s": tokens, "preempted_share": preempted}


def judged(*points):
    return [remap_targets.judge(p, points) for p in points if p["system"].startswith("remap")]


base = [point("recompute_temporal", 3, 10, 0.1, 100, 0.05), point("swap_temporal", 3, 8, 0.08, 110)]
# Just enough, and a little too little of one quantity after another.
enough = point("remap_temporal", 3, 10 * (1 - 0.2071), 0.1 * (1 - 0.4481), 106.61)
[found] = judged(*base, enough)
assert found["kind"] == "gain" and found["missed"] == [], found
for quantity, value in (("ttft", 10 * (1 - 0.2069)), ("tbt", 0.1 * (1 - 0.4479)), ("tokens", 106.59)):
    less = copy.deepcopy(enough)
    if quantity == "tokens":
        less["output_tokens_per_s"] = value
    else:
        less[quantity]["p99"] = value
    [found] = judged(*base, less)
    assert found["missed"] == [quantity], (quantity, found)

# Where recompute preempts less than 1 %, the best baseline counts, each quantity for itself.
calm = [point("recompute", 1, 1, 0.05, 100, 0.009, "spatial"), point("static", 1, 2, 0.02, 105, 0, "spatial"),
        point("vllm", 1, 1.5, 0.03, 110, None, "spatial")]
[found] = judged(*calm, point("remap_peer", 1, 1.019, 0.0203, 108, run="spatial"))
assert found["kind"] == "even" and found["against"] == "best" and found["missed"] == [], found
[found] = judged(*calm, point("remap_peer", 1, 1.021, 0.0205, 107.7, run="spatial"))
assert found["missed"] == ["ttft", "tbt", "tokens"], found

# All tenants at once over PCIe: reported, nothing asked.
[found] = judged(*calm, point("remap", 1, 5, 1, 1, run="spatial"))
assert found["kind"] == "none" and found["missed"] == [] and found["over"]["recompute"]["tokens"] == -99, found

# Turns are held against turns, loads against equal loads; without recompute there is nothing to say.
assert judged(point("recompute", 3, 1, 1, 1), point("remap_temporal", 3, 1, 1, 1)) == [None]
assert judged(point("recompute_temporal", 2, 1, 1, 1), point("remap_temporal", 3, 1, 1, 1)) == [None]

# Whole reports: the best points decide, and the last result of a point is the one that counts.
great = point("remap_temporal", 6, 0.05, 0.01, 190)
loads = [point("recompute_temporal", 6, 10, 0.1, 100, 0.1), point("swap_temporal", 6, 9, 0.09, 110)]
text, met = remap_targets.report([{"points": [*base, enough, *loads, great]}])
assert met and "2 of 2 points with a target meet it." in text, text
worse = copy.deepcopy(great)
worse["ttft"]["p99"] = 0.08  # 99.2 % lower
text, met = remap_targets.report([{"points": [*base, enough, *loads, great]}, {"points": [worse]}])
assert not met and "| P99 TTFT lower | at the best point over recompute | +99.2 % | +99.3 % |" in text, text
text, met = remap_targets.report([{"points": [point("recompute", 1, 1, 1, 1)]}])
assert not met and "no such point" in text, text
PYTHON
