"""`python ask.py URL QUESTION`: one streamed answer from a server, by OpenAI's own client."""

import sys

from openai import OpenAI

url, question = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=64, stream=True
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
