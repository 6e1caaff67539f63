"""OpenAI's own library against Headrace: a whole answer, a stream, a look at an earlier request, several answers.

pip install openai
python examples/openai_client.py
"""

from __future__ import annotations

import argparse
import asyncio

from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam


def ask(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def one_answer(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ask("Name three colours."), max_tokens=40, temperature=0
    )
    print(f"-- {answer.id}: {answer.choices[0].finish_reason}, {answer.usage and answer.usage.total_tokens} tokens")
    print(answer.choices[0].message.content)


def one_stream(client: OpenAI, model: str) -> str:
    """Prints an answer as it comes. Returns the request's id."""
    request_id = ""
    for chunk in client.chat.completions.create(
        model=model, messages=ask("Tell me a story."), max_tokens=60, seed=7, stream=True
    ):
        if not request_id:
            request_id = chunk.id
            print(f"-- {request_id}, streamed")
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()
    return request_id


def three_answers(client: OpenAI, model: str) -> None:
    """Three answers to one question, and how sure the model was of each one's first token."""
    answer = client.chat.completions.create(
        model=model, messages=ask("Name a colour."), max_tokens=10, n=3, seed=3, logprobs=True, top_logprobs=2
    )
    for choice in answer.choices:
        sure = choice.logprobs.content[0].logprob if choice.logprobs and choice.logprobs.content else 0.0
        print(f"-- {choice.index} ({sure:.2f}): {choice.message.content!r}")


async def several_at_once(client: AsyncOpenAI, model: str) -> None:
    topics = ("the sea", "a mountain", "the rain")
    answers = await asyncio.gather(
        *(
            client.completions.create(model=model, prompt=f"A line about {topic}:", max_tokens=20, seed=1)
            for topic in topics
        )
    )
    for topic, answer in zip(topics, answers, strict=True):
        print(f"-- {topic}: {answer.choices[0].text.strip()!r}")


def look_again(client: OpenAI, request_id: str) -> None:
    """Any gateway knows the request, for hours: this works after the one that took it has died."""
    answer = client.chat.completions.retrieve(request_id)
    print(f"-- {request_id} again: {len(answer.choices[0].message.content or '')} characters")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none", help="an API key, where the gateway asks for one")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.base_url, api_key=arguments.key)
    model = next(iter(client.models.list())).id
    one_answer(client, model)
    request_id = one_stream(client, model)
    look_again(client, request_id)
    three_answers(client, model)
    async with AsyncOpenAI(base_url=arguments.base_url, api_key=arguments.key) as async_client:
        await several_at_once(async_client, model)


if __name__ == "__main__":
    asyncio.run(main())
