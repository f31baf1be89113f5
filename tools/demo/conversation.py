"""A conversation that goes on after its KV has left the pool: from host memory, then from the disk."""

import json

from demo.output import BOLD, RESET, fail, heading, say
from demo.questions import QUESTIONS, ask, generate

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
TIERS = {"dram": "T1 (host memory)", "nvme": "T3 (disk)"}


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
        say(f"  {tenant}, turn {turn + 1}: {usage['prompt_tokens']} tokens, "
            f"{usage['prompt_tokens'] - usage['cached_tokens']} of them computed; "
            f"{came or 'nothing from a tier'}; first token after "
            f"{BOLD}{record['ttft_seconds'] * 1e3:.0f} ms{RESET}")
        return record


def tier_blocks(status, tenant, field):
    """One number of the tenant in each tier below T0."""
    return {tier["tier"]: row[field] for tier in status["tiers"] for row in tier["tenants"]
            if row["tenant"] == tenant}


def await_blocks(cluster, what, condition):
    cluster.wait_for(what, lambda: condition(tier_blocks(cluster.status(), "alpha", "blocks")))


def second_turn(cluster, conversation):
    """Alpha's, with nothing of the conversation in the pool: its worker has just been restarted."""
    cluster.restart("alpha")
    # So that the parameters are back, and the worker knows how long computing takes.
    ask(cluster, "alpha", QUESTIONS["alpha"][0])
    return conversation.ask("alpha", 1)


def go_on(cluster, conversation):
    """The conversation's second turn: from host memory, from the disk, and computed by one who has
    nothing of it."""
    heading("A conversation goes on: its KV has left the pool, and comes back from the tiers below")
    from_memory = second_turn(cluster, conversation)
    process = cluster.palctl("trim", "--tier", "dram", "--tenant", "alpha")
    out, error = process.communicate()
    if process.returncode != 0:
        fail(f"palctl trim failed: {error.strip()}")
    say(f"  palctl trim: {out.strip()} host memory for the disk")
    await_blocks(cluster, "alpha's blocks on the disk", lambda b: b["dram"] == 0 and b["nvme"] > 0)
    from_disk = second_turn(cluster, conversation)
    say("  beta asks the same; tenants share no block, so it computes everything:")
    return from_memory, from_disk, conversation.ask("beta", 1)
