"""The forms of prompts that the families were trained on, from templates written as theirs are."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.text.chat import ChatTemplate

TALK = [("user", " Hi "), ("assistant", "Hello"), ("user", "Why?")]
SYSTEM = [("system", "Be brief."), *TALK]
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}{{- bos_token }}
{%- for message in turns %}
{%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
{%- if message["role"] == "user" %}
{%- if loop.last and system is defined %}{{- "[INST] " + system + "\n\n" + message["content"] + "[/INST]" }}
{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
{%- else %}{{- " " + message["content"] | trim + eos_token }}{%- endif %}{%- endfor %}"""
GEMMA = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
{%- set prefix = messages[0]['content'] + '\n\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
{%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- endif -%}
{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
CHATML = """{%- if tools %}{{- 'tools' }}{%- else %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- endif %}{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first) or message.role == "assistant" %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}
{%- elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}
{%- elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif -%}
{%- set ns = namespace(system='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

FORMS = {
    "llama 3": (LLAMA3, SYSTEM, (
        "<BOS><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )),
    "mistral": (MISTRAL, TALK, "<BOS>[INST]  Hi [/INST] Hello<EOS>[INST] Why?[/INST]"),
    "mistral, system": (MISTRAL, SYSTEM, "<BOS>[INST]  Hi [/INST] Hello<EOS>[INST] Be brief.\n\nWhy?[/INST]"),
    "gemma": (GEMMA, SYSTEM, (
        "<BOS><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n"
    )),
    "chatml": (CHATML, SYSTEM, (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )),
    "phi 3": (PHI3, SYSTEM, (
        "<|system|>\nBe brief.<|end|>\n<|user|>\n Hi <|end|>\n<|assistant|>\nHello<|end|>\n"
        "<|user|>\nWhy?<|end|>\n<|assistant|>\n"
    )),
    "deepseek": (DEEPSEEK, SYSTEM, "<BOS>Be brief.<｜User｜> Hi <｜Assistant｜>Hello<EOS><｜User｜>Why?<｜Assistant｜>"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_template_of_the_family_makes_its_form(name):
    source, messages, prompt = FORMS[name]
    assert ChatTemplate(source, SPECIAL).render(messages) == prompt


def test_what_a_template_refuses_is_an_error_of_the_request():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate(MISTRAL, SPECIAL).render([("user", "a"), ("user", "b")])
