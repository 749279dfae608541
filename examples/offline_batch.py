"""A batch on a cluster of this program's own: one prefill worker and one decode worker, which end with it.

python examples/offline_batch.py [--model default]
"""

import argparse

from pdserve import LLM, SamplingParams


def main() -> None:
    """Answer two questions and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--max-tokens", type=int, default=48)
    options = parser.parse_args()
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    questions = ["Why is the sky blue?", "What is a haiku?"]
    with LLM(options.model) as llm:
        for question, answer in zip(questions, llm.generate(questions, params), strict=True):
            print(f"{question}\n    {answer.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
