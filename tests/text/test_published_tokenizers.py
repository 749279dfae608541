"""Published tokenizers give the ids of their own packages' encoders, the text back, and the text in a stream.

The packages are not installed by `make setup`; docs/models.md names them. A test without its package is skipped.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from published_tokenizers import PUBLISHED, SPM_FILES, TEKKEN_FILES, Published, mistral_files, with_first_prefix
from test_family_chats import LLAMA3

from pdserve.text.chat import ChatTemplate
from pdserve.text.output import OutputText

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TEXTS = (
    "Hello, world!",
    " leading and trailing ",
    "  two   spaces\tand\ta tab\n\n\nand lines\r\n\r\n  end  ",
    "I'm you're we've they'll he'd IT'S DON'T",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F 2026-11-23 ½ ٣٤ ৪৫ ⅷ",
    "Übergröße naïve façade Ångström e\u0301 \u1e9b\u0323 ﬁ",
    "日本語のテキストと中文文本，以及한국어 텍스트。",
    "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดี",
    "🎉👩‍👩‍👧‍👦🇩🇪 ✈️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010fffd",
    "\u00a0\u2003\u200b\u3000nbsp and wide spaces\u2028lines",
    "if (a<b && c>>2) { return x[i++] ** ~mask; } // TODO: 50%",
    "<p class='x'>&nbsp;</p> <0x41> ▁ Ġ ## [CLS]",
    "\x00\x01\x7f control",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)
PIECES = (
    *"aAzZ09 \n\t.,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+~`éßñ中文字かな한글жшλ‑–—…\u0301\u00a0🎉",
    *("  ", "\n\n", "\r\n", "'s", "'LL", "the", " the", "ing", "123", "1234", "def ", "    ", "ḍ̇", "👍🏽", "ﷺ", "𝒳"),
)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Callable[[str], Published]:
    """published(name): a tokenizer of `PUBLISHED`, made once."""
    made: dict[str, Published] = {}

    def make(name: str) -> Published:
        if name not in made:
            made[name] = PUBLISHED[name](tmp_path_factory.mktemp("published"))
        return made[name]

    return make


def texts(name: str) -> list[str]:
    """Return fixed texts, random ones, and files of this repository."""
    rng = random.Random(name)
    mixed = ["".join(rng.choices(PIECES, k=rng.randint(1, 40))) for _ in range(1500)]
    runs = ["a" + " " * count + "b" for count in range(1, 90)]
    files = [path.read_text() for path in (ROOT / "README.md", ROOT / "pdserve/core/kv_layout.py", ROOT / "Makefile")]
    return [*TEXTS, *mixed, *runs, *files]


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_of_a_published_tokenizer_are_those_of_its_own_encoder(name, published):
    """The ids are equal, and decoded at once or streamed token by token they give the text."""
    one = published(name)
    for text in texts(name):
        ids = one.ours.encode(text, add_special_tokens=False)
        assert ids == one.encode(text), repr(text[:200])
        assert one.ours.decode(ids) == one.normal(text)
        output = OutputText(one.ours)
        assert "".join(output.push(index).text for index in ids) + output.flush() == one.normal(text)


TALKS = (
    [("user", "Hello, who are you?")],
    [("user", "Hi"), ("assistant", "Hello there."), ("user", "What is 2 + 2?\n\nTell me.")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Why?")],
)


@pytest.mark.parametrize("talk", TALKS, ids=["one turn", "three turns", "system"])
@pytest.mark.parametrize("name", [*SPM_FILES, *TEKKEN_FILES])
def test_mistrals_chat_template_gives_the_prompt_of_its_own_encoder(name, talk, published, tmp_path):
    """The template is the one that the package writes for this tokenizer. Its text, encoded by us, has the package's ids."""
    one, path = published(name), str(mistral_files() / name)
    ours = with_first_prefix(one.folder, tmp_path) if name in SPM_FILES else one.ours
    from mistral_common.integrations.chat_templates.chat_templates import convert_tokenizer_to_chat_template
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    template = ChatTemplate(convert_tokenizer_to_chat_template(path), {"bos_token": "<s>", "eos_token": "</s>"})
    messages = [{"role": role, "content": content} for role, content in talk]
    wanted = MistralTokenizer.from_file(path).encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
    assert ours.encode(template.render(talk), add_special_tokens=False) == wanted


@pytest.mark.parametrize("talk", TALKS, ids=["one turn", "three turns", "system"])
def test_llama_3s_chat_form_gives_the_prompt_of_its_own_encoder(talk, published):
    one = published("llama3")
    from llama_models.datatypes import RawMessage
    from llama_models.llama3.chat_format import ChatFormat
    from llama_models.llama3.tokenizer import Tokenizer as Own

    messages = [RawMessage(role=role, content=content) for role, content in talk]
    wanted = ChatFormat(Own.get_instance()).encode_dialog_prompt(messages).tokens
    template = ChatTemplate(LLAMA3, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"})
    assert one.ours.encode(template.render(talk), add_special_tokens=False) == wanted
