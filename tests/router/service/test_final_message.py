"""`continue_final_message`: the prompt ends with the last message as it is, as transformers and vLLM do it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.core.errors import InvalidRequest
from pdserve.text.chat import ChatTemplate
from router.api.request import ChatMessage, ChatPrompt
from router.service.prompts import chat_text

EACH = "{%% for m in messages %%}<|im_start|>{{ m.role }}\n{{ %s }}<|im_end|>\n{%% endfor %%}"
TEMPLATES = {
    "keeps": EACH % "m.content",
    "trims": EACH % "m.content | trim",
    "drops reasoning": EACH % "m.content.split('</think>')[-1].lstrip('\\n')",
}
PIECES = ["<", "|", "im_end", "<|im_end|>", "assistant\n", "assistant", " ", "\n", "```json", "</think>", "x"]


def prompt_of(template: str, content: str | None) -> str:
    talk = (ChatMessage("user", "Write < and |."), ChatMessage("assistant", content))
    prompt = ChatPrompt(talk, add_generation_prompt=False, continue_final_message=True)
    return chat_text(ChatTemplate(template, {}), prompt)


@given(st.sampled_from(sorted(TEMPLATES)), st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join))
@example("keeps", "<")
@example("keeps", "im_end")
@example("keeps", "```json\n")
@example("trims", "The answer is ")
def test_the_final_message_is_cut_where_it_ends_and_not_where_its_text_stands_last(name: str, content: str) -> None:
    """ "<" gave a prompt that ended in "<<", and "im_end" one that ended in the template's own mark."""
    from transformers.utils.chat_template_utils import render_jinja_template  # slow

    template = TEMPLATES[name]
    talk = [{"role": "user", "content": "Write < and |."}, {"role": "assistant", "content": content}]
    try:
        (expected,), _ = render_jinja_template([talk], chat_template=template, continue_final_message=True)
    except ValueError:
        with pytest.raises(InvalidRequest, match=r"^continue_final_message: the final message does not stand in the prompt"):
            prompt_of(template, content)
        return
    if content.strip():
        assert prompt_of(template, content) == expected
    if name == "keeps":
        assert prompt_of(template, content).endswith(content)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_empty_final_message_leaves_its_opening(name: str) -> None:
    """transformers also takes the line end of the opening where a template trims messages."""
    assert prompt_of(TEMPLATES[name], "").endswith("<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(InvalidRequest, match=r"^continue_final_message: needs a final message with a text"):
        prompt_of(TEMPLATES[name], None)
