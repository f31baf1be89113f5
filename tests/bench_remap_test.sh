#!/usr/bin/env bash
# `palctl bench remap` on the CPU: nodes start, are loaded and change their settings, every point is
# in the JSON, all systems answer the same tokens, the plot is drawn and can be drawn again.
set -euo pipefail
cd "$TEST_SRCDIR/$TEST_WORKSPACE"
palctl=tools/palctl/palctl config=tools/bench/remap/host_smoke.yaml out=$TEST_TMPDIR
"$palctl" bench remap --config "$config" --binaries . --json "$out/remap.json" --plot "$out/remap.svg"
"$palctl" bench remap --config "$config" --schedules "$out/schedules.json"
"$palctl" bench remap --from "$out/remap.json" --plot "$out/again.svg"
cmp "$out/remap.svg" "$out/again.svg"
"$palctl" bench remap --from "$out/remap.json" "$out/remap.json" >/dev/null
python3 tools/bench/remap_report.py "$out/remap.json" --against recompute >"$out/report.md"
grep -q "| remap |" "$out/report.md"
python3 - "$out" <<'PYTHON'
import collections
import json
import sys
import xml.etree.ElementTree

out = sys.argv[1]
found = json.load(open(f"{out}/remap.json"))
loads = {point["load"]: point for point in json.load(open(f"{out}/schedules.json"))["points"]}
assert not found["failed"], found["failed"]
assert [refused["system"] for refused in found["refused"]] == ["unknown"], found["refused"]
assert "memory_policy" in found["refused"][0]["message"], found["refused"]
assert found["date"] and found["hardware"]["cpus"] >= 1 and "of_another_planet" in found["config"]

points = collections.Counter((p["run"], p["system"]) for p in found["points"])
assert points == {**{("rate", system): 2 for system in ("remap", "recompute", "swap", "static")},
                  ("others", "remap_temporal"): 1, ("others", "two_slots"): 1,
                  ("prompt_tokens", "remap"): 2, ("tenants", "remap"): 2}, points
assert len(found["starts"]) == 8 and all(start["seconds"] > 0 for start in found["starts"])
digests = collections.defaultdict(set)
for point in found["points"]:
    # The same requests for every system, all of which were answered.
    load = loads[point["load"]]
    asked = sum(len(tenant) for tenant in load["requests"])
    assert asked > 0 and point["requests"] == point["finished"] == asked, point
    assert point["output_tokens"] == sum(r[2] for tenant in load["requests"] for r in tenant)
    digests[point["load"]].add(point["digest"])
    assert 0 < point["ttft"]["p50"] <= point["ttft"]["p90"] <= point["ttft"]["p99"]
    assert 0 < point["tbt"]["p50"] <= point["tbt"]["p99"] <= point["tbt"]["max"]
    assert point["output_tokens_per_s"] > 0 and 0 <= point["goodput_share"] <= 1
    assert len(point["by_tenant"]) == point["tenants"] == len(point["memory"]["tenants"])
    samples = len(point["memory"]["seconds"])
    assert samples >= 10, samples
    for tenant in point["memory"]["tenants"]:
        assert len(tenant["parameter"]) == len(tenant["kv"]) == samples
        assert max(tenant["kv"]) > 0 and max(tenant["parameter"]) > 0
    for tenant, requests in zip(point["requests_raw"].values(), load["requests"]):
        for raw, asked in zip(tenant, requests):
            due, sent, first, end, tokens, _, outcome, *_ = raw
            assert due == asked[0] and due <= sent < first <= end, raw
            assert tokens == asked[2] and outcome == "finished", raw
assert all(len(same) == 1 for same in digests.values()), digests
assert len({next(iter(same)) for same in digests.values()}) == len(digests), digests
assert xml.etree.ElementTree.parse(f"{out}/remap.svg").getroot().tag.endswith("svg")
PYTHON
