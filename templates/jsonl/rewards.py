"""The reward of this task: does the response end with the right number?"""

import re

# a number anywhere would reward a response that repeats the question
NUMBER_AT_END = re.compile(r"(-?\d+)\W*$")


def score(item: dict, response: str) -> float:
    """Between 0 and 1. `item` has `prompt`, `answer` and, in `metadata`, all other columns of the line.

    It runs in a process of its own. Raising an error marks the trajectory as failed: it is counted and left
    out, never trained on as a reward of 0.
    """
    found = NUMBER_AT_END.search(response)
    if not found:
        return 0.0
    return 1.0 if found[1] == item["answer"] else 0.1
