"""The forms of each family from end to end: a template shows the tools and earlier calls, and the parser that is found by the
template reads back what a model writes in that form, from token ids, with marks that are special tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from pdserve.config import RouterConfig
from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import FinishReason
from pdserve.text.calls.events import CallArguments, CallBegin, Content, Reasoning
from pdserve.text.calls.marks import MarkInserter
from pdserve.text.calls.output import OutputParser
from pdserve.text.calls.reasoning import ReasoningParser
from pdserve.text.calls.registry import CALL_FORMS, call_form, reasoning_form
from pdserve.text.chat import ChatTemplate
from pdserve.text.output import OutputText
from pdserve.text.tokenizer import Tokenizer
from router.api.answer import Delta
from router.api.request import ChatMessage, ChatPrompt, GenerateInput, Tool
from router.service.buffered_generation import BufferedGeneration
from router.service.chats import Chats

SHOW_TOOLS = "{%- if tools %}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{%- endif %}"
QWEN = (
    SHOW_TOOLS
    + """{%- for m in messages %}{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.role == 'tool' %}{{- '<tool_response>\\n' + m.content + '\\n</tool_response>' }}{%- else %}{{- m.content }}{%- endif %}
{%- if m.tool_calls %}{%- for tool_call in m.tool_calls %}{%- set call = tool_call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
)
MISTRAL = """{{- bos_token }}{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls is defined and m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' + eos_token }}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"""
LLAMA3 = (
    SHOW_TOOLS
    + """{%- for m in messages %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
{%- if 'tool_calls' in m %}{%- for call in m.tool_calls %}
{{- '<|python_tag|>{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}{%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endfor %}"""
)
DEEPSEEK = (
    SHOW_TOOLS
    + """{{- bos_token }}{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}{%- endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in m['tool_calls'] %}{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' }}
{{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}
{{- '<｜tool▁calls▁end｜>' + eos_token }}{%- elif m['role'] == 'assistant' %}{{- '<｜Assistant｜>' + m['content'] }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""
)
GRANITE = (
    SHOW_TOOLS
    + """{%- for m in messages %}{{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content }}
{%- if m.tool_calls %}{{- '<|tool_call|>[' }}{%- for call in m.tool_calls %}{{- call.function | tojson }}
{%- if not loop.last %}, {% endif %}{%- endfor %}{{- ']' }}{%- endif %}{{- '<|end_of_text|>' }}{%- endfor %}"""
)
LLAMA4 = (
    SHOW_TOOLS
    + """{%- for m in messages %}{{- '<|header_start|>' + m.role + '<|header_end|>' + m.content }}
{%- if m.tool_calls %}{{- '<|python_start|>[' }}{%- for call in m.tool_calls %}{{- call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}{{- key + '=' + (value | tojson) }}{%- if not loop.last %}, {% endif %}
{%- endfor %}{{- ')' }}{%- if not loop.last %}, {% endif %}{%- endfor %}{{- ']<|python_end|>' }}{%- endif %}{{- '<|eot|>' }}
{%- endfor %}"""
)

CODER = (
    SHOW_TOOLS
    + """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}{{- '<parameter=' + name + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"""
)

FAMILIES = {
    "qwen3_coder": (CODER, "<|im_start|>assistant\n", "<|im_end|>"),
    "hermes": (QWEN, "<|im_start|>assistant\n", "<|im_end|>"),
    "mistral": (MISTRAL, "[/INST]", "</s>"),
    "llama3_json": (LLAMA3, "assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "deepseek_v3": (DEEPSEEK, "<｜Assistant｜>", "</s>"),
    "granite": (GRANITE, "assistant<|end_of_role|>", "<|end_of_text|>"),
    "pythonic": (LLAMA4, "assistant<|header_end|>", "<|eot|>"),
}
"""The template, what stands before the assistant's words, and what ends them."""
CONTROL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<｜User｜>",
    "<｜Assistant｜>", "<|end_of_text|>", "<|eot|>", "[INST]", "[/INST]",
)  # fmt: skip
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "It is f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}},
]
CALLS = [("get_weather", {"city": "Zürich ☀", "days": 2}), ("f", {"list": [1, "a"], "o": {"x": 0.5}})]


def message_of(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    made = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A small tokenizer of bytes, in which all marks but those of Hermes and of reasoning are special tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = [mark for name, form in CALL_FORMS.items() if "<tool_call>" not in form.marks for mark in form.marks]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[*CONTROL, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([json.dumps(TOOLS), str(CALLS), "function ```json get_weather(city)"], trainer)
    return Tokenizer(backend, None)


def read(
    tokenizer: Tokenizer, form: str, ids: list[int], stop: tuple[str, ...] = (), joined: int = 1
) -> tuple[str, str, list[Any]]:
    """Return content, reasoning and calls of output ids, as the worker and the router make them."""
    special = tokenizer.special_tokens
    marks = {index: text for index, text in special.items() if text in CALL_FORMS[form].marks}
    inserter = MarkInserter(marks, tokenizer.token_bytes, tokenizer.stream())
    parser = OutputParser(ReasoningParser(opened=False), CALL_FORMS[form].machine(["f", "get_weather"]))
    output = OutputText(tokenizer, stop=stop)
    events = []
    for batch in batches(ids, joined):
        steps = [output.push(token_id) for token_id in batch]
        events += parser.push(inserter.push(batch, "".join(step.text for step in steps)))
        if any(step.stopped for step in steps):
            break
    events += parser.push(inserter.push([], output.flush())) + parser.flush()
    calls: list[Any] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return content, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


def batches(ids: list[int], size: int) -> list[list[int]]:
    return [ids[at : at + size] for at in range(0, len(ids), size)]


@pytest.mark.parametrize("form", FAMILIES)
def test_what_a_template_shows_of_calls_is_what_its_parser_reads(form: str, trained: Tokenizer) -> None:
    source, before, after = FAMILIES[form]
    template = ChatTemplate(source, TOKENS)
    assert call_form("auto", source) == form
    template.check_tools()
    assert template.renders_calls
    talk: list[dict[str, Any]] = [{"role": "user", "content": "Go"}, message_of(CALLS)]
    text = template.render_chat(talk, TOOLS, add_generation_prompt=False)
    assert '"It is f"' in text
    said = text[text.index(before) + len(before) :]
    ids = trained.encode(said, add_special_tokens=False)
    assert after in trained.special_tokens.values()
    for joined in (1, 2, 7, 999):
        assert read(trained, form, ids, joined=joined) == ("", "", CALLS)


PUBLISHED = {
    "Qwen 2.5 and 3, Hermes": ("hermes", r"within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>"),
    "Qwen3-Coder": (
        "qwen3_coder",
        r"'<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n'",
    ),
    "Mistral 7B": ("mistral", "'[AVAILABLE_TOOLS] [' ... '[TOOL_CALLS] ['"),
    "Mistral Small 3.2": ("mistral", "'[TOOL_CALLS]' + name + '[CALL_ID]' + tool_call.id + '[ARGS]' + arguments"),
    "Llama 3.1": (
        "llama3_json",
        """'<|python_tag|>' ... 'Respond in the format {"name": function name, "parameters": dictionary'""",
    ),
    "Llama 3.2": (
        "llama3_json",
        """'Respond in the format {"name": function name, "parameters": dictionary of argument name'""",
    ),
    "Llama 4": ("pythonic", """'Respond in the format {"name": function name, "parameters": ' ... '<|python_start|>'"""),
    "DeepSeek V3": (
        "deepseek_v3",
        "'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'",
    ),
    "Granite 3": ("granite", "When a tool is required, respond only with <|tool_call|> followed by a JSON list of tools"),
    "SmolLM2": ("", "{{'<|im_start|>' + message['role'] + message['content'] + '<|im_end|>'}}"),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_templates_get_the_parser_of_their_family(family: str) -> None:
    """The texts are what each published template has of its form."""
    form, excerpt = PUBLISHED[family]
    assert call_form("auto", excerpt) == form


def test_the_table_of_the_documentation_has_every_parser() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "tools.md").read_text()
    table = page[page.index("| `--tool-call-parser` |") :].split("\n\n")[0]
    assert {line.split("`")[1] for line in table.splitlines()[2:]} == {*CALL_FORMS, "none"}


@pytest.mark.parametrize("form", FAMILIES)
def test_a_template_without_tools_in_the_chat_shows_none(form: str) -> None:
    text = ChatTemplate(FAMILIES[form][0], TOKENS).render([("user", "Go")])
    assert "It is f" not in text
    assert "AVAILABLE" not in text


def test_answers_of_tools_and_their_ids_reach_the_template() -> None:
    talk = [message_of(CALLS[:1]), {"role": "tool", "content": "21", "tool_call_id": "abcdefgh0"}]
    text = ChatTemplate(MISTRAL, TOKENS).render_chat(talk, TOOLS)
    assert text.endswith('[TOOL_RESULTS] {"content": 21, "call_id": "abcdefgh0"}[/TOOL_RESULTS]')
    with pytest.raises(InvalidRequest, match="nine characters"):
        ChatTemplate(MISTRAL, TOKENS).render_chat([talk[0], {**talk[1], "tool_call_id": "x"}], TOOLS)


def test_a_missing_content_is_none_only_for_a_template_that_asks() -> None:
    message = [message_of(CALLS[:1])]
    assert "<｜tool▁calls▁begin｜>" in ChatTemplate(DEEPSEEK, TOKENS).render_chat(message, TOOLS)
    assert "None" not in ChatTemplate(QWEN, TOKENS).render_chat(message, TOOLS)


def test_variables_of_a_template_are_those_that_it_reads() -> None:
    template = ChatTemplate(QWEN, TOKENS)
    hi = [{"role": "user", "content": "Hi"}]
    assert template.render_chat(hi, (), {"enable_thinking": False}).endswith("</think>\n\n")
    for name in ("thinking", "messages", "tools", "bos_token", "raise_exception"):
        with pytest.raises(InvalidRequest, match=f"^chat_template_kwargs.{name}"):
            template.render_chat(hi, (), {name: 1})


def test_a_template_of_its_own_for_tools_is_taken_for_them(tmp_path: Any) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    hi = [{"role": "user", "content": "Hi"}]
    assert (template.render_chat(hi), template.render_chat(hi, TOOLS)) == ("plain", "2 tools")
    (tmp_path / "mine.jinja").write_text("mine")
    other = ChatTemplate.load(tmp_path, tmp_path / "mine.jinja")
    assert other is not None
    assert other.render_chat(hi) == "mine"


def test_the_reasoning_of_a_family_is_found_by_its_template() -> None:
    assert reasoning_form("auto", QWEN) == "qwen3"
    assert reasoning_form("auto", DEEPSEEK) == "deepseek_r1"
    assert reasoning_form("auto", MISTRAL) == ""


WORDS = ["f", "{", '"name"', "é☀", " ", "[TOOL_CALLS]", "</s>", "[", "[ARGS]", "ab", "<think>", "</think>", "\n"]


@given(
    words=st.lists(st.sampled_from(WORDS), max_size=14),
    stop=st.sampled_from([(), ("ab",), ("☀ ", "f{")]),
    joined=st.integers(1, 5),
)
def test_marks_stand_where_their_tokens_are(words: list[str], stop: tuple[str, ...], joined: int, trained: Tokenizer) -> None:
    """Marks are told as if the worker had written them, also if the text is held back or cut at a stop string."""
    ids = trained.encode("".join(words), add_special_tokens=False)
    special = trained.special_tokens
    marks = {index: text for index, text in special.items() if text in ("[TOOL_CALLS]", "[ARGS]")}
    inserter = MarkInserter(marks, trained.token_bytes, trained.stream())
    output = OutputText(trained, stop=stop)
    told, plain, stopped = "", "", False
    for batch in batches(ids, joined):
        steps = [output.push(token_id) for token_id in batch]
        text = "".join(step.text for step in steps)
        plain += text
        told += inserter.push(batch, text)
        stopped = any(step.stopped for step in steps)
        if stopped:
            break
    rest = output.flush()
    plain, told = plain + rest, told + inserter.push([], rest)
    written = "".join(word for word in words if word != "</s>")
    assert told.replace("[TOOL_CALLS]", "").replace("[ARGS]", "") == plain
    assert written.startswith(told)
    if not stopped:
        assert told == written


@pytest.mark.parametrize("skip", [True, False])
def test_marks_that_the_worker_wrote_are_not_written_again(skip: bool, trained: Tokenizer) -> None:
    """The call is read alike, whether the text has its special tokens or the router puts the marks in."""
    chats = Chats(trained, RouterConfig(tool_call_parser="mistral", reasoning_parser="none"))
    prompt = ChatPrompt((ChatMessage("user", "Hi"),), (Tool("f"),))
    request = chats.prepare(GenerateInput(prompt, sampling={"skip_special_tokens": skip}))
    ids = tuple(trained.encode("ab[TOOL_CALLS]f[ARGS]{}", add_special_tokens=False))

    async def story() -> list[Delta]:
        inner = BufferedGeneration("r", (1,), lambda _: None)
        inner.push(Delta(0, ids, trained.decode(ids, skip_special_tokens=skip), FinishReason.STOP))
        deltas = aiter(chats.read(inner, request, (1,)))
        return [await anext(deltas), await anext(deltas)]

    delta, last = asyncio.run(story())
    assert (delta.text, [(call.name, call.arguments) for call in delta.calls]) == ("ab", [("f", "{}")])
    assert (delta.finish_reason, last.finish_reason) == (None, FinishReason.TOOL_CALLS)
