"""Whether what a log holds and what a reader saw is what the undisturbed run gave. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from loadgen.chaos.observer import Entry
from loadgen.chaos.reading import Reading
from loadgen.chaos.workload import Request
from shared.protocol.records import Accepted, Claimed, Ended, HandedBack, TokenLogprobs, Tokens


class Answer(msgspec.Struct, frozen=True):
    """One choice of the undisturbed run."""

    ids: list[int]
    text: str
    reason: str
    prompt_tokens: int
    logprobs: list[TokenLogprobs] = []


class Verdict(msgspec.Struct):
    """Tokens that were lost, came twice or are others, and every broken promise in words."""

    lost: int = 0
    repeated: int = 0
    changed: int = 0
    problems: list[str] = []

    @property
    def ok(self) -> bool:
        return not (self.lost or self.repeated or self.changed or self.problems)

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(
            self.lost + other.lost,
            self.repeated + other.repeated,
            self.changed + other.changed,
            [*self.problems, *other.problems],
        )


def answer_of(entries: Sequence[Entry]) -> Answer:
    """What a log amounts to. Raises ValueError when it has no end or its indexes do not continue."""
    records = [entry.record for entry in entries]
    accepted, ended = records[0] if records else None, records[-1] if records else None
    if not isinstance(accepted, Accepted) or not isinstance(ended, Ended):
        raise ValueError("the log has no beginning or no end")
    if ended.reason in ("error", "cancelled"):
        raise ValueError(f"it ended with {ended.reason}: {ended.error}")
    tokens = [record for record in records if isinstance(record, Tokens)]
    ids: list[int] = []
    for record in tokens:
        if record.index != len(ids):
            raise ValueError(f"index {record.index} after {len(ids)} tokens")
        ids += record.ids
    return Answer(
        ids,
        "".join(record.text for record in tokens),
        ended.reason,
        accepted.prompt_tokens,
        [entry for record in tokens for entry in record.logprobs],
    )


def check_log(entries: Sequence[Entry], expected: Answer, *, speculates: bool) -> Verdict:
    """One choice's log against the undisturbed run, and against the rules that every log keeps."""
    verdict = Verdict(problems=[])
    records = [entry.record for entry in entries]
    ends = [record for record in records if isinstance(record, Ended)]
    if len(ends) != 1:
        verdict.problems.append(f"{len(ends)} terminal records")
    elif not isinstance(records[-1], Ended):
        verdict.problems.append("records after the terminal one")
    if sum(isinstance(record, Accepted) for record in records) != 1 or not isinstance(records[0], Accepted):
        verdict.problems.append("the log does not begin with its one accepted record")
    verdict.problems += _epoch_problems(entries)
    verdict += _compare_tokens(entries, expected)
    for ended in ends[-1:]:
        verdict.problems += _end_problems(ended, expected, speculates=speculates)
    return verdict


def _epoch_problems(entries: Sequence[Entry]) -> list[str]:
    """Each claim is one epoch on, and nobody writes but the last claimant."""
    epoch, problems = 0, []
    for entry in entries:
        match entry.record:
            case Claimed(epoch=claimed):
                if claimed != epoch + 1:
                    problems.append(f"claim of epoch {claimed} after epoch {epoch} (sequence {entry.seq})")
                epoch = claimed
            case Tokens(epoch=written) | HandedBack(epoch=written) | Ended(epoch=written):
                if written != epoch:
                    problems.append(f"a record of epoch {written} in epoch {epoch} (sequence {entry.seq})")
    return problems


def _compare_tokens(entries: Sequence[Entry], expected: Answer) -> Verdict:
    verdict = Verdict(problems=[])
    ids: list[int | None] = []
    text, logprobs = "", []
    for entry in entries:
        record = entry.record
        if not isinstance(record, Tokens):
            continue
        text += record.text
        logprobs += record.logprobs
        if record.index > len(ids):
            verdict.lost += record.index - len(ids)
            ids += [None] * (record.index - len(ids))
        verdict.repeated += min(len(ids) - record.index, len(record.ids))
        for place, token in enumerate(record.ids, start=record.index):
            if place < len(ids):
                verdict.changed += ids[place] != token
            else:
                ids.append(token)
    if verdict.lost or verdict.repeated:
        verdict.problems.append("token indexes do not continue")
    verdict.lost += max(0, len(expected.ids) - len(ids))
    verdict.changed += max(0, len(ids) - len(expected.ids))
    differing = [
        n for n, (ours, theirs) in enumerate(zip(ids, expected.ids, strict=False)) if ours not in (None, theirs)
    ]
    verdict.changed += len(differing)
    if differing:
        verdict.problems.append(f"token {differing[0]} is {ids[differing[0]]}, was {expected.ids[differing[0]]}")
    if len(ids) != len(expected.ids):
        verdict.problems.append(f"{len(ids)} tokens, there were {len(expected.ids)}")
    if text != expected.text:
        verdict.problems.append(f"the text is {text[-80:]!r} at its end, was {expected.text[-80:]!r}")
    if logprobs != expected.logprobs:
        first = next(
            (n for n, pair in enumerate(zip(logprobs, expected.logprobs, strict=False)) if pair[0] != pair[1]), -1
        )
        verdict.problems.append(
            f"log probabilities differ: {len(logprobs)} and {len(expected.logprobs)}, first at {first}"
        )
    return verdict


def _end_problems(ended: Ended, expected: Answer, *, speculates: bool) -> list[str]:
    usage, problems = ended.usage, []
    if ended.reason != expected.reason:
        problems.append(f"it ended with {ended.reason} {ended.error or ''}, was {expected.reason}")
    if usage.prompt_tokens != expected.prompt_tokens or usage.completion_tokens != len(expected.ids):
        problems.append(
            f"usage says {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
            f"were {expected.prompt_tokens} + {len(expected.ids)}"
        )
    if not 0 <= usage.accepted_tokens <= usage.drafted_tokens or (usage.drafted_tokens and not speculates):
        problems.append(f"usage says {usage.accepted_tokens} of {usage.drafted_tokens} drafted tokens accepted")
    if not 0 <= usage.cached_tokens <= usage.prompt_tokens:
        problems.append(f"usage says {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
    return problems


def check_reader(
    reading: Reading, request: Request, logs: Sequence[Sequence[Entry]], expected: Sequence[Answer]
) -> Verdict:
    """What one reader saw against the logs (one for each choice) and the undisturbed run."""
    verdict = Verdict(problems=[])
    if reading.error:
        verdict.problems.append(reading.error)
    elif not reading.done:
        verdict.problems.append("the reader never came to the end")
    if reading.kind == "whole":
        if reading.whole is not None:
            verdict += _check_whole(reading.whole, request, expected)
    else:
        for choice, entries in enumerate(logs):
            verdict += _check_shown(reading, request, choice, entries, expected[choice])
        wanted = int(reading.kind == "stream" and request.include_usage)
        if reading.usage_events != wanted:
            verdict.problems.append(f"{reading.usage_events} usage events, expected {wanted}")
    if reading.usage is not None:
        verdict.problems += _usage_problems(reading.usage, expected)
    if verdict.problems:
        verdict.problems = [f"{reading.name}: {problem}" for problem in verdict.problems]
    return verdict


def _check_whole(whole: dict[str, Any], request: Request, expected: Sequence[Answer]) -> Verdict:
    verdict = Verdict(problems=[])
    choices = {int(choice["index"]): choice for choice in whole["choices"]}
    if sorted(choices) != list(range(request.choices)) or len(whole["choices"]) != request.choices:
        verdict.problems.append(f"choices {sorted(choices)}, expected {request.choices}")
        return verdict
    for index, answer in enumerate(expected):
        choice = choices[index]
        text = choice["message"]["content"] if request.api == "chat" else choice["text"]
        if text != answer.text:
            verdict.changed += 1
            verdict.problems.append(f"choice {index} reads {text[-80:]!r} at its end, was {answer.text[-80:]!r}")
        if choice["finish_reason"] != answer.reason:
            verdict.problems.append(f"choice {index} ended with {choice['finish_reason']}, was {answer.reason}")
    return verdict


def _check_shown(
    reading: Reading, request: Request, choice: int, entries: Sequence[Entry], expected: Answer
) -> Verdict:
    """Every record that has something to show was shown once and in order, and the text is the whole text."""
    verdict = Verdict(problems=[])
    shows = {entry.seq: entry for entry in entries if reading.kind == "nats" or _makes_event(entry, request)}
    shown = [event for event in reading.shown if event.choice == choice]
    counts = Counter(event.seq for event in shown)
    lost = [seq for seq in shows if seq not in counts]
    repeated = [seq for seq, count in counts.items() if count > 1]
    unknown = [seq for seq in counts if seq not in shows]
    verdict.lost = sum(_tokens_in(shows[seq]) for seq in lost)
    verdict.repeated = sum(_tokens_in(shows[seq]) for seq in repeated if seq in shows)
    for what, seqs in (("lost", lost), ("repeated", repeated), ("unknown", unknown)):
        if seqs:
            verdict.problems.append(f"choice {choice}: {len(seqs)} {what} events, sequences {seqs[:5]}")
    if any(later.seq <= earlier.seq for earlier, later in itertools.pairwise(shown)):
        verdict.problems.append(f"choice {choice}: events out of order")
    for event in shown:
        record = shows[event.seq].record if event.seq in shows else None
        if isinstance(record, Tokens) and (event.text != record.text or event.tokens not in (-1, len(record.ids))):
            verdict.changed += len(record.ids)
            verdict.problems.append(f"choice {choice}: event {event.seq} shows {event.text!r}, not {record.text!r}")
    if "".join(event.text for event in shown) != expected.text:
        verdict.problems.append(f"choice {choice}: its text is not that of the undisturbed run")
    if [event.finish for event in shown if event.finish] != [expected.reason]:
        verdict.problems.append(f"choice {choice}: finish reasons {[e.finish for e in shown if e.finish]}")
    return verdict


def _makes_event(entry: Entry, request: Request) -> bool:
    """Which records a stream shows (docs/protocol.md): the role in chats, text or log probabilities, the end."""
    match entry.record:
        case Accepted():
            return request.api == "chat"
        case Tokens() as tokens:
            return bool(tokens.text) or request.logprobs
        case Ended():
            return True
    return False


def _tokens_in(entry: Entry) -> int:
    return len(entry.record.ids) if isinstance(entry.record, Tokens) else 0


def _usage_problems(usage: dict[str, Any], expected: Sequence[Answer]) -> list[str]:
    """Of a whole answer: the prompt once, and all choices."""
    prompt, completion = expected[0].prompt_tokens, sum(len(answer.ids) for answer in expected)
    told = (usage.get("prompt_tokens"), usage.get("completion_tokens"), usage.get("total_tokens"))
    if told != (prompt, completion, prompt + completion):
        return [f"usage says {told}, were {(prompt, completion, prompt + completion)}"]
    return []
