"""Many streams at once, with a seed each: a stream's text does not depend on its neighbours.

Start a server with `scripts/serve`, then: python examples/many_streams.py [URL]
"""

import asyncio
import sys

from openai import AsyncOpenAI

STREAMS = 16
url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"


async def tell(client: AsyncOpenAI, model: str, seed: int) -> str:
    stream = await client.completions.create(
        model=model,
        prompt="My favourite animal is",
        seed=seed,
        temperature=0.8,
        max_tokens=12,
        stream=True,
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id
        together = await asyncio.gather(*(tell(client, model, seed) for seed in range(STREAMS)))
        for seed, text in enumerate(together):
            print(f"{seed:3}: {text!r}")
        alone = await tell(client, model, 3)
        print("the fourth stream, alone:", "the same" if alone == together[3] else "another text")


asyncio.run(main())
