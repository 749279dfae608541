"""The quick starts and agent loops of public frameworks, unmodified but for the address. `speaker.py` is the model.

python agent_checks.py FRAMEWORK URL MODEL

The output is one JSON object: the checks that passed, and those that failed with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

NAME, URL, MODEL = sys.argv[1:]
BASE = f"{URL}/v1"
KEY = "none"
TEXT = "It is sunny."
ASK = "What is the weather in Oslo?"
PLACES: list[str] = []
"""The places for which the tool was called."""


class Person(BaseModel):
    """A person."""

    name: str
    mood: Literal["happy", "sad"]


def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: the name of the city
    """
    PLACES.append(city)
    return "sunny, 21 degrees"


def called(run: Callable[[], Any], times: int = 1) -> Any:
    """Return what a run returns, in which the tool must be called."""
    PLACES.clear()
    result = run()
    assert len(PLACES) == times, PLACES
    return result


def said(text: Any) -> None:
    """Check that a text is the model's answer."""
    assert text == TEXT, text


def is_person(value: Any) -> None:
    """Check that a value is a valid person."""
    assert isinstance(value, Person), value


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
CHAT: Any = [{"role": "user", "content": ASK}]


class _OpenAi:
    """openai-python."""

    def __init__(self) -> None:
        import openai

        self.openai = openai
        self.client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
        function = {"name": "get_weather", "parameters": PARAMETERS, "strict": True}
        self.tools: Any = [{"type": "function", "function": function}]
        self.flat: Any = [{"type": "function", **function}]

    def chat(self) -> None:
        said(self.client.chat.completions.create(model=MODEL, messages=CHAT).choices[0].message.content)

    def stream(self) -> None:
        parts = self.client.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
        said("".join(part.choices[0].delta.content or "" for part in parts))

    def parse(self) -> None:
        answer = self.client.chat.completions.parse(model=MODEL, messages=CHAT, response_format=Person)
        is_person(answer.choices[0].message.parsed)

    def tool_loop(self, **more: Any) -> Any:
        talk, answer = list(CHAT), None
        for _ in range(3):
            answer = self.client.chat.completions.parse(model=MODEL, messages=talk, tools=self.tools, **more).choices[0].message
            talk.append(answer)
            for call in answer.tool_calls or ():
                result = get_weather(**json.loads(call.function.arguments))
                talk.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not answer.tool_calls:
                return answer
        raise AssertionError("the loop does not end")

    def tools_and_parse(self) -> None:
        is_person(called(lambda: self.tool_loop(response_format=Person)).parsed)

    def streamed_tools(self) -> None:
        with self.client.chat.completions.stream(model=MODEL, messages=CHAT, tools=self.tools) as stream:
            (call,) = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        assert call.parsed_arguments == {"city": "Oslo"}

    def responses(self) -> None:
        said(self.client.responses.create(model=MODEL, input=ASK).output_text)

    def responses_parse(self) -> None:
        is_person(self.client.responses.parse(model=MODEL, input=ASK, text_format=Person).output_parsed)

    def responses_loop(self) -> None:
        first = called(lambda: self.client.responses.create(model=MODEL, input=ASK, tools=self.flat), 0)
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": get_weather(**json.loads(call.arguments))}
            for call in first.output
            if call.type == "function_call"
        ]
        talk: Any = [*CHAT, *first.output, *results]
        said(self.client.responses.create(model=MODEL, input=talk, tools=self.flat).output_text)


def openai_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of openai-python."""
    one = _OpenAi()
    yield "chat", one.chat
    yield "stream", one.stream
    yield "parse", one.parse
    yield "tool loop", lambda: said(called(one.tool_loop).content)
    yield "tool loop with parse", one.tools_and_parse
    yield "streamed tool", one.streamed_tools
    yield "responses", one.responses
    yield "responses.parse", one.responses_parse
    yield "responses tool loop", one.responses_loop


def langchain_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of langchain."""
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL)
    asked: Any = {"messages": [("user", ASK)]}
    yield "invoke", lambda: said(model.invoke(ASK).content)
    yield "stream", lambda: said("".join(str(part.content) for part in model.stream(ASK)))
    yield "batch", lambda: [said(one.content) for one in model.batch([ASK] * 3)]
    yield "json_schema", lambda: is_person(model.with_structured_output(Person).invoke(ASK))
    yield "function_calling", lambda: is_person(model.with_structured_output(Person, method="function_calling").invoke(ASK))
    yield "json_mode", lambda: is_person(model.with_structured_output(Person, method="json_mode").invoke(f"{ASK} as JSON"))
    yield "create_agent", lambda: said(called(lambda: create_agent(model, [get_weather]).invoke(asked))["messages"][-1].content)
    agent = create_agent(model, [get_weather], response_format=ProviderStrategy(Person))
    yield "create_agent, ProviderStrategy", lambda: is_person(called(lambda: agent.invoke(asked))["structured_response"])
    by_tool = create_agent(model, [], response_format=ToolStrategy(Person))
    yield "create_agent, ToolStrategy", lambda: is_person(by_tool.invoke(asked)["structured_response"])
    responses = ChatOpenAI(model=MODEL, use_responses_api=True)
    yield "responses agent", lambda: called(lambda: create_agent(responses, [get_weather]).invoke(asked))


def litellm_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of litellm."""
    import litellm

    same: Any = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]

    def tool() -> None:
        (call,) = litellm.completion(messages=CHAT, tools=tools, **same).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Oslo"}

    def structured() -> None:
        Person.model_validate_json(litellm.completion(messages=CHAT, response_format=Person, **same).choices[0].message.content)

    yield "completion", lambda: said(litellm.completion(messages=CHAT, **same).choices[0].message.content)
    yield (
        "stream",
        lambda: said(
            "".join(part.choices[0].delta.content or "" for part in litellm.completion(messages=CHAT, stream=True, **same))
        ),
    )
    yield "acompletion", lambda: said(asyncio.run(litellm.acompletion(messages=CHAT, **same)).choices[0].message.content)
    yield "tools", tool
    yield "response_format", structured
    yield "responses", lambda: litellm.responses(input=ASK, **same).output
    hosted = {**same, "model": f"hosted_vllm/{MODEL}"}
    yield "hosted_vllm", lambda: said(litellm.completion(messages=CHAT, **hosted).choices[0].message.content)


def instructor_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of instructor."""
    import instructor
    import openai

    def create(mode: str) -> None:
        client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY), mode=getattr(instructor.Mode, mode))
        is_person(client.chat.completions.create(model=MODEL, messages=CHAT, response_model=Person, max_retries=0))

    for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA"):
        yield mode, lambda mode=mode: create(mode)

    def responses() -> None:
        client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY), mode=instructor.Mode.RESPONSES_TOOLS)
        is_person(client.responses.create(model=MODEL, input=ASK, response_model=Person, max_retries=0))

    def partial() -> None:
        client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY))
        *_, last = client.chat.completions.create_partial(model=MODEL, messages=CHAT, response_model=Person)
        assert last.mood == "happy"

    yield "RESPONSES_TOOLS", responses
    yield "partial", partial


def pydantic_ai_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of pydantic-ai."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=BASE, api_key=KEY)
    native = NativeOutput(Person)
    for name, model in (
        ("chat", OpenAIChatModel(MODEL, provider=provider)),
        ("responses", OpenAIResponsesModel(MODEL, provider=provider)),
    ):
        yield f"{name} text", lambda model=model: said(Agent(model).run_sync(ASK).output)
        yield f"{name} tools", lambda model=model: said(called(lambda: Agent(model, tools=[get_weather]).run_sync(ASK)).output)
        yield f"{name} output tool", lambda model=model: is_person(Agent(model, output_type=Person).run_sync(ASK).output)
        yield f"{name} NativeOutput", lambda model=model: is_person(Agent(model, output_type=native).run_sync(ASK).output)
        yield (
            f"{name} NativeOutput with tools",
            lambda model=model: is_person(
                called(lambda: Agent(model, output_type=native, tools=[get_weather]).run_sync(ASK)).output
            ),
        )

    async def streamed() -> None:
        async with Agent(OpenAIChatModel(MODEL, provider=provider)).run_stream(ASK) as run:
            said([text async for text in run.stream_text()][-1])

    yield "stream", lambda: asyncio.run(streamed())


def agents_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of openai-agents."""
    from agents import (
        Agent,
        AsyncOpenAI,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=BASE, api_key=KEY)
    weather = function_tool(get_weather)

    def get_weather_again(city: str) -> str:
        """Return the weather of a city once more."""
        return get_weather(city)

    async def streamed(agent: Any) -> Any:
        run = Runner.run_streamed(agent, ASK)
        assert [event async for event in run.stream_events()]
        return run.final_output

    models: Any = (
        ("chat", OpenAIChatCompletionsModel(model=MODEL, openai_client=client)),
        ("responses", OpenAIResponsesModel(model=MODEL, openai_client=client)),
    )
    for name, model in models:
        same: Any = {"name": "one", "model": model}
        plain, tool = Agent(**same), Agent(tools=[weather], **same)
        typed, both = Agent(output_type=Person, **same), Agent(tools=[weather], output_type=Person, **same)
        several = Agent(tools=[weather, function_tool(get_weather_again)], **same)
        passing = Agent(handoffs=[Agent(name="two", model=model)], **same)
        yield f"{name} text", lambda a=plain: said(Runner.run_sync(a, ASK).final_output)
        yield f"{name} tools", lambda a=tool: said(called(lambda: Runner.run_sync(a, ASK)).final_output)
        yield f"{name} output_type", lambda a=typed: is_person(Runner.run_sync(a, ASK).final_output)
        yield f"{name} tools and output_type", lambda a=both: is_person(called(lambda: Runner.run_sync(a, ASK)).final_output)
        yield f"{name} parallel calls", lambda a=several: said(called(lambda: Runner.run_sync(a, ASK), 2).final_output)
        yield f"{name} hand-off", lambda a=passing: said(Runner.run_sync(a, ASK).final_output)
        yield f"{name} streamed tools", lambda a=tool: said(called(lambda: asyncio.run(streamed(a))))


def llama_index_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of llama-index."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    same: Any = {"model": MODEL, "api_base": BASE, "api_key": KEY, "is_function_calling_model": True}
    model = OpenAILike(is_chat_model=True, **same)
    asked = [ChatMessage(role="user", content=ASK)]
    tool = FunctionTool.from_defaults(get_weather)

    async def agent() -> str:
        return str(await FunctionAgent(tools=[tool], llm=model).run(ASK))

    yield "chat", lambda: said(model.chat(asked).message.content)
    yield "stream_chat", lambda: said("".join(part.delta or "" for part in model.stream_chat(asked)))
    yield "complete", lambda: said(OpenAILike(is_chat_model=False, **same).complete("The sky").text)
    yield "structured", lambda: is_person(model.as_structured_llm(Person).complete(ASK).raw)
    yield "predict_and_call", lambda: called(lambda: model.predict_and_call([tool], ASK))
    yield "FunctionAgent", lambda: said(called(lambda: asyncio.run(agent())))


def haystack_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of haystack."""
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    def model(**more: Any) -> Any:
        return OpenAIChatGenerator(api_key=Secret.from_token(KEY), model=MODEL, api_base_url=BASE, **more)

    asked = [ChatMessage.from_user(ASK)]
    tool = create_tool_from_function(get_weather)
    strict: Any = {"tools_strict": True}

    def agent(**more: Any) -> None:
        said(called(lambda: Agent(chat_generator=model(**more), tools=[tool]).run(messages=asked))["messages"][-1].text)

    yield "chat", lambda: said(model().run(asked)["replies"][0].text)
    yield "agent", agent
    yield "agent with strict tools", lambda: agent(**strict)


def smolagents_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of smolagents."""
    from smolagents import OpenAIServerModel, ToolCallingAgent
    from smolagents import tool as as_tool

    model = OpenAIServerModel(model_id=MODEL, api_base=BASE, api_key=KEY)
    said_by = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]
    yield "generate", lambda: said(model.generate(said_by).content)
    agent = ToolCallingAgent(tools=[as_tool(get_weather)], model=model, max_steps=3, verbosity_level=0)
    yield "ToolCallingAgent", lambda: called(lambda: agent.run(ASK))


def llm_checks() -> Iterable[tuple[str, Callable[[], Any]]]:
    """Yield the checks of the command llm."""
    home = Path(tempfile.mkdtemp())
    entry = f"- model_id: pd\n  model_name: {MODEL}\n  api_base: {BASE}\n  supports_schema: true\n  supports_tools: true\n"
    (home / "extra-openai-models.yaml").write_text(entry)
    (home / "tool.py").write_text('def weather(city: str) -> str:\n    """The weather of a city."""\n    return "sunny"\n')

    def run(*arguments: str) -> str:
        command = [str(Path(sys.executable).with_name("llm")), "-m", "pd", *arguments]
        env = {**os.environ, "LLM_USER_PATH": str(home)}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    yield "prompt", lambda: said(run(ASK))
    yield "no stream", lambda: said(run("--no-stream", ASK))
    yield "schema", lambda: json.loads(run("--schema", "name, age int", ASK))
    yield "tool", lambda: said(run("--functions", str(home / "tool.py"), ASK))


FRAMEWORKS = {
    "openai": openai_checks,
    "langchain": langchain_checks,
    "litellm": litellm_checks,
    "instructor": instructor_checks,
    "pydantic-ai": pydantic_ai_checks,
    "openai-agents": agents_checks,
    "llama-index": llama_index_checks,
    "haystack": haystack_checks,
    "smolagents": smolagents_checks,
    "llm": llm_checks,
}


def main() -> None:
    """Run the checks of one framework."""
    os.environ |= {
        "OPENAI_API_KEY": KEY,
        "OPENAI_BASE_URL": BASE,
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    }
    os.environ |= {"HAYSTACK_TELEMETRY_ENABLED": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    done, wrong = [], []
    with contextlib.redirect_stdout(io.StringIO()):
        for name, check in FRAMEWORKS[NAME]():
            try:
                check()
            except Exception as exc:  # noqa: BLE001 - whatever a framework raises is what its user would see
                wrong.append(f"{name}: {type(exc).__name__}: {str(exc)[:300]}")
            else:
                done.append(name)
    print(json.dumps({"done": done, "wrong": wrong}))


if __name__ == "__main__":
    main()
