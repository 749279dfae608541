"""Write tests/goldens from the reference implementation (transformers, float32, CPU). Run: `make goldens`.

Files, for each MODEL of "tiny" and "default":

`MODEL.npz`, for prompt number i (from 0, `len(MODEL.json["prompts"])` of them):
    prompt_{i}     int32   [n]         token ids
    positions_{i}  int32   [p]         which positions of the prompt have logits here; tiny: all; default: the last two
    logits_{i}     float32 [p, vocab]  the reference's logits at those positions
    greedy_{i}     int32   [16]        the greedy continuation; the end of sequence does not stop it
    margins_{i}    float32 [16]        best minus second-best logit at each step; ignore the tokens after a near tie

`MODEL.json`: the prompts' texts, the model's fingerprint, the versions that made it.
`default_tensors.json`: a digest of all tensors of the default model's GGUF, equal to transformers' own reading of it.
`default_text.json`: texts with their token ids, and chats with their rendered prompts.

Read them so:

    golden = np.load("tests/goldens/tiny.npz")
    ids, logits = golden["prompt_0"], golden["logits_0"]        # compare: max abs difference <= 1e-4 in float32
    assert ModelCard.load(resolve("tiny")).fingerprint == json.load(open("tests/goldens/tiny.json"))["fingerprint"]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import default_gguf, resolve

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
GREEDY_TOKENS = 16

STORY = (
    "The lighthouse keeper climbed the stairs every evening at dusk, counted 128 steps, lit the lamp and wrote one line "
    "into the book. For thirty-one years nothing had happened that needed a second line. Then, in the autumn of 1987, "
)
PROMPTS: dict[str, list[str]] = {
    "tiny": [
        "a",
        "Hello world, how are you?",
        "exactly sixteen!!",
        "The cat and the other people of this world would not have been here before, had they known what was good.",
        "<|im_start|>user\nCount: 1, 2, 3; naïve café 🎉 日本語<|im_end|>\n<|im_start|>assistant\n",
        "One, two, three and so on: " + "there would have been more time for the people of this world, " * 5,
    ],
    "default": [
        "Hi",
        "The capital of France is",
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n",
        "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n",
        "Naïve café, 日本語, emoji 🎉🚀 — “quotes”\n\n1. ",
        STORY * 5,
    ],
}
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew\r\nlines\n\n\nthree",
    "digits 1 22 333 4444 12345678 3.14159 1,000,000",
    "don't I'll we've they're it's I'd I'm",
    "def f(x):\n    return x**2  # comment\n\n\nclass A:\n\tpass\n",
    '{"key": [1, 2, {"nested": null}], "s": "\\u00e9"}',
    "日本語テキスト 中文字符 한국어 العربية עברית ไทย हिन्दी",
    "emoji 🎉🚀👩‍👩‍👧‍👦🏳️‍🌈 and combining e\u0301 ﬁ ligature",
    "zero\u200bwidth\u00a0nbsp\u2003em\u3000ideographic",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<file_sep>",
    "MiXeD CaSe ALLCAPS snake_case camelCase kebab-case http://example.com/?q=a&b=c#d",
    "a" * 50 + " " * 30 + "!" * 20,
    STORY,
]
NUMERAL_TEXTS = [  # texts that "smollm" and GPT-2's rule split differently: a numeral after white space, or of several bytes
    "½ cup, x² + y², ٣ and ４２ Ⅻ",
    "\n\n1. one\n\n2. two",
    "x  =  12",
    "    42\n\t\t7",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}],
    [
        {"role": "user", "content": "  spaces  \n"},
        {"role": "assistant", "content": "naïve 🎉"},
        {"role": "user", "content": "<b>{{ not_a_template }}</b> & 'quotes'"},
    ],
]


def main() -> None:
    """Write all files."""
    torch.set_num_threads(1)  # so that sums are always added in one order
    GOLDENS.mkdir(exist_ok=True)
    write_default_tensors()
    for model in PROMPTS:
        write_model(model)
    write_default_text()


def write_model(model: str) -> None:
    """Write `MODEL.npz` and `MODEL.json` of one model."""
    directory = resolve(model)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    arrays: dict[str, np.ndarray] = {}
    for index, text in enumerate(PROMPTS[model]):
        ids = tokenizer(text)["input_ids"]
        positions = range(len(ids)) if model == "tiny" else range(max(0, len(ids) - 2), len(ids))
        greedy, margins = continue_greedily(reference, ids)
        arrays |= {
            f"prompt_{index}": np.array(ids, np.int32),
            f"positions_{index}": np.array(positions, np.int32),
            f"logits_{index}": logits(reference, ids)[list(positions)],
            f"greedy_{index}": np.array(greedy, np.int32),
            f"margins_{index}": np.array(margins, np.float32),
        }
    np.savez_compressed(GOLDENS / f"{model}.npz", **arrays)
    write_json(
        f"{model}.json",
        {"prompts": PROMPTS[model], "fingerprint": ModelCard.load(directory).fingerprint, "made_by": versions()},
    )


@torch.inference_mode()
def logits(reference: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Return the logits, [len(ids), vocab] float32. The whole sequence is computed at once, without a cache."""
    return reference(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def continue_greedily(reference: PreTrainedModel, ids: list[int]) -> tuple[list[int], list[float]]:
    """Return the next tokens, and the margin of each choice. Every step computes the sequence from its start, as a check on
    caches.
    """
    greedy: list[int] = []
    margins: list[float] = []
    for _ in range(GREEDY_TOKENS):
        last = logits(reference, ids + greedy)[-1]
        second, first = np.partition(last, -2)[-2:]
        greedy.append(int(last.argmax()))
        margins.append(float(first - second))
    return greedy, margins


def write_default_tensors() -> None:
    """Write a digest of the default model's tensors. Raises `AssertionError` unless our reading of the GGUF and transformers'
    have the same numbers. Theirs takes 18 s, so tests compare digests.
    """
    ours = AutoModelForCausalLM.from_pretrained(resolve("default"), dtype=torch.float32)
    theirs = load_gguf_checkpoint(str(default_gguf()), return_tensors=True, model_to_load=ours)["tensors"]
    state = ours.state_dict()
    untied = state.keys() - {"lm_head.weight"}  # the same tensor as the embedding
    assert theirs.keys() == untied, f"names differ: {sorted(theirs.keys() ^ untied)[:5]}"
    different = [name for name in theirs if not torch.equal(state[name], theirs[name])]
    assert not different, f"differ from transformers' own reading: {different[:5]}"
    digest = tensors_digest((name, theirs[name].numpy()) for name in sorted(theirs))
    write_json("default_tensors.json", {"made_by": versions(), "tensors": len(theirs), "sha256": digest})


def tensors_digest(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    """Return the SHA-256 of names, shapes and float32 values, in the order given."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.shape} {tensor.dtype}\n".encode())
        digest.update(np.ascontiguousarray(tensor).data)
    return digest.hexdigest()


def write_default_text() -> None:
    """Write texts with their token ids, and chats with their rendered prompts.

    transformers does not know the GGUF's splitting rule "smollm", and uses GPT-2's. Texts that the two rules split differently
    are tokenised after the rule that the name means was put into its tokenizer.
    """
    path = default_gguf()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    plain = {text: tokenizer(text)["input_ids"] for text in TEXTS}
    split = tokenizers.pre_tokenizers
    tokenizer.backend_tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    numerals = {text: tokenizer(text)["input_ids"] for text in NUMERAL_TEXTS}
    write_json(
        "default_text.json",
        {
            "made_by": versions(),
            "texts": [{"text": text, "ids": ids} for text, ids in plain.items()],
            "numeral_texts": [{"text": text, "ids": ids} for text, ids in numerals.items()],
            "chats": [{"messages": chat, "prompt": render(tokenizer, chat)} for chat in CHATS],
        },
    )


def render(tokenizer: Any, chat: list[dict[str, str]]) -> str:
    """Return the prompt that the chat template makes of a chat."""
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def versions() -> dict[str, str]:
    """Return the versions of the libraries that made the files."""
    return {module.__name__: module.__version__ for module in (transformers, torch, tokenizers, np)}


def write_json(name: str, value: dict[str, Any]) -> None:
    """Write one JSON file into the folder of goldens."""
    (GOLDENS / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
