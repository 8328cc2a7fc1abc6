"""The environment of builtin:guess: turns of plain text, each answered by a hint. A secret that is not found
earns 0."""

from __future__ import annotations

from asyncrl_cli.builtin.guessing import guess_of, hint, reward_of
from asyncrl_cli.contracts.environment import Answer, End, Environment, Turn
from asyncrl_cli.contracts.item import Item, messages_of


class Guess(Environment):
    def __init__(self, rewards: object) -> None:
        """The rewards of the task are not used: the reward follows from the guesses."""

    async def start(self, item: Item) -> Turn:
        facts = item["metadata"]
        self._secret, self._par, self._most = facts["secret"], facts["par"], facts["max_guesses"]
        self._help = f"say a number from {facts['low']} to {facts['high']}"
        self._num_guesses = 0
        return Turn(messages=messages_of(item["prompt"]), is_last=self._most == 1)

    async def step(self, answer: Answer) -> Turn | End:
        self._num_guesses += 1
        guess = guess_of(answer.message.get("content") or "")
        if guess == self._secret:
            return self._end(reward_of(self._num_guesses, self._par, self._most))
        if self._num_guesses == self._most:
            return self._end(0.0)
        said = self._help if guess is None else hint(guess, self._secret)
        return Turn(
            messages=({"role": "user", "content": said},), is_last=self._num_guesses == self._most - 1
        )

    async def cut(self, reason: str) -> End:
        return self._end(0.0)

    def _end(self, reward: float) -> End:
        return End(reward=reward, facts={"guesses": self._num_guesses, "found": float(reward > 0)})
