"""Chats become prompts as the reference renders them; a hostile template is refused, soon and in words."""

from __future__ import annotations

import json

import pytest

from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer

HI = [("user", "Hi")]

ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops without output": "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
    "a condition that never holds": "{% set r = range(99999)|list %}{% for a in r if (r|sort|length) < 0 %}{% endfor %}",
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a filter for each element": "{% set r = range(99999)|list %}{{ r|map('replace', '1', '2')|list|length }}"
    "{% for a in r %}{{ r|map('string')|list|length }}{% endfor %}",
}
HUGE = {
    "times": "{{ 'a' * 10000000000 }}",
    "times, in a condition": "{% if 'a' * 10000000000 == 'b' %}{% endif %}",
    "a list times": "{{ ([0] * 10000000000)|length }}",
    "power": "{{ 10 ** 1000000000 }}",
    "numbers squared": "{% set n = namespace(x=10) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "plus": "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "tilde": "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "blocks": "{% set n = namespace(x='aa') %}{% for i in range(40) %}{% set y %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = y %}{% endfor %}",
    "macros": "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ f('aa', 40) }}",
    "replace": "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}",
    "replace, as a filter": "{% set s = 'a' * 100000 %}{{ s|replace('a', s) }}",
    "join": "{% set s = 'a' * 100000 %}{{ s.join([s] * 100000) }}",
    "join, as a filter": "{% set s = 'a' * 100000 %}{{ range(99999)|join(s) }}",
    "join of an iterator": "{% set s = 'a' * 100000 %}{{ s.join(range(99999)|map('string')) }}",
    "a wide field": "{{ '%1000000000d' % 1 }}",
    "a computed width": "{{ '%*d' % (1000000000, 1) }}",
    "a wide field, the newer way": "{{ '{:1000000000}'.format(1) }}",
    "a computed width, the newer way": "{{ '{:{}}'.format(1, 1000000000) }}",
    "padding": "{{ 'a'.ljust(10000000000) }}",
    "indent": "{{ ('\n' * 100000)|indent(100000) }}",
    "JSON": "{{ [[[[1]]]]|tojson(indent=1000000000) }}",
    "lists that share their parts": "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
    "{% endfor %}{{ n.x }}",
    "output, piece by piece": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ s }}{% endfor %}",
    "lorem ipsum": "{{ lipsum(1000000) }}",
}
INTERNALS = {
    "class": "{{ ''.__class__.__name__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__ }}",
    "by filter": "{{ (messages|attr('__class__')).__name__ }}",
    "by format": "{{ '{0.__class__.__mro__}'.format(messages) }}{{ messages.__class__.__mro__ }}",
    "through self": "{{ self.__init__.__globals__ }}",
    "changing the input": "{{ messages.append(1) }}",
}


def render(source: str, messages: list[tuple[str, str]] = HI) -> str:
    return ChatTemplate(source, {}).render(messages)


def rendered(tokenizer: Tokenizer, messages: list[tuple[str, str]]) -> str:
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template.render(messages)


def test_the_default_template_equals_the_reference(tokenizer_of, default_text):
    for chat in default_text["chats"]:
        messages = [(m["role"], m["content"]) for m in chat["messages"]]
        assert rendered(tokenizer_of["default"], messages) == chat["prompt"]


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.timeout(180)
def test_a_template_that_computes_for_ever_is_refused(name, monkeypatch):
    """It once held up the thread that serves everyone."""
    monkeypatch.setattr("pdserve.text.chat.RENDER_S", 0.2)
    with pytest.raises(InvalidRequest, match=r"messages.* computes for more than 0\.2 s"):
        render(ENDLESS[name])


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.timeout(180)
def test_a_template_that_makes_a_huge_value_is_refused(name):
    """It once was measured only after it had been made."""
    with pytest.raises(InvalidRequest) as caught:
        render(HUGE[name])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("name", INTERNALS)
def test_a_template_cannot_reach_pythons_internals(name):
    with pytest.raises(InvalidRequest) as caught:
        render(INTERNALS[name])
    assert caught.value.field == "messages"


def test_what_a_template_refuses_is_the_clients_mistake_in_the_templates_words():
    with pytest.raises(InvalidRequest, match=r"messages.*roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


def test_a_template_that_fails_on_its_input_says_so():
    with pytest.raises(InvalidRequest, match="cannot render them"):
        render("{{ 1 // 0 }}")
    with pytest.raises(InvalidRequest, match="refuses them"):
        render("{{ messages[7].content }}")


def test_a_template_that_is_not_valid_is_a_config_error():
    with pytest.raises(ConfigError, match="chat template is not valid"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(ConfigError, match="chat template is not valid"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", {})


@pytest.mark.parametrize("count", [0, MAX_MESSAGES + 1])
def test_the_number_of_messages_is_bounded(count):
    with pytest.raises(InvalidRequest, match=f"1 to {MAX_MESSAGES} messages, got {count}"):
        render("x", HI * count)


def test_the_most_messages_fit_into_the_time(tokenizer_of):
    text = rendered(tokenizer_of["default"], [("user", "word " * 100)] * MAX_MESSAGES)
    assert text.count("<|im_start|>user") == MAX_MESSAGES


def test_what_real_templates_use_works():
    """Of the templates of Llama 3, Qwen and Mistral: each line beside what it makes."""
    lines = {
        "{{ bos_token }}{{ messages[0]['content'] | trim }}": "<s>Hi",
        "{{ messages | map(attribute='role') | join(', ') }}": "user",
        "{{ (messages | selectattr('role', 'equalto', 'user') | list | length) + 1 }}": "2",
        "{{ messages | tojson }}": '[{"role": "user", "content": "Hi"}]',
        "{{ messages[0] | tojson(indent=2) }}": '{\n  "role": "user",\n  "content": "Hi"\n}',
        "{{ 'a\nb' | indent(2) }}": "a\n  b",
        "{{ 'a' ~ 1 ~ none ~ [2] }}": "a1None[2]",
        "{{ 'x</think>y'.split('</think>')[-1].lstrip('\n') }}": "y",
        "{{ 'abc'.replace('b', '') }}{{ 'abc' | replace('b', 'd') }}": "acadc",
        "{{ 3 % 2 }}{{ 2 ** 3 }}{{ [1] + [2] }}{{ 'ab' * 2 }}{{ '%s-%02d' % ('a', 3) }}": "18[1, 2]ababa-03",
        "{{ '{}!'.format('a') }}": "a!",
        "{% set n = namespace(x=0) %}{% for m in messages if m.role %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}": "1",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}": "013",
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{% else %}none{% endfor %}": "0True",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{{ f(f('b')) }}": "<a><<b>>",
        "{% generation %}said{% endgeneration %}": "said",
        "{{ tools is none }}{{ nothing is defined }}{{ messages[0].content is string }}": "TrueFalseTrue",
        "{{ '<b>&' }}": "<b>&",
        "{{ strftime_now('%%') }}": "%",
        "{% set x %}{{ 'captured' }}{% endset %}{{ x | upper }}": "CAPTURED",
        "{{ {'a': 1}.items() | list }}{{ {'b': 1} | dictsort }}": "[('a', 1)][('b', 1)]",
    }
    for source, made in lines.items():
        assert ChatTemplate(source, {"bos_token": "<s>"}).render(HI) == made, source


def test_clients_words_are_never_taken_as_a_template(tokenizer_of):
    text = rendered(tokenizer_of["tiny"], [("user", "{{ 1 + 1 }}{% raw %}")])
    assert "{{ 1 + 1 }}{% raw %}" in text


def test_two_renderings_of_one_template_do_not_meet():
    template = ChatTemplate(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", {}
    )
    assert [template.render(HI * n) for n in (1, 3, 2)] == ["1", "3", "2"]


# --- where the template is found ---------------------------------------------------------------------------------


def copied(tiny_dir, folder, **changes):
    """The tiny model's tokenizer in `folder`, with another tokenizer_config.json."""
    (folder / "tokenizer.json").write_bytes((tiny_dir / "tokenizer.json").read_bytes())
    config = json.loads((tiny_dir / "tokenizer_config.json").read_text()) | changes
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_without_a_template_chats_are_refused(tiny_dir, tmp_path):
    tokenizer = Tokenizer.load(copied(tiny_dir, tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    assert tokenizer.chat_template is None


def test_the_template_of_its_own_file_wins(tiny_dir, tmp_path):
    copied(tiny_dir, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert rendered(Tokenizer.load(tmp_path), HI) == "from the file"


def test_of_several_templates_the_default_is_taken(tiny_dir, tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}"}]
    eos = {"content": "</s>", "lstrip": False}
    copied(tiny_dir, tmp_path, chat_template=named, eos_token=eos)
    assert rendered(Tokenizer.load(tmp_path), HI) == "</s>"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_not_utf8_is_named(tiny_dir, tmp_path, name):
    copied(tiny_dir, tmp_path)
    (tmp_path / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"{name} is not UTF-8"):
        Tokenizer.load(tmp_path)
