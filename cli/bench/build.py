"""What all datasets share when they are built: how long requests are, and the form in which prompts are handed over.

Prompts are token ids wherever there is a tokenizer and an endpoint that takes ids, because only then their length is
exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...engine.config import Environment
from ...engine.load.progress import Progress
from ...engine.tokenizer import Tokenizer
from ...kernels.errors import CapacityError, UsageError
from .dataset_options import Defaults, WorkloadOptions
from .workload import Item, Message, Prompt, Workload

CHARACTERS_PER_TOKEN = 4  # of English text, where there is no tokenizer to count with


@dataclass(frozen=True, slots=True)
class Asked:
    """How the target wants its prompts: as conversations or not, and what is known of its model.

    tokenizer   None: prompts are texts and their lengths are approximate
    context     longest prompt and answer together, 0 if unknown
    """

    tokenizer: Tokenizer | None
    chat: bool
    context: int


class Build:
    """One dataset's options with its defaults filled in, and a random generator of its own."""

    def __init__(
        self,
        options: WorkloadOptions,
        defaults: Defaults,
        asked: Asked,
        environment: Environment,
        progress: Progress,
    ) -> None:
        self.options, self.asked, self.environment, self.progress = options, asked, environment, progress
        self.num_prompts = options.num_prompts or defaults.num_prompts
        self.prompt_tokens = options.prompt_tokens or defaults.prompt_tokens
        self.output_tokens = options.output_tokens or defaults.output_tokens
        self.ignore_eos = defaults.ignore_eos if options.ignore_eos is None else options.ignore_eos
        self.rng = random.Random(f"{options.dataset} {options.seed}")

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt, answer) tokens of every request. Raises CapacityError if the longest do not fit the model."""
        ratio, context = self.options.range_ratio, self.asked.context
        longest = int(self.prompt_tokens * (1 + ratio)), int(self.output_tokens * (1 + ratio))
        if context and sum(longest) > context:
            raise CapacityError(
                f"prompts of up to {longest[0]} tokens and answers of up to {longest[1]} do not fit the context of "
                f"{context}",
                f"lower --prompt-tokens to {max(1, int((context - longest[1]) / (1 + ratio)))} or --output-tokens, or "
                "raise --max-model-len if the model allows",
            )
        return [(self.around(self.prompt_tokens), self.around(self.output_tokens)) for _ in range(self.num_prompts)]

    def around(self, length: int) -> int:
        """A length drawn evenly from `length` times (1 - ratio) to (1 + ratio)."""
        ratio = self.options.range_ratio
        return self.rng.randint(max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio))))

    def as_asked(self, ids: list[int]) -> Prompt:
        """Token ids in the form that the target takes."""
        if not self.asked.chat:
            return tuple(ids)
        assert self.asked.tokenizer is not None
        return ({"role": "user", "content": self.asked.tokenizer.decode(ids)},)

    def text_as_asked(self, text: str) -> Prompt:
        """A text in the form that the target takes."""
        if self.asked.chat:
            return ({"role": "user", "content": text},)
        return text if self.asked.tokenizer is None else tuple(self.asked.tokenizer.encode(text))

    def messages_as_asked(self, messages: tuple[Message, ...]) -> Prompt:
        """A conversation in the form that the target takes."""
        if self.asked.chat:
            return messages
        if self.asked.tokenizer is None:
            raise UsageError(
                "conversations need the model's chat template to go to a completions endpoint",
                "use --endpoint /v1/chat/completions, or name the model with --tokenizer",
            )
        return tuple(self.asked.tokenizer.encode_chat(messages))

    def workload(self, source: str, items: list[Item], *notes: str, stand_in: bool = False) -> Workload:
        """The finished workload, with what holds for every dataset noted."""
        if self.asked.tokenizer is None and self.prompt_tokens:
            notes = (*notes, "no tokenizer was named: prompt lengths are approximate")
        return Workload(self.options.dataset, source, stand_in, self.ignore_eos, tuple(items), notes)

    def count(self, text: str) -> int:
        """Tokens of a text, about as many where there is no tokenizer."""
        tokenizer = self.asked.tokenizer
        return max(1, len(text) // CHARACTERS_PER_TOKEN) if tokenizer is None else len(tokenizer.encode(text, False))

    def excess(self, prompt: Prompt, answer: int) -> int:
        """By how many tokens a request exceeds the context; what is not in ids is left for the server to refuse."""
        if not self.asked.context or isinstance(prompt, str) or not isinstance(prompt[0], int):
            return 0
        return max(0, len(prompt) + answer - self.asked.context)
