"""Texts from a model without a server. Usage: python examples/offline.py [MODEL]"""

import sys

from detour.llm import LLM
from detour.sampling_params import SamplingParams

PROMPTS = ["The sun rises in the", "Water boils at", "The opposite of hot is"]

# Any option of `detour serve` can be given by name; without a model it is the embedded one.
with LLM(*sys.argv[1:2], max_total_tokens=4096) as llm:
    # All prompts are computed together. Temperature 0 takes the likeliest token each time.
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        print(f"{prompt!r} -> {output.text!r} ({output.finish_reason})")

    # A conversation, rendered with the model's own chat template.
    question = [{"role": "user", "content": "What is the capital of France?"}]
    print(llm.chat(question, SamplingParams(max_tokens=32, temperature=0.0)).text)

    # The same seed gives the same text, whatever else is computed beside it.
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=7)
    alone = llm.generate("Once upon a time", params)[0].text
    among = llm.generate(["Once upon a time", *PROMPTS], params)[0].text
    print(f"{alone!r} {'is' if alone == among else 'is not'} the same alone and among others")
