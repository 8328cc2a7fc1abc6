"""The reward, in verl's signature."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Replace it by your own, or name verl's: `reward = "verl.utils.reward_score:default_compute_score"`."""
    found = re.search(r"(-?\d+)\W*$", solution_str)
    return float(bool(found) and found[1] == ground_truth)
