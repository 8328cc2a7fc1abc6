"""Whether a written answer is the reference answer: math-verify's comparison, behind rules that math-verify
lacks.

math-verify compares values, so it takes `26+50` for 76, and a response that repeats its prompt would be
right. Here an answer counts

    if it is written like the reference, apart from spaces, braces, units, and signs with the same meaning; or
    if it is worked out, and math-verify finds it equal.

Worked out: where the reference is a number the answer is one, too: no sum, product, root or binomial that has
its value, and no fraction for an integer. For any reference, an expression that stands in the prompt is no
answer, nor is an integral, a derivative or a sum that the reference does not have. A number of the prompt is
none where the reference is written in another way (0.375 for 3/8). Equivalent forms of other references are
not told apart: (1+x)^2 is x^2+2x+1.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import lru_cache

from latex2sympy2_extended import NormalizationConfig, normalize_latex
from latex2sympy2_extended.antlr_parser import PSParser
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Derivative, Integral, Limit, Product, Sum

from asyncrl_cli.tasks.final_answer import final_answer

# math-verify's own timeouts silently return False, so they are switched off (it warns about that). Our
# timeout, around the process, counts a failure.
logging.getLogger("math_verify").setLevel(logging.ERROR)
# latex2sympy2_extended 1.11.0 calls FUNC_GAMMA before it reads a percentage. Its parser for antlr 4.9, the
# version that TransferQueue brings with omegaconf, lacks this method: `50\%` would not be read.
if not hasattr(PSParser.AtomContext, "FUNC_GAMMA"):
    PSParser.AtomContext.FUNC_GAMMA = lambda atom: None

MAX_ANSWER_CHARS = 1000
"""Longer answers are wrong, unless the reference is as long: sympy's time grows fast."""
NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="last", equations=False
)

SIGNS = {
    "−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "÷": "/", "π": r"\pi ", "∞": r"\infty ",  # noqa: RUF001
}  # fmt: skip
SPELLINGS = (
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\[,!;:()\[\]]|[$~]", ""),
    (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:cdot|times)(?![a-z])", "*"),
    (r"\\div(?![a-z])", "/"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"(\d)\s*\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"\1+\2/\3"),
    (r"\\frac\s*\{([\w.]+)\}\s*\{([\w.]+)\}", r"\1/\2"),
    (r"\\%", "%"),
    (r"\\?[{}]", ""),
)
"""Patterns, and the one spelling that takes their place. A mixed number becomes a sum."""
MIXED = re.compile(r"(\d)\s+(\d+)/(\d+)(?!\d)")
PYTHONS_POWER = re.compile(r"(?<=[\w)])\s*\*\*\s*(?:\(([^()]*)\)|(-?\w+))")
SCIENTIFIC = re.compile(r"^([+-]?\d+(?:\.\d*)?)[eE]\+?(-?\d+)$")
UNIT = re.compile(
    r"(.*\d)\s+(?!(?:or|and|plus|minus|times|divided|over|to|is|not)\b)[A-Za-z]{2,}(?: [A-Za-z]{2,})?"
)

DECIMAL = r"(?:[+-]|\\pm)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
POWER_OF_TEN = r"10\^-?\d{1,3}"
DIGITS = re.compile(DECIMAL)
WHOLE = re.compile(rf"{DECIMAL}(?:\*{POWER_OF_TEN})?%?|-?{POWER_OF_TEN}")
NUMBER = re.compile(rf"(?:[+-]?\d+\+)?{DECIMAL}/{DECIMAL}%?|{WHOLE.pattern}")
OPERATION = re.compile(r".[-+]|[*/^,%!_\\]")
ROW = re.compile(r"\d\s+-?\d")  # MIXED has joined mixed numbers
WORDS = re.compile(
    r"[A-Z][a-z][A-Za-z' -]*|[A-Za-z' -]{4,}|yes|no|-?0[xbo][\da-fA-F]+|"
    r"\d+(?:-\d+)+|\d\d?/\d\d?/\d{2,4}|\d\d?(?::\d\d){1,2}"
)
"""Words, numbers of another base, dates and times, scores: math-verify would take them for products and
differences."""
NOT_COMPUTED = (Derivative, Integral, Limit, Product, Sum)
HUGE = re.compile(
    r"\^-?\d{4,}|\)\^-?\d{3,}|\^[^+*/,()]*\^|\^[\d*()-]{8,}|\d{4,}!|!\W*[!^]|\^[^+,]*!|\\binom\d{8,}"
)
"""Sympy may compute for ever with these."""


@dataclass(frozen=True, slots=True)
class Written:
    """An answer as text. `latex` is for math-verify, `spelled` has one spelling of everything, and `plain` no
    spaces, too."""

    latex: str
    spelled: str
    plain: str

    @classmethod
    def of(cls, text: str) -> Written:
        latex = normalize_latex(f"\\boxed{{{_with_signs(text)}}}", NORMALIZATION).strip().removesuffix(".")
        latex = SCIENTIFIC.sub(r"\1\\times 10^{\2}", MIXED.sub(r"\1\\frac{\2}{\3}", latex))
        if with_unit := UNIT.fullmatch(latex):
            latex = with_unit[1]
        spelled = _spelled(latex)
        return cls(latex, spelled, re.sub(r"\s", "", spelled))

    def is_all(self, number: re.Pattern[str]) -> bool:
        """Whether it is a number of that kind, or a list of such numbers. Of equations only the last side
        counts."""
        if number.fullmatch(self.plain):
            return True
        return all(number.fullmatch(part.rpartition("=")[2]) for part in self.plain.strip("()[]").split(","))

    def repeats(self, prompt: str, gold: Written) -> bool:
        """Whether it, or its last side, is an expression of the prompt, or a number there that `gold` writes
        in another way. Names and words are none."""
        answer, asked = gold.plain.rpartition("=")[2], _spelled(_with_signs(prompt))
        for expression in (self.plain, self.plain.rpartition("=")[2]):
            if DIGITS.fullmatch(expression):
                is_expression = not DIGITS.fullmatch(answer) and answer != f"{expression}%"
            else:
                is_expression = OPERATION.search(expression) is not None
            pattern = r"\s*".join(map(re.escape, expression))
            if is_expression and re.search(rf"(?<![\w.]){pattern}(?!\.?\w)", asked):
                return True
        return False

    @property
    def is_row(self) -> bool:
        """Whether it is a row of numbers with only space between them, which math-verify would multiply or
        add."""
        return ROW.search(self.spelled) is not None

    def parsed(self) -> list[Basic | str]:
        """Without math-verify's second try, which takes any number out of what it cannot read."""
        text, how = f"\\boxed{{{self.latex}}}", [LatexExtractionConfig()]
        found: list[Basic | str] = parse(text, extraction_config=how, parsing_timeout=None)
        return found


def _with_signs(text: str) -> str:
    """With LaTeX's signs for those of Unicode and for Python's powers."""
    return PYTHONS_POWER.sub(r"^{\1\2}", "".join(SIGNS.get(sign, sign) for sign in text))


def _spelled(text: str) -> str:
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    return text.strip()


@lru_cache(maxsize=1024)
def reference(answer: str) -> tuple[Written, list[Basic | str]]:
    """A dataset's answer, as text and parsed: all of it, or what it marks as the answer (GSM8K's `#### 72`, a
    boxed one). Raises ValueError if it is empty."""
    written = Written.of(final_answer(answer) or answer)
    if not (parsed := written.parsed()):
        raise ValueError(f"the item's answer is not mathematics: {answer!r:.80}")
    return written, parsed


def is_right(answer: str, expected: str, prompt: str) -> bool:
    """Whether `answer` is the reference answer `expected` and worked out. `answer` is as `final_answer` found
    it."""
    gold, parsed = reference(expected)
    if len(answer) > max(MAX_ANSWER_CHARS, 2 * len(expected)):
        return False
    found = Written.of(answer)
    if found.is_row or gold.is_row:
        return found.spelled.split() == gold.spelled.split()
    if found.plain == gold.plain:
        return True
    if WORDS.fullmatch(gold.spelled):
        return found.plain.casefold() == gold.plain.casefold()
    if any(gold.is_all(kind) and not found.is_all(kind) for kind in (WHOLE, NUMBER)):
        return False
    if found.repeats(prompt, gold) or (HUGE.search(found.plain) and not HUGE.search(gold.plain)):
        return False
    answered = found.parsed()
    if _is_computed(parsed) and not _is_computed(answered):
        return False
    return bool(verify(parsed, answered, timeout_seconds=None))


def _is_computed(parsed: list[Basic | str]) -> bool:
    """Whether it holds no integral, derivative, sum, product or limit that somebody else would have to
    compute."""
    return not any(not isinstance(one, str) and one.has(*NOT_COMPUTED) for one in parsed)


def is_anywhere(response: str, expected: str) -> bool:
    """math-verify's own lenient rule: any expression of the response may be the answer, worked out or not."""
    return bool(verify(reference(expected)[1], parse(response, parsing_timeout=None), timeout_seconds=None))
