"""The environment of builtin:calculator: a calculator that does one operation at a time, and a tool to give
the answer.

It is a class in the convention of TRL's `environment_factory`, and needs nothing of asyncrl: public methods
are the model's tools, described by their docstrings.
"""

import re
from typing import Any

OPERATION = re.compile(r"\s*(-?\d{1,18})\s*([-+*])\s*(-?\d{1,18})\s*")
COMPUTE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class Calculator:
    def reset(self, answer: str = "0", **columns: Any) -> None:
        """Begin an episode. `answer`: the value of the prompt's expression."""
        self._expected = int(answer)
        self._given: int | None = None

    @property
    def done(self) -> bool:
        return self._given is not None

    def calculate(self, expression: str) -> str:
        """Calculate one operation.

        Args:
            expression: Two whole numbers with +, - or * between them, as 12*34.

        Returns:
            The result.
        """
        operation = OPERATION.fullmatch(expression)
        if operation is None:
            raise ValueError("one operation at a time, as 12*34")
        left, sign, right = operation.groups()
        return str(COMPUTE[sign](int(left), int(right)))

    def answer(self, value: int) -> str:
        """Give the final answer, which ends the task.

        Args:
            value: The value of the whole expression.

        Returns:
            A word of thanks.
        """
        if self.done:
            raise ValueError("the answer has been given")
        self._given = value
        return "thanks"

    def get_reward(self) -> float:
        """1 for the right answer, 0 for a wrong one or none."""
        return float(self._given == self._expected)
