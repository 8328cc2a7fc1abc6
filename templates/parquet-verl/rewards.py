"""The reward: verl's `compute_score`, and what calls it."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Replace it by your own; verl's are `from verl.utils.reward_score import default_compute_score`."""
    found = re.search(r"(-?\d+)\W*$", solution_str)
    return float(bool(found) and found[1] == ground_truth)


def score(item: dict, response: str) -> float:
    """`item` has `prompt`, `answer` and, in `metadata`, the row's other columns."""
    row = item["metadata"]
    return compute_score(row["data_source"], response, item["answer"], row.get("extra_info"))
