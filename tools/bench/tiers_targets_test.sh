#!/usr/bin/env bash
# What tiers_targets.py and tier_fio.py say of results made up so that each rule decides once.
set -euo pipefail
cd "$(dirname "$0")"
PYTHONDONTWRITEBYTECODE=1 python3 - <<'PYTHON'
import tier_fio
import tiers_targets


def point(system, rate, ttft, tokens, tiers=(), run="agents"):
    return {"run": run, "system": system, "rate": rate, "tenants": 1, "prompt_tokens": 0,
            "ttft": {"mean": ttft, "p50": ttft, "p90": 2 * ttft, "p99": 3 * ttft}, "output_tokens_per_s": tokens,
            "finished": 9, "unfinished": 0, "failed": 0, "preemptions": 0,
            "hits": {"t0": 0.25, "tiers": [{"tier": name, "hits": share} for name, share in tiers], "computed": 0.5}}


def report(*points):
    return tiers_targets.report([{"points": list(points)}])


slow, fast = point("t0_lru", 1, 2.1, 100), point("t0_lru", 2, 10, 100)
# Each target at a point of its own, just reached; losing points stand in the table too.
text, met = report(slow, point("all_tiers", 1, 1, 100, [("dram", 0.2), ("nvme", 0.05)]),
                   fast, point("all_tiers", 2, 20, 290))
assert met, text
assert "| TTFT lower | 2.10x | 2.10x | agents, 1/s | met |" in text, text
assert "| tokens/s higher | 2.90x | 2.90x | agents, 2/s | met |" in text, text
assert "| all_tiers | 2 | 0.50x | 0.50x | 0.50x | 0.50x | 2.90x |" in text and "| 20.0 % | 5.0 % |" in text, text
# A little less of one, and of the other.
text, met = report(slow, point("all_tiers", 1, 1.001, 290))
assert not met and "| TTFT lower | 2.10x | 2.10x | agents, 1/s | missed |" in text, text
text, met = report(slow, point("all_tiers", 1, 1, 289))
assert not met and "| tokens/s higher | 2.89x | 2.90x | agents, 1/s | missed |" in text, text
# Others may win what they like, and other loads are not compared.
text, met = report(slow, point("t0_t1", 1, 0.1, 1000), point("all_tiers", 3, 0.1, 1000))
assert not met and "no such point" in text, text
# The last result of a point counts.
text, met = tiers_targets.report([{"points": [slow, point("all_tiers", 1, 1, 290)]},
                                  {"points": [point("all_tiers", 1, 2, 290)]}])
assert not met, text

rounds = {"broker store": [9e8, 9.1e8, 1e8], "fio store": [1e9, 1e9, 5e9], "broker load": [2e9], "fio load": [2.2e9]}
text, met = tier_fio.judge(rounds)
assert met and "| T1 to T3 | 1,000 (1,000-5,000) | 900 (100-910) | 0.90 | 0.9 |" in text, text
assert not tier_fio.judge({**rounds, "broker load": [1.9e9]})[1]
assert not tier_fio.judge({**rounds, "broker store": [8.9e8]})[1]
# The best fio counts.
text, met = tier_fio.judge({**rounds, "fio, huge pages store": [8e8], "fio, huge pages load": [2.3e9]})
assert not met and "| fio | fio, huge pages | broker |" in text, text
assert "900 (100-910) | 0.90 |" in text and "2,000 (2,000-2,000) | 0.87 |" in text, text
PYTHON
