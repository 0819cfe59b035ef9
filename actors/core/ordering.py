"""Who goes first: the policies, fairness between clients, and how long anybody can be passed by others."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, Protocol

from kvblend.actors.core.entry import Entry
from kvblend.actors.core.events import Job

PolicyName = Literal["fcfs", "edf"]
OVERTAKEN_MAX = 32
"""So many admissions of later arrivals pass a waiting answer at most; then it is the first of all."""
OVERTAKEN_PRECOMPUTE_MAX = 8
"""The same for a job that computes a chunk which nobody waits for: its share under load is one admission in nine."""
SKIPPED_MAX = 8
"""So many steps pass an admitted prompt by at most."""
HORIZON_S = 30.0
"""A request without a deadline is ordered as if it had this one."""
COST_MARGIN = 0.2
"""A job may take so much longer than those before it did and be in time: what just misses its deadline is lost work."""
CLIENTS_MAX = 1024
"""Clients whose use is remembered, beyond those that have jobs."""

Rank = tuple[bool, bool, bool, float, float, int]


class Policy(Protocol):
    """Orders the jobs of one client, and those of clients that have had the same share: who must start first."""

    share_slack: float
    """How many tokens a client may have had beyond the one that had fewest, before its jobs go behind the others'."""

    def latest_start_s(self, job: Job, accepted_s: float) -> float:
        """When a job that arrives must start; the same for all where only the arrival counts."""
        ...


class ArrivalPolicy:
    """First come, first served; between clients each token is counted, so that they take turns."""

    share_slack = 0.0

    def latest_start_s(self, job: Job, accepted_s: float) -> float:
        """Nobody must."""
        return math.inf


class DeadlinePolicy:
    """The one that must start first: its deadline less what it takes to its last token, beside all that runs.

    What waits in the queue before it is the same for whoever goes next, so it decides nothing between them.
    """

    def __init__(self, cost_s: Callable[[Job], float], share_slack: float) -> None:
        """`cost_s`: seconds from a job's admission to its end, as far as is known."""
        self._cost_s = cost_s
        self.share_slack = share_slack

    def latest_start_s(self, job: Job, accepted_s: float) -> float:
        """Its deadline less what it takes; without a deadline that of `HORIZON_S`."""
        allowed_s = HORIZON_S if job.deadline_ms is None else job.deadline_ms / 1e3
        return accepted_s + allowed_s - (1.0 + COST_MARGIN) * self._cost_s(job)


def policy_of(name: PolicyName, cost_s: Callable[[Job], float], share_slack: float) -> Policy:
    """The policy of this name; `share_slack` is that of those that weigh deadlines against fairness."""
    return ArrivalPolicy() if name == "fcfs" else DeadlinePolicy(cost_s, share_slack)


class Ordering:
    """The order of a queue. Rules, the strongest first:

    1. who was passed by `OVERTAKEN_MAX` later arrivals (a precompute job by `OVERTAKEN_PRECOMPUTE_MAX`), by arrival;
    2. answers and chunks that an answer waits for, before chunks that are computed for later;
    3. who can still meet its deadline, before who can not, which would only make others late, too (not with "fcfs");
    4. who has had less of the clients that have had over `policy.share_slack` tokens more than the one with fewest;
    5. the policy, and of those that will be late the one that is the least so; 6. the arrival.

    So every job that could be admitted is, after those that arrived before it and `OVERTAKEN_MAX` others at most.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._arrivals = 0
        self._turns = 0
        self._had: dict[str, float] = {}
        self._level = 0.0

    def arrive(self, entry: Entry) -> None:
        """A job comes into the queue. A client that had none is not owed what it did not ask for meanwhile."""
        self._arrivals += 1
        entry.arrival = self._arrivals
        self._had[entry.job.client] = max(self._had.get(entry.job.client, 0.0), self._level)

    def admit(self, entry: Entry, others: Iterable[Entry], active: Callable[[], Collection[str]]) -> None:
        """It was admitted while `others` could have been. `active()` are the clients that have jobs."""
        client = entry.job.client
        had = max(self._had.get(client, 0.0), self._level)
        if not self._passed_by(entry):
            self._level = had
        if not entry.turn:
            self._had[client] = had + entry.job.tokens_max
            self._turns += 1
            entry.turn = self._turns
        entry.overtaken = 0
        for other in others:
            if other is not entry and other.arrival < entry.arrival:
                other.overtaken += 1
        if len(self._had) > CLIENTS_MAX:
            kept = active()
            self._had = {name: had for name, had in self._had.items() if name in kept}

    def first(self, waiting: Sequence[Entry], wanted: Collection[object], at_s: float) -> Entry:
        """Who of `waiting` (at least one) is next. `wanted`: keys of chunks that answers wait for."""
        rank = self._rank(waiting, wanted, at_s)
        return min(waiting, key=rank)

    def first_of(self, waiting: Sequence[Entry], count: int, at_s: float) -> list[Entry]:
        """The next `count` of `waiting`, as the queue is now."""
        return heapq.nsmallest(count, waiting, key=self._rank(waiting, (), at_s))

    def ahead_of(self, entry: Entry, waiting: Sequence[Entry], at_s: float) -> list[Entry]:
        """Those of `waiting` that would go before `entry`, if it arrived now."""
        entry.arrival = self._arrivals + 1
        rank = self._rank([*waiting, entry], (), at_s)
        own = rank(entry)
        return [other for other in waiting if rank(other) < own]

    def sort_prefills(self, entries: Iterable[Entry], at_s: float) -> list[Entry]:
        """Admitted prompts in the order in which a step takes them: passed by, answers, policy, admission."""

        def rank(entry: Entry) -> Rank:
            later = entry.job.kind == "precompute"
            # what is left of its time since then is what it was admitted for
            late, urgency = self._urgency(entry, entry.admitted_s)
            return self.may_stand_back(entry), later, late, 0.0, urgency, entry.turn

        return sorted(entries, key=rank)

    @staticmethod
    def may_stand_back(entry: Entry) -> bool:
        """Whether another step may pass an admitted prompt by."""
        return entry.skipped < SKIPPED_MAX

    @staticmethod
    def _passed_by(entry: Entry, later: bool = False) -> bool:
        return entry.overtaken >= (OVERTAKEN_PRECOMPUTE_MAX if later else OVERTAKEN_MAX)

    def _rank(self, waiting: Sequence[Entry], wanted: Collection[object], at_s: float) -> Callable[[Entry], Rank]:
        had = {client: self._had.get(client, self._level) for client in {entry.job.client for entry in waiting}}
        limit = min(had.values(), default=0.0) + self.policy.share_slack
        beyond = {client: max(0.0, tokens - limit) for client, tokens in had.items()}

        def rank(entry: Entry) -> Rank:
            later = entry.job.kind == "precompute" and not any(key in wanted for key in entry.owns)
            if self._passed_by(entry, later):
                return False, False, False, 0.0, 0.0, entry.arrival
            late, urgency = self._urgency(entry, at_s)
            return True, later, late, beyond[entry.job.client], urgency, entry.arrival

        return rank

    def _urgency(self, entry: Entry, at_s: float) -> tuple[bool, float]:
        """Whether it will be late if it is admitted now, and a number: the smallest goes first."""
        # what is known of the cost changes while it waits
        start_s = self.policy.latest_start_s(entry.job, entry.accepted_s)
        late = entry.job.deadline_ms is not None and start_s < at_s
        return late, -start_s if late else start_s
