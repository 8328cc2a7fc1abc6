"""Two agents that know nothing of asyncrl are trained by one run: a loop over the openai client, and
smolagents."""

import textwrap

import pytest

from tests.run.commands import descendants, finish, lines, start, wait_for_steps, wait_until_gone

pytestmark = pytest.mark.slow

AGENTS = """
    import asyncio, json, math, re

    from openai import BadRequestError


    def tool(name, argument):
        parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
        return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


    TOOLS = [tool("calculate", "expression"), tool("answer", "value")]


    def value_of(expression):
        operation = re.fullmatch(r"\\d{1,2}[*]\\d{1,2}", expression)
        return str(math.prod(map(int, expression.split("*")))) if operation else "one product at a time"


    async def looping(client, item):
        messages = [{"role": "user", "content": item["prompt"]}]
        try:
            while True:
                answer = await client.chat.completions.create(
                    model="gpt-4o", messages=messages, tools=TOOLS, temperature=0.3
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return 0.0
                for call in message.tool_calls:
                    arguments = json.loads(call.function.arguments)
                    if call.function.name == "answer":
                        return 0.5 + 0.5 * (str(arguments.get("value")) == item["answer"])
                    result = value_of(str(arguments.get("expression")))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        except BadRequestError:  # no room for a further turn
            return 0.0


    async def framework(client, item):
        from smolagents import OpenAIModel, Tool, ToolCallingAgent

        class Calculate(Tool):
            name, description, output_type = "calculate", "one operation", "string"
            inputs = {"expression": {"type": "string", "description": "as 12*34"}}

            def forward(self, expression: str) -> str:
                return value_of(expression)

        model = OpenAIModel(model_id="gpt-4o", api_base=str(client.base_url), api_key=client.api_key)
        agent = ToolCallingAgent(tools=[Calculate()], model=model, max_steps=2, verbosity_level=0)
        agent.prompt_templates["system_prompt"] = "calculate"
        agent.prompt_templates["final_answer"] = {"pre_messages": "answer", "post_messages": "now"}
        said = await asyncio.to_thread(agent.run, item["prompt"])
        return 1.0 / (2.5 + len(str(said)))


    async def either(client, item):
        return await (looping, framework)[sum(map(ord, item["prompt"])) % 2](client, item)
"""
OF_THE_LOOP = {0.0, 0.5, 1.0}
"""The rewards of `looping`; those of `framework` are others."""
# with the model of test_ends.py's run with tools
SETS = """
    run.train_steps=10 checkpoint.every_steps=5 model.warm_start_steps=60 trainer.ppo_mini_batch_size=2
    rollout.n=4 rollout.slots=8 rollout.max_response_tokens=32 env.max_context_tokens=2000
    task.source=builtin:calculator task.train_prompts=200 task.max_failed_ratio=0.2 task.agent=my_agent:either
    eval.prompts=4 eval.every_versions=0 logging.samples_every_steps=1 logging.samples_per_step=0
    async_training.staleness_threshold=1 async_training.trigger_parameter_sync_step=1
"""


def test_unchanged_agents_are_trained_for_ten_steps(tmp_path):
    (tmp_path / "my_agent.py").write_text(textwrap.dedent(AGENTS))
    words = ("--profile", "partial-rollout", "--name", "agents", "--ui", "plain")
    process = start(tmp_path, "train", *words, sets=tuple(SETS.split()))
    run = tmp_path / "runs" / "agents"
    wait_for_steps(process, run, 2)
    family = descendants(process.pid)
    (address,) = run.glob("logs/attempt-1/rollout-0.gateway.json")
    assert address.stat().st_mode & 0o777 == 0o600
    code, _, err = finish(process)
    assert code == 0, err
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics if "reward/mean" in line] == list(range(1, 11))
    assert wait_until_gone(family) == set()
    samples = [sample for path in sorted(run.glob("samples/*.jsonl")) for sample in lines(path)]
    assert 0.8 * 80 <= len(samples) <= 80  # task.max_failed_ratio
    assert all(any(sample["mask"]) for sample in samples)
    of_loop = [sample["reward"] in OF_THE_LOOP for sample in samples]
    assert min(sum(of_loop), len(of_loop) - sum(of_loop)) > 10
    assert {
        version >= 0
        for sample in samples
        for version, mask in zip(sample["versions"], sample["mask"], strict=True)
        if mask
    } == {True}
    assert max(line.get("env/turns_mean", 0) for line in metrics) > 1
    record = (run / "agent.json").read_text()
    assert str(tmp_path / "my_agent.py") in record
