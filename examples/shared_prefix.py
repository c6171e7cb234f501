"""Several questions about one long text: its keys and values are computed once.

Start a server with `scripts/serve`, then: python examples/shared_prefix.py [URL]
"""

import sys
import time

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id

STORY = "A fox met a crow that held a piece of cheese in its beak. " * 8
QUESTIONS = ["Who met the crow?", "What did the crow hold?", "Where did it hold it?"]

for question in QUESTIONS:
    start = time.perf_counter()
    reply = client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": STORY}, {"role": "user", "content": question}],
        temperature=0,
        max_tokens=16,
    )
    cached = reply.usage.prompt_tokens_details.cached_tokens
    print(
        f"{question} {reply.choices[0].message.content!r}: {cached} of "
        f"{reply.usage.prompt_tokens} prompt tokens were cached, "
        f"{time.perf_counter() - start:.2f} s"
    )
