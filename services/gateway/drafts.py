"""From a call to what is stored for it: for each choice the work message and the record that opens its log. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.gateway.call import GenerationCall
from shared.protocol.jobs import GenerationRequest, SamplingParams
from shared.protocol.records import Accepted, choice_request_id
from shared.protocol.seeds import derived_seed
from shared.protocol.subjects import PRIORITIES, Priority


@dataclass(frozen=True)
class Draft:
    """A whole request before it is stored. Choice `c` continues prompt `c // n` with a seed derived from `seed`.

    `prompts` and `prediction` are token ids, `output_limits` the most output tokens for each. `request_id` and
    `digest` are set last.
    """

    call: GenerationCall
    prompts: Sequence[Sequence[int]]
    output_limits: Sequence[int]
    seed: int
    tenant: str
    gateway: str
    created_unix_s: float
    queue_deadline_unix_s: float
    compute_timeout_s: float
    deadline_unix_s: float
    prediction: Sequence[int] = ()
    request_id: str = ""
    digest: str = ""

    def named(self, request_id: str, digest: str) -> Draft:
        return replace(self, request_id=request_id, digest=digest)

    def as_begun(self, accepted: Accepted) -> Draft:
        """The run that an earlier request with the same body began: with its seed, its time and its time-outs."""
        return replace(
            self,
            call=replace(self.call, priority=priority_of(accepted)),  # it is part of the work's subject
            seed=accepted.seed,
            gateway=accepted.gateway,
            created_unix_s=accepted.created_unix_s,
            queue_deadline_unix_s=accepted.queue_deadline_unix_s or accepted.deadline_unix_s,
            compute_timeout_s=accepted.compute_timeout_s,
            deadline_unix_s=accepted.deadline_unix_s,
        )

    @property
    def choices(self) -> int:
        return self.call.choices

    def choice_id(self, choice: int) -> str:
        return choice_request_id(self.request_id, choice)

    def opening(self, choice: int) -> Accepted:
        """The first record of a choice's log."""
        return Accepted(
            request_id=self.choice_id(choice),
            tenant=self.tenant,
            model=self.call.model,
            api=self.call.api,
            created_unix_s=self.created_unix_s,
            deadline_unix_s=self.deadline_unix_s,
            prompt_tokens=len(self._prompt(choice)),
            seed=derived_seed(self.seed, choice),
            priority=self.call.priority,
            gateway=self.gateway,
            include_usage=self.call.include_usage,
            body_digest=self.digest,
            choices=self.choices,
            choice=choice,
            prompt=choice // self.call.n,
            logprobs=self.call.logprobs,
            queue_deadline_unix_s=self.queue_deadline_unix_s,
            compute_timeout_s=self.compute_timeout_s,
            background=self.call.background or bool(self.digest),
        )

    def work(self, choice: int, log_seq: int) -> GenerationRequest:
        """The message for prefill. `log_seq`: sequence of the latest record of the choice's log."""
        call = self.call
        return GenerationRequest(
            request_id=self.choice_id(choice),
            tenant=self.tenant,
            model=call.model,
            api=call.api,
            priority=call.priority,
            prompt_ids=list(self._prompt(choice)),
            params=SamplingParams(
                max_tokens=self.output_limits[choice // call.n],
                seed=derived_seed(self.seed, choice),
                temperature=call.temperature,
                top_p=call.top_p,
                top_k=call.top_k,
                min_p=call.min_p,
                stop=call.stop,
                stop_token_ids=call.stop_token_ids,
                ignore_eos=call.ignore_eos,
                presence_penalty=call.presence_penalty,
                frequency_penalty=call.frequency_penalty,
                repetition_penalty=call.repetition_penalty,
                logit_bias=call.logit_bias,
                min_tokens=call.min_tokens,
                logprobs=call.logprobs,
            ),
            created_unix_s=self.created_unix_s,
            queue_deadline_unix_s=self.queue_deadline_unix_s,
            deadline_unix_s=self.deadline_unix_s,
            log_seq=log_seq,
            compute_timeout_s=self.compute_timeout_s,
            salt=self.tenant,
            speculation=call.speculation,
            prediction_ids=list(self.prediction),
        )

    def _prompt(self, choice: int) -> Sequence[int]:
        return self.prompts[choice // self.call.n]


def priority_of(accepted: Accepted) -> Priority:
    """Under which its work is queued."""
    return next((priority for priority in PRIORITIES if priority == accepted.priority), "normal")
