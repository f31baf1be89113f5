"""Whether a demonstration showed what it is for: the answers are those of a run in which nothing moved.
Pure functions of what palctl and the broker said."""

import collections
import dataclasses

# Between log-probabilities of the same token in two runs on a GPU.
MARGIN = 0.25


def lead(chosen, token):
    """How far the chosen token is ahead of another at one position; infinite if that is not listed."""
    listed = [t["logprob"] for t in chosen["top"] if t["token_id"] == token]
    return chosen["logprob"] - listed[0] if listed else float("inf")


def near_tie(expected, got):
    """Whether the first different token of two answers was close behind the other in both runs. Without
    log-probabilities, and where one answer is merely longer, there is no tie."""
    for a, b in zip(expected.get("logprobs", []), got.get("logprobs", [])):
        if a["token_id"] != b["token_id"]:
            return max(lead(a, b["token_id"]), lead(b, a["token_id"])) <= 2 * MARGIN
        if abs(a["logprob"] - b["logprob"]) > MARGIN:
            break
    return False


def difference(expected, got):
    """Where two lists of tokens part, in words; empty if they are equal."""
    for i, (a, b) in enumerate(zip(expected, got)):
        if a != b:
            return f"token {i + 1} is {b} instead of {a}"
    if len(expected) != len(got):
        return f"{len(got)} tokens instead of {len(expected)}"
    return ""


@dataclasses.dataclass
class Comparison:
    """Two runs of the same requests. `differences` says which request differs and how."""
    name: str
    requests: int
    near_ties: int
    differences: list

    @property
    def ok(self):
        return self.requests > 0 and not self.differences

    def __str__(self):
        if not self.requests:
            return f"{self.name}: there are no answers to compare"
        if self.differences:
            return "\n".join([f"{self.name}: {len(self.differences)} of {self.requests} answers differ", *self.differences])
        how = f"agree, {self.near_ties} of them up to a near tie" if self.near_ties else "have the same tokens"
        return f"{self.name}: {self.requests} of {self.requests} answers {how}"


def compare(name, expected, got):
    """Answers to the same prompts, each asked once, as palctl records them: those of the unpressured run
    and those to judge, in any order."""
    of_prompt = collections.defaultdict(list)
    for record in got:
        of_prompt[record["prompt"]].append(record)
    comparison = Comparison(name, len(expected), 0, [])
    for record in expected:
        prompt = record["prompt"]
        answers = of_prompt.pop(prompt, [])
        if len(answers) != 1:
            found = f"{len(answers)} answers" if answers else "no answer"
        elif found := difference(record["token_ids"], answers[0]["token_ids"]):
            if near_tie(record, answers[0]):
                comparison.near_ties += 1
                found = ""
        if found:
            comparison.differences.append(f"{prompt!r}: {found}")
    comparison.differences += [f"{prompt!r}: not asked in the unpressured run" for prompt in of_prompt]
    return comparison


def parameters_moved(stages, tenant, image_slabs):
    """Whether the tenant's parameter slabs were taken during the pressure and were all back afterwards."""
    slabs = {s["name"]: s["slabs"][tenant]["parameter"] for s in stages}
    return slabs["during"] < slabs["before"] and slabs["after"] == image_slabs


@dataclasses.dataclass
class Verdict:
    """`comparisons` of answers, and `failures`: what else was not as it should be, in words."""
    comparisons: list
    failures: list = dataclasses.field(default_factory=list)

    @property
    def ok(self):
        return bool(self.comparisons) and all(c.ok for c in self.comparisons) and not self.failures

    @property
    def exit_code(self):
        return 0 if self.ok else 1
