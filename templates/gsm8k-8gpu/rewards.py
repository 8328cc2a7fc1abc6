"""The reward of GSM8K: is the number behind the last "####" the right one?"""

import re

NUMBER = re.compile(r"####\s*\$?(-?[\d,]+(?:\.\d+)?)")


def score(item: dict, response: str) -> float:
    """1 for the right number in the form that the prompt asks for, else 0."""
    found = NUMBER.findall(response)
    return float(bool(found) and found[-1].replace(",", "").removesuffix(".0") == item["answer"])
