"""What the reward `math-verify` takes for an answer, and for the right one.

math500_answers.json: the reference answers of MATH-500, in its order (the 500 test problems of MATH,
Hendrycks et al. 2021, that Lightman et al. 2023 chose for PRM800K; MIT licence).
"""

import json
from pathlib import Path

import pytest
from math_verify import parse, verify

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.contracts.item import Item, make_item, messages_of
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks.code_choice import resolve_reward
from asyncrl_cli.tasks.final_answer import after_prompt, final_answer, names_answer
from asyncrl_cli.tasks.gym import make_dataset
from asyncrl_cli.tasks.mathematics import is_right
from asyncrl_cli.tasks.reward_functions import build_reward

MATH_500 = json.loads((Path(__file__).parent / "math500_answers.json").read_text(encoding="utf-8"))
MATH_VERIFY = build_reward(RewardSpec(kind="math-verify"))
SUM = make_item("What is 26 + 50? Give the answer as \\boxed{number}.", "76", {})


@pytest.mark.parametrize(
    "form",
    [
        "So it is $\\boxed{%s}$.",
        "**Answer:** %s",
        "The answer is $%s$.",
        "<answer>%s</answer>",
        "So\n#### %s",
    ],
)
def test_every_reference_of_math_500_is_right_as_an_answer(form):
    assert len(MATH_500) == 500
    wrong = [
        answer
        for answer in MATH_500
        if MATH_VERIFY(make_item("p", answer, {}), form.replace("%s", answer)) != 1.0
    ]
    assert wrong == []


def test_a_number_out_of_a_latex_reference_is_wrong():
    """math-verify picks it when a reference is not marked as LaTeX, and then finds the whole answer wrong."""
    fragments = []
    for answer in MATH_500:
        misread = parse(answer, parsing_timeout=None)
        if misread and not verify(
            misread, parse(f"\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None
        ):
            fragments.append((answer, misread[-1]))
    assert len(fragments) == 57
    assert ("6 - 5i", "5") in fragments
    assert [
        pair for pair in fragments if MATH_VERIFY(make_item("p", pair[0], {}), f"\\boxed{{{pair[1]}}}") != 0.0
    ] == []


@pytest.mark.parametrize(
    "response",
    [
        "26 + 50 is another mathematical convenience that can be calculated using base-5",
        "\\boxed{26+50}",
        "\\boxed{50 + 26}",
        "\\boxed{76=26+50}",
        "\\boxed{\\frac{152}{2}}",
        "\\boxed{\\sqrt{5776}}",
        "\\boxed{\\binom{76}{1}}",
        "\\boxed{76 + 0}",
        "\\boxed{75, 76}",
        "\\boxed{75 or 76}",
        "\\boxed{76}, or rather \\boxed{75}",
        "\\boxed{76",
        "\\boxed{}",
        "\\boxed{number}",
        "The answer is 26 + 50.",
        "The answer is 26 plus 50.",
        "The answer is 75 or 76.",
        "The answer is not 76.",
        "The answer is not $76$.",
        "<answer>26 + 50</answer>",
        "#### 76\nor something else",
        "76",
        "x = 76",
        "",
    ],
)
def test_what_does_not_say_the_worked_out_answer_is_wrong(response):
    assert MATH_VERIFY(SUM, response) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "First \\boxed{75}, no: \\boxed{76}",
        "\\boxed{26+50=76}",
        "\\boxed{\\text{76}}",
        "\\boxed{\\boxed{76}}",
        "\\boxed{ {76.0} }",
        "\\boxed{76 \\text{ apples}}",
        "\\boxed{76\\ \\mathrm{cm}^2}",
        "\\boxed{\\$76}",
        "The final answer is $\\boxed{76}$. I hope it is correct.",
        "The answer is 76 apples. That is all.",
        "**Final answer:** 76",
        "Answer:\n76",
        "The answer is 76 $\\text{cm}^2$.",
        "The answer is $26 + 50$ = 76.",
        "<answer> 76 </answer>",
        "26 + 50\n#### 76",
        f"{SUM['prompt']} \\boxed{{76}}",
    ],
)
def test_the_answer_is_found_where_the_field_looks_for_it(response):
    assert MATH_VERIFY(SUM, response) == 1.0


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("1,072", "1072", True),
        ("10080", "10,\\!080", True),
        ("3\\frac{1}{2}", "3 1/2", True),
        ("2", "3 1/2", False),
        ("2/4", "\\frac{1}{2}", True),
        ("50\\%", "0.5", True),
        ("\\text{(B)}", "B", True),
        ("(C)", "B", False),
        ("evelyn", "\\text{Evelyn}", True),
        ("nylevE", "Evelyn", False),
        ("(0,1)", "[0,1)", False),
        ("\\{2,1\\}", "1, 2", True),
        ("\\pm 3", "3,-3", True),
        ("1, 3-5", "1,-2", False),
        ("5", "x=5", True),
        ("2+3", "x=5", False),
        ("\\sqrt{12}", "2\\sqrt{3}", True),
        ("100000", "10^{5}", True),
        ("\\begin{bmatrix}1\\\\2\\end{bmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}", True),
        ("12:30", "12:30", True),
        ("0.00012", "1.2e-04", True),
        ("0", "-0x15fca", False),
        ("90", "90^\\circ", True),
        ("72", "48 / 2 = 24, and 48 + 24 = 72.\n#### 72", True),
        ("12", "Hence it is \\boxed{12}.", True),
        ("2024-03-05", "2024-03-05", True),
        ("2024-05-03", "2024-03-05", False),
        ("2016", "2024-03-05", False),
        ("1", "3-2", False),
        ("0.4", "12:30", False),
        ("sey", "yes", False),
        ("\\frac{dy}{dx}=2x", "\\frac{dy}{dx}=2x", True),
        ("7x^7 - 9x + C", "7*x**7 - 9*x + C", True),
        ("9", "7*x**7 - 9*x + C", False),
        ("-\\frac{4}{3}(-4x-5)^{3/2} + C", "-4*(-4*x - 5)**(3/2)/3 + C", True),
        ("find: \u222b 8*sqrt(-4*x - 5) dx", "-4*(-4*x - 5)**(3/2)/3 + C", False),
        ("0 0 1 2", "0 0 1 2", True),
        ("0 0 1\n 2", "0 0 1 2", True),
        ("3", "0 0 1 2", False),
        ("0 1 0 1 1", "3", False),
        ("1 23", "12 3", False),
    ],
)
def test_answers_are_compared_as_mathematics_and_words_as_words(answer, expected, right):
    assert is_right(answer, expected, "") is right


@pytest.mark.parametrize(
    ("prompt", "answer", "expected", "right"),
    [
        ("Simplify $\\sqrt{12}$.", "\\sqrt{12}", "2\\sqrt{3}", False),
        ("Expand $(x + 1)^2$.", "(x+1)^2", "x^2+2x+1", False),
        ("What is 84 ÷ 7?", "\\frac{84}{7}", "12", False),
        ("Simplify 6/8.", "\\frac{6}{8}", "\\frac{3}{4}", False),
        ("Write $10^5$ in full.", "10^5", "100000", False),
        ("A pizza has 3/4 left. Nobody eats. How much is left?", "\\frac{3}{4}", "3/4", True),
        ("(A) 1 (B) 2", "(B)", "B", True),
        ("Which is larger, 5 or 7?", "7", "7", True),
        ("Express 0.375 as a common fraction.", "0.375", "\\frac{3}{8}", False),
        ("Write 0.00012 in scientific notation.", "0.00012", "1.2 \\times 10^{-4}", False),
        ("What is 0.5 as a percentage?", "0.5", "50\\%", False),
        ("50 of 100 apples are red. What percentage is that?", "50", "50\\%", True),
        ("Solve -58*c**3 = 0.", "-58*c^3 = 0", "0", False),
        ("Solve -58*c**3 = 0.", "c = 0", "0", True),
        ("What is half of 1.5?", "0.75", "\\frac{3}{4}", True),
        ("Differentiate the square of x.", "\\frac{d}{dx} x^2", "2x", False),
        ("What grows by 2x?", "\\int 2x \\, dx", "x^2", False),
        ("Add 1, 2 and 3 times x.", "\\sum_{n=1}^{3} n x", "6x", False),
    ],
)
def test_an_expression_of_the_prompt_is_an_answer_only_if_the_reference_is_written_so(
    prompt, answer, expected, right
):
    assert is_right(answer, expected, prompt) is right


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "10^{10^{10}}",
            "9^{9^{9^9}}",
            "10^{999999999}",
            "2^{99*99*99*99*99}",
            "1000000!",
            "((99)!)!",
            "(10!)^{10!}",
        ),
        *("{" * 900 + "}" * 900, "9" * 100_000),
    ],
)
@pytest.mark.parametrize("expected", ["76", "x+1"])
def test_answers_that_nobody_can_compute_are_wrong_at_once(answer, expected):
    assert is_right(answer, expected, "") is False


def echoes(item: Item) -> list[str]:
    """The prompt, said in several ways, and its lines as answers."""
    asked = messages_of(item["prompt"])[-1]["content"]
    lines = [line.strip() for line in asked.splitlines() if line.strip()]
    sides = [part.strip() for line in lines for part in line.rstrip("=? ").split("=") if part.strip()]
    marked = [form.replace("%s", part) for part in sides for form in ("\\boxed{%s}", "The answer is %s.")]
    return [asked, f"{asked}\n{asked}", asked.partition("?")[0], f"{asked} is another way to say it", *marked]


@pytest.mark.slow
def test_repeating_1000_arithmetic_prompts_earns_nothing():
    from reasoning_gym.factory import DATASETS

    names = sorted(name for name, (made_by, _) in DATASETS.items() if ".arithmetic." in made_by.__module__)
    num_each = -(-1000 // len(names))
    items = [
        make_item(entry["question"], entry["answer"], {})
        for name in names
        for entry in map(make_dataset(name, {}, seed=0, size=num_each).__getitem__, range(num_each))
    ]
    assert len(items) >= 1000
    earned = [
        (item["prompt"], text) for item in items for text in echoes(item) if MATH_VERIFY(item, text) != 0.0
    ]
    assert earned == []


def test_examples_in_a_prompt_are_no_answers():
    item = make_item("Example: 1 + 1 is \\boxed{2}. Now, what is 4 - 2?", "2", {})
    assert after_prompt(item, f"{item['prompt']} and so") == " and so"
    assert MATH_VERIFY(item, item["prompt"]) == 0.0
    assert MATH_VERIFY(item, f"{item['prompt']} It is \\boxed{{2}}.") == 1.0


def test_anywhere_takes_any_expression_and_warns_of_it():
    anywhere = build_reward(RewardSpec(kind="math-verify", answer_format="anywhere"))
    assert anywhere(SUM, "26 + 50 is another") == 1.0
    assert anywhere(make_item("p", "6 - 5i", {}), "it is $5$") == 0.0
    settings = {"source": "jsonl:a.jsonl", "reward": "math-verify", "answer_format": "anywhere"}
    (warning,) = (
        text
        for text in check(Profile.model_validate({"run": {"train_steps": 4}, "task": settings}))
        if "answer_format" in text
    )
    assert "repeat the prompt" in warning


def test_the_final_answer_is_the_text_without_its_marks():
    assert final_answer("a \\boxed{\\{1\\}} b") == "\\{1\\}"
    assert final_answer("**Answer:** $\\$5$") == "\\$5"
    assert final_answer("no idea") is None
    assert final_answer("so\n####") is None


def test_a_long_response_is_read_in_a_moment():
    """A pattern that tries every place of 300,000 spaces takes minutes."""
    assert final_answer("#### 7" + " " * 300_000 + "\nno") is None


def test_an_answer_format_without_math_verify_is_refused():
    profile = Profile.model_validate({"task": {"reward": "exact-match", "answer_format": "anywhere"}})
    with pytest.raises(ConfigError, match=r'is for task\.reward = "math-verify", not for "exact-match"'):
        resolve_reward(profile, RewardSpec(kind="none"), None)


@pytest.mark.parametrize(
    ("response", "expected", "named"),
    [
        ("26 + 50 is another mathematical convenience that can be calculated using base-5", "76", False),
        ("it is 76.", "76", True),
        ("1760, 7.76 or 76.5", "76", False),
        ("0.5", "\\frac{1}{2}", True),
        ("$\\dfrac{1}{2}$", "\\frac12", True),
        ("1,072", "1072", True),
        ("3,5,7", "3, 5, 7", True),
        ("Evelyn", "\\text{Evelyn}", True),
        ("2\\sqrt 3", "2\\sqrt{3}", True),
        ("72", "so\n#### 72", True),
        ("", "76", False),
        ("Because all that is so", "B", False),
        ("It is \\boxed{B}", "\\text{B}", True),
        ("it is 76cm", "76", True),
    ],
)
def test_a_response_names_the_reference_in_any_usual_form(response, expected, named):
    assert names_answer(response, expected) is named


def test_every_reference_of_math_500_is_found_in_a_response():
    assert [
        answer for answer in MATH_500 if not names_answer(f"So it is $\\boxed{{{answer}}}$.", answer)
    ] == []
