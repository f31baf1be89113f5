#!/usr/bin/env bash
# The verdict on answers made up so that each way to differ decides once.
set -euo pipefail
PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=tools python3 - <<'PYTHON'
from demo.answers import MARGIN, Verdict, compare, parameters_moved


def answer(prompt, *tokens):
    return {"prompt": prompt, "token_ids": list(tokens)}


calm = [answer("sea?", 5, 6, 7), answer("sky?", 8, 9)]


def judged(*got, expected=calm):
    """(ok, exit code, what is said) of alpha's answers, beside those of beta, which are right."""
    verdict = Verdict([compare("beta", calm, calm), compare("alpha", expected, list(got))])
    return verdict.ok, verdict.exit_code, str(verdict.comparisons[1])


# In any order; nothing else is right.
assert judged(*calm) == judged(*calm[::-1]) == (True, 0, "alpha: 2 of 2 answers have the same tokens")
for got, said in (
        ([calm[0], answer("sky?", 8, 1)], "'sky?': token 2 is 1 instead of 9"),
        ([calm[0]], "'sky?': no answer"),
        ([calm[1]], "'sea?': no answer"),
        ([answer("sea?", 5, 6), calm[1]], "'sea?': 2 tokens instead of 3"),
        ([answer("sea?", 5, 6, 7, 7), calm[1]], "'sea?': 4 tokens instead of 3"),
        ([answer("sea?"), calm[1]], "'sea?': 0 tokens instead of 3"),
        ([*calm, calm[0]], "'sea?': 2 answers"),
        ([*calm, answer("why?", 1)], "'why?': not asked in the unpressured run")):
    assert judged(*got) == (False, 1, f"alpha: 1 of 2 answers differ\n{said}"), judged(*got)
assert judged() == (False, 1, "alpha: 2 of 2 answers differ\n'sea?': no answer\n'sky?': no answer"), judged()
assert judged(expected=[]) == (False, 1, "alpha: there are no answers to compare")

# Each comparison and each failure counts, and so does that there was nothing to compare.
right, wrong = compare("beta", calm, calm), compare("beta", calm, calm[:1])
assert Verdict([right]).exit_code == 0
assert Verdict([wrong, right]).exit_code == Verdict([right, wrong]).exit_code == 1
assert Verdict([right], ["did not end clean"]).exit_code == 1
assert Verdict([]).exit_code == 1


def listed(prompt, *positions):
    """With log-probabilities: (token, log-probability, the other token, its log-probability)."""
    return answer(prompt, *(token for token, *_ in positions)) | {"logprobs": [
        {"token_id": token, "logprob": logprob, "top": [
            {"token_id": token, "logprob": logprob}, {"token_id": other, "logprob": behind}]}
        for token, logprob, other, behind in positions]}


# Near ties: what comes after one is another text. A lead is held against twice the margin.
expected = [listed("sea?", (5, -0.1, 1, -3), (6, -1, 9, -1.1), (7, -1, 2, -2))]
ok, code, said = judged(listed("sea?", (5, -0.1, 1, -3), (9, -1, 6, -1.1), (3, -1, 2, -2)), expected=expected)
assert (ok, code, said) == (True, 0, "alpha: 1 of 1 answers agree, 1 of them up to a near tie"), said
for got in (
        listed("sea?", (5, -0.1, 1, -3), (9, -1, 6, -1.01 - 2 * MARGIN)),  # far ahead in this run
        listed("sea?", (5, -0.1, 1, -3), (2, -1, 6, -1.1)),  # not among the other run's
        listed("sea?", (5, -0.11 - MARGIN, 1, -3), (9, -1, 6, -1.1)),  # the runs part before
        listed("sea?", (5, -0.1, 1, -3), (6, -1, 9, -1.1)),  # shorter, no token differs
        answer("sea?", 5, 9, 3)):  # nothing known about the tokens
    ok, code, said = judged(got, expected=expected)
    assert not ok and code == 1 and "'sea?': " in said, said


def stages(before, during, after):
    return [{"name": name, "slabs": {"alpha": {"parameter": slabs, "kv": 0}}}
            for name, slabs in (("before", before), ("during", during), ("after", after))]


assert parameters_moved(stages(10, 4, 10), "alpha", 10)
assert not parameters_moved(stages(10, 10, 10), "alpha", 10)
assert not parameters_moved(stages(10, 4, 9), "alpha", 10)
PYTHON
