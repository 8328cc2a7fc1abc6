"""An agent over an OpenAI client: it asks the model, runs the calculator that the model calls, and returns
the reward."""

import json
import re

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an expression of whole numbers with + - * and brackets.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def episode(client, item: dict) -> float:
    """One episode: `client` is an `openai.AsyncOpenAI` for it alone; every answer of the model is recorded
    and trained.

    What it returns is the reward. Raising an error marks the trajectory as failed: it is counted and left
    out.
    """
    messages = [{"role": "user", "content": item["prompt"]}]
    for _ in range(4):
        answer = await client.chat.completions.create(model=client.model, messages=messages, tools=[CALCULATOR])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})
    found = re.search(r"(-?\d+)\W*$", message.content or "")
    return float(bool(found) and found[1] == item["answer"])


def calculate(arguments: str) -> str:
    """The result as text, or what is wrong with the call: the model reads either."""
    try:
        expression = str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return 'error: give {"expression": "1 + 2"}'
    if not re.fullmatch(r"[\d\s+*()-]{1,100}", expression) or "**" in expression:
        return "error: only whole numbers, + - * and brackets"
    try:
        return str(eval(expression, {"__builtins__": {}}))  # digits and + - * ( ) only, as checked above
    except (SyntaxError, TypeError):
        return "error: this is no expression"
