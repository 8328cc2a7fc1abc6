"""Where a response's answer is looked for: the strict rules of verl, TRL and math-verify, put together.

    <answer>...</answer>        the last one; what follows is looked for in it, else it is all the answer
    \\boxed{...}                 the last one, whatever comes after it
    #### ...                    on the last line (GSM8K)
    the answer is: ...          or "Answer: ..."; the last one in the last 300 characters, to its full stop

A response that repeats the whole prompt is read only from there on, so examples in the prompt are no answers.
Pure text.
"""

from __future__ import annotations

import re
from contextlib import suppress
from fractions import Fraction

from asyncrl_cli.contracts.item import Item, messages_of

ANSWER_TAG, ANSWER_END = "<answer>", "</answer>"
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""`\\{` and `\\}` are matched whole, and count as none."""
GSM8K = "####"
NAMED = re.compile(r"(?i)\banswer\b(?:[^\n:.]{0,60}?\bis\b[ \t]*:?|[*_ \t]*:)[*_\s]*([^\n]+)")
CLOSE_TO_END_CHARS = 300
SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|\Z)")
MATHEMATICS = re.compile(r"(?<!\\)\$+((?:\\\$|[^$])+)(?<!\\)\$+|\\\((.+?)\\\)")
EMPHASIS = "*_` \t"
LETTER = r"[^\W\d_]"


def tagged(response: str) -> str:
    """The text in the last <answer> tag (up to the end if it is not closed), or else the whole response;
    stripped."""
    _, tag, after = response.rpartition(ANSWER_TAG)
    return (after.partition(ANSWER_END)[0] if tag else response).strip()


def after_prompt(item: Item, response: str) -> str:
    """What comes after the last copy of the prompt's last message; all of a response without a copy."""
    asked = messages_of(item["prompt"])[-1]["content"].strip()
    has_words = len(asked.split()) > 1  # a prompt of a single word may be part of an answer
    return response.rpartition(asked)[2] if has_words else response


def final_answer(response: str) -> str | None:
    """The answer as it is written, without what marks it; None if there is none where one is looked for."""
    text = tagged(response)
    boxes = list(BOX.finditer(text))
    if boxes:  # up to the brace that closes it
        start, depth = boxes[-1].end(), 1
        for brace in BRACE.finditer(text, start):
            depth += (brace[0] == "{") - (brace[0] == "}")
            if depth == 0:
                return text[start : brace.start()].strip()
        return None
    last_line = text.rpartition("\n")[2].strip()
    if last_line.startswith(GSM8K) and (number := last_line.removeprefix(GSM8K).strip(EMPHASIS)):
        return number
    if ANSWER_TAG in response:
        return text
    named = list(NAMED.finditer(text, max(0, len(text) - CLOSE_TO_END_CHARS)))
    if not named:
        return None
    sentence = SENTENCE_END.split(named[-1][1], maxsplit=1)[0].strip(EMPHASIS)
    formulas = MATHEMATICS.findall(sentence)
    # In "12 $cm^2$" and "not $76$" it is not the formula alone that counts.
    is_all = len(formulas) == 1 and not re.search(r"\d|\bnot\b", MATHEMATICS.sub("", sentence))
    return "".join(formulas[0]) if is_all else sentence


def names_answer(response: str, expected: str) -> bool:
    """Whether the reference answer stands anywhere in a response: as it is written (spaces, braces and signs
    of LaTeX aside), or a fraction or a decimal number in another form."""
    answer = final_answer(expected) or expected
    written, forms = _bare(response), {answer}
    with suppress(ValueError, ZeroDivisionError):  # 0.5 for 1/2 and the other way round; 72 for 72.0
        value = Fraction(_bare(answer).strip())
        forms |= {str(value), f"{float(value):g}"} if abs(value) < 10**9 else {str(value)}
    for form in forms:
        characters = re.sub(r"\s", "", _bare(form))
        if not characters:
            continue
        before = rf"(?<!{LETTER})" if characters[0].isalpha() else r"(?<![\d.])"  # "a" is no answer in "that"
        after = rf"(?!{LETTER})" if characters[-1].isalpha() else r"(?!\.?\d)"
        if re.search(before + r"\s*".join(map(re.escape, characters)) + after, written):
            return True
    return False


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:left|right|displaystyle|[,;!:() ])|(?<=\d),(?=\d{3})", "", text)
    text = re.sub(r"\\[dtc]?frac\s*\{?(\w+)\}?\s*\{?(\w+)\}?", r"\1/\2", text)
    return re.sub(r"\\(?:text|mathrm|textbf|mathbf|boxed|fbox)|[\\${}]", "", text).casefold()
