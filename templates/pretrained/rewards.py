"""The reward of the instructions: a program checks what each of them asks for."""

import re


def follows(item: dict, response: str) -> float:
    """From 0 to 1. `item["metadata"]` has the columns of the line: `topic`, `words`, `end`, `lowercase`.

    A response of the right number of words earns half, and the other half if it also names the topic, ends as asked
    and has the right letters, a third for each. Without the right number it earns less the farther it is off, so that
    a group of wrong answers still has a best one.
    """
    asked, text = item["metadata"], response.strip()
    words = re.findall(r"\w[\w'-]*", text)
    off = abs(len(words) - asked["words"]) / asked["words"]
    if off >= 1 or not words:
        return 0.0
    others = [
        asked["topic"] in text.lower(),
        text.endswith(asked["end"]),
        text == (text.lower() if asked["lowercase"] else text.upper()),
    ]
    return (0.5 if off == 0 else 0.25 * (1 - off)) + 0.5 * sum(others) / len(others) * (1 - off)
