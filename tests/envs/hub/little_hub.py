"""An environment as packages of the environments hub are written: sums in one turn, and a shop whose prices a
tool knows."""

import verifiers as vf
from datasets import Dataset


async def price(thing: str) -> str:
    """The price of a thing.

    Args:
        thing: What it is.
    """
    return {"pear": "3", "fig": "5"}[thing]


def right(completion, answer, **kwargs) -> float:
    return float(completion[-1].content.strip() == answer)


def looked_up(completion, answer, **kwargs) -> float:
    """1 for the right price that was looked up, 1/2 for a guess."""
    calls = [
        call for message in completion if message.role == "assistant" for call in message.tool_calls or ()
    ]
    return float(completion[-1].content == answer) * (1.0 if calls else 0.5)


def best(completions, **kwargs) -> list[float]:
    return [1.0 for _ in completions]


def load_environment(num_sums: int = 4, together: bool = False) -> vf.Environment:
    """`together`: rewards compare the rollouts of a group."""
    sums = [{"question": "1+1", "answer": str(2 + number % 3)} for number in range(num_sums)]
    one_turn = vf.SingleTurnEnv(
        dataset=Dataset.from_list(sums),
        eval_dataset=Dataset.from_list([{"question": "2+2", "answer": "4"}]),
        system_prompt="Answer with a number.",
        rubric=vf.Rubric(funcs=[best if together else right]),
    )
    prices = {"pear": "3", "fig": "5", "nut": "?"}
    things = Dataset.from_list(
        [{"question": f"price of a {thing}?", "answer": answer} for thing, answer in prices.items()]
    )
    shop = vf.ToolEnv(dataset=things, rubric=vf.Rubric(funcs=[looked_up]), tools=[price], max_turns=3)
    return one_turn if together else vf.EnvGroup([one_turn, shop])
