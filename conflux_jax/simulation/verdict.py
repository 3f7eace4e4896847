"""What the numbers of a trace mean for a team that thinks about the scheme, in plain sentences."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from conflux_jax.simulation.premise import MAX_GROUPS, Premise, decodes_in_memory

MIN_SLACK = 0.25  # of the TBT target: less is what a cautious scheduler leaves unused anyway
HIGH_REUSE = 0.5  # a cache that saves more of prefill than it leaves comes first


class Answer(Enum):
    YES = "yes"
    PARTLY = "partly"
    NO = "no"


@dataclass(frozen=True)
class Finding:
    """answer: whether this much of the premise holds. topic: two or three words. reason: a clause
    for the last line, where it holds not, or not all of it."""

    answer: Answer
    topic: str
    text: str
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """findings: on the two halves of the premise first, then what else speaks against it."""

    findings: tuple[Finding, ...]

    @property
    def word(self) -> str:
        answers = {finding.answer for finding in self.findings}
        if Answer.NO in answers:
            return "does not hold"
        return "holds in part" if Answer.PARTLY in answers else "holds"

    @property
    def line(self) -> str:
        """One line; the graver reasons first."""
        if self.word == "holds":
            return "The premise holds: long prompts need several groups, and decode leaves room."
        graver = sorted(self.findings, key=lambda finding: finding.answer is not Answer.NO)
        reasons = [finding.reason for finding in graver if finding.answer is not Answer.YES]
        return f"The premise {self.word}: {'; '.join(reasons)}."


def judge(premise: Premise) -> Verdict:
    """It holds where both halves do and nothing speaks against it; not at all where one of the
    halves does not."""
    findings = [_long_prompts(premise), _slack(premise), _reuse(premise), _load(premise)]
    return Verdict(tuple(finding for finding in findings if finding is not None))


def _long_prompts(premise: Premise) -> Finding:
    lengths, engine = premise.demand.prompts.lengths, premise.engine
    topic, target = "Long prompts", f"{engine.ttft_slo_s:g} s"
    text = (
        f"the p95 prompt of {lengths.p95:,} tokens takes {premise.p95_prefill_s:.2f} s on one "
        f"group and {premise.p95_all_groups_s:.2f} s on all {engine.groups}; the target is {target}"
    )
    if premise.groups_p95 is None:
        text += f". Not even {MAX_GROUPS} groups meet it."
        return Finding(Answer.PARTLY, topic, text, f"no number of groups meets TTFT at {target}")
    if premise.groups_p95 > engine.groups:
        text += f". That takes {premise.groups_p95} groups; the engine has {engine.groups}."
        reason = f"the p95 prompt needs {premise.groups_p95} groups, the engine has {engine.groups}"
        return Finding(Answer.PARTLY, topic, text, reason)
    if premise.groups_p95 > 1:
        text += f". It needs {premise.groups_p95} groups."
        return Finding(Answer.YES, topic, text)
    text += ". One group is enough for it"
    if premise.groups_p99 == 1:
        text += f", and for the p99 prompt of {lengths.p99:,}."
        reason = "prompts are short: one group meets TTFT"
        return Finding(Answer.NO, topic, text, reason)
    needed = premise.groups_p99 or f"more than {MAX_GROUPS}"
    text += f"; the p99 prompt of {lengths.p99:,} needs {needed}."
    return Finding(Answer.PARTLY, topic, text, "only the longest prompts need several groups")


def _slack(premise: Premise) -> Finding:
    engine, decoding, filled = premise.engine, premise.decoding, premise.filled
    topic, target = "Decode slack", f"{1000 * engine.tbt_slo_s:g} ms"
    if not decoding.steady:
        text = (
            f"tokens are asked for faster than the groups decode them: {decoding.concurrency:,} "
            f"decodes a group take {1000 * decoding.iteration_s:.0f} ms, and more come meanwhile."
        )
        return Finding(Answer.NO, topic, text, "decode alone is more than the GPUs can serve")
    text = (
        f"an iteration of {decoding.concurrency:,} {_plural('decode', decoding.concurrency)} a "
        f"group takes {1000 * decoding.iteration_s:.1f} ms and the target is {target}"
    )
    if premise.slack <= 0:
        text += ": nothing is left."
        return Finding(Answer.NO, topic, text, "decode iterations miss TBT by themselves")
    text += (
        f": {premise.slack:.0%} is left. Filled up to {1000 * filled.target_s:.0f} ms one has "
        f"{filled.decodes:,} {_plural('decode', filled.decodes)} a group and {filled.tokens:,} "
        "tokens of prefill in all."
    )
    fitting = decodes_in_memory(premise.demand, engine)
    if fitting is not None and decoding.concurrency > fitting:
        text += f" But a group has memory for {fitting:,} of them."
        return Finding(Answer.PARTLY, topic, text, "the KV of the decodes does not fit into memory")
    if premise.slack < MIN_SLACK:
        return Finding(Answer.PARTLY, topic, text, f"only {premise.slack:.0%} of TBT is left")
    return Finding(Answer.YES, topic, text)


def _reuse(premise: Premise) -> Finding | None:
    """None where the trace tells of no prefixes."""
    demand, topic = premise.demand, "Prefix reuse"
    if demand.uncached is None or demand.prefix_reuse is None:
        return None
    reuse, left = demand.prefix_reuse, demand.uncached.lengths.p95
    needed = premise.groups_p95_uncached
    text = (
        f"{reuse:.0%} of prompt tokens were seen before, by a cache that never evicts. It leaves "
        f"{left:,} tokens to compute at p95, for which TTFT takes "
        f"{needed or f'more than {MAX_GROUPS}'} {_plural('group', needed)}."
    )
    if needed == 1 and premise.groups_p95 != 1:
        reason = f"with a prefix cache ({reuse:.0%} reuse) one group meets TTFT"
        return Finding(Answer.PARTLY, topic, text, reason)
    if reuse >= HIGH_REUSE:
        reason = f"a prefix cache comes first: it saves up to {reuse:.0%} of prefill"
        return Finding(Answer.PARTLY, topic, text, reason)
    return Finding(Answer.YES, topic, text)


def _plural(noun: str, number: int | None) -> str:
    return noun if number == 1 else f"{noun}s"


def _load(premise: Premise) -> Finding:
    offered, capacity = premise.offered_tokens_s, premise.filled.capacity_tokens_s
    topic = "Offered load"
    text = f"{offered:,.0f} prompt tokens a second, and iterations so filled serve {capacity:,.0f}"
    if offered <= capacity:
        return Finding(Answer.YES, topic, f"{text} ({offered / capacity:.0%}).")
    left, cached = premise.offered_uncached_tokens_s, premise.filled_uncached
    if left is not None and cached is not None and left <= cached.capacity_tokens_s:
        text += (
            f"; with every seen prefix cached {left:,.0f} are left, and "
            f"{cached.capacity_tokens_s:,.0f} served"
        )
    reason = "more is offered than these GPUs can serve within TBT"
    return Finding(Answer.PARTLY, topic, text + ".", reason)
