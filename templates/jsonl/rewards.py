"""The reward of this task: is the last number of the response the right one?"""

import re


def score(item: dict, response: str) -> float:
    """Between 0 and 1. `item` has `prompt`, `answer` and, in `metadata`, all other columns of the line.

    It runs in a process of its own. Raising an error marks the trajectory as failed: it is counted and left out, never
    trained on as a reward of 0.
    """
    numbers = re.findall(r"-?\d+", response)
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1] == item["answer"] else 0.1
