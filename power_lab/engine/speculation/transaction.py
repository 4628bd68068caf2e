"""One speculation round as a transaction: propose, verify by sample-and-match, then commit or restore.

Verification draws the target's own token at every row with noise keyed by its position, so a draft is accepted exactly while it
equals what the target would have said without it. Every emitted token is the target's; speculation cannot change the output at any
temperature, with any sampler chain. (Sample-and-match; for point-mass drafts its acceptance equals that of Leviathan et al. 2023.)

Restoring is `rollback`'s, for target and drafters alike: with paged KV the checkpoint is the request's committed length, since rejected
rows lie beyond it and are overwritten by the next step. `Scheduler.commit` moves that length, for all requests of a step or for none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from power_lab.engine.plan import UNKNOWN
from power_lab.engine.request import Finish, Request
from power_lab.engine.scheduler import Outcome
from power_lab.engine.speculation.drafters import COPY, Draft, DraftAsk, Drafter
from power_lab.engine.speculation.drafters.neural import Resuming
from power_lab.engine.speculation.width import HOT, Choice, Controller, Costs, WidthAsk
from power_lab.engine.speculation.width import make as make_controller
from power_lab.engine.speculation.width.costs import MeasuredCosts, OnwardCosts, RoundCosts
from power_lab.engine.trace import CorpusTexts

Terminal = Callable[[int], Finish | None]


def match(drafts: Sequence[int], targets: Sequence[int], terminal: Terminal) -> Outcome:
    """Walk a verified window: emit the target's token at each row while drafts match and nothing ends the request.

    Args:
        drafts: [K] proposed tokens.
        targets: [K + 1] the target's own draws, the last one being the bonus; negative where nothing could be drawn.
        terminal: called once for each emitted token, in order; why the request ends there, or None.
    """
    emitted: list[int] = []
    accepted = 0
    for row, token in enumerate(targets):
        if token < 0:
            return Outcome(tuple(emitted), accepted, Finish.ERROR)
        emitted.append(token)
        matched = row < len(drafts) and drafts[row] == token
        accepted += matched
        finish = terminal(token)
        if finish is not None or not matched:
            return Outcome(tuple(emitted), accepted, finish)
    raise AssertionError("a window has one target row more than drafts")


@dataclass(frozen=True, slots=True)
class Proposal:
    """What drafting came to for one request.

    Attributes:
        note: why it has no drafts, "" if it has. seconds: its share of the time that drafting took, choosing included.
        width: most drafts that its controller allowed, -1 where it was not asked. why: the controller's reason.
        subset: the only tokens that its drafter can say, None where that is any. Drafters that may copy any token, too, have one where they
            asked their network instead; see `Proposer.settled`.
        resumed: whether they are made on the device, as a part of the step, behind one that the host does not know yet; light: without
            a network.
        drafter: who made its drafts, as in `trace.Round`.
    """

    note: str
    seconds: float = 0.0
    width: int = -1
    why: str = ""
    subset: frozenset[int] | None = None
    resumed: bool = False
    light: bool = False
    drafter: str = ""

    def reach(self, emitted: Sequence[int]) -> int:
        """How many of these tokens the drafter could have said; -1 where it can say any."""
        return -1 if self.subset is None else sum(token in self.subset for token in emitted)

    def told(self, drafted: Sequence[int]) -> str:
        """The note of a round that verified these drafts: why there are none."""
        if drafted:
            return ""
        return self.note or "drafts dropped: no rows or blocks left in this step"


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a step behind one in flight drafts: how that came about, by request, and what makes the drafts, if there are any."""

    proposals: dict[int, Proposal]
    drafter: Resuming | None


class _Speculating:
    """One speculating request: its drafter and controller, and what broke first, after which it drafts no more."""

    def __init__(self, request: Request, drafter: Drafter, controller: Controller) -> None:
        self.request = request
        self.drafter = drafter
        self.resuming = drafter if isinstance(drafter, Resuming) else None  # to ask a protocol takes long
        self.controller = controller
        self.subset: frozenset[int] | None = getattr(drafter, "subset", None)  # most drafters can say any token
        self._copies: Callable[[int], bool] | None = getattr(drafter, "copies", None)  # and ask one network
        self.broken = ""

    @property
    def copies(self) -> bool:
        """Whether its latest drafts are copies rather than its network's."""
        return self._copies is not None and self._copies(self.request.id)

    def limits(self, networked: bool) -> frozenset[int] | None:
        """The subset of a round. networked: whether a network may have drafted in it, which counts where there is something else, too."""
        return self.subset if networked or self._copies is None else None


class Proposer:
    """Asks controllers and drafters before a step and keeps them in step with commits.

    A controller bounds what each drafter is asked for, the drafter answers, and the controller says how many of these are verified. One
    drafter and one controller of each name serve all requests that ask for them. Either may raise: that costs drafts, never a request.

    Args:
        make_drafter, make_controller: name -> a new one; called for the names that requests use.
        clock: monotonic seconds.
        vocab: of the target; a draft outside it would read past the embedding.
        step_rows: most rows of a step, None where any number may come.
        costs: what controllers weigh; without them nothing is known. rounds: the same for rounds that go from drafter to target on the
            device, by rows of the step, drafting included. on_draft: told of each drafter call: requests, the most that one of
            them asked for, and seconds.
    """

    def __init__(
        self,
        make_drafter: Callable[[str], Drafter],
        clock: Callable[[], float],
        vocab: int,
        *,
        step_rows: int | None = None,
        costs: Costs | None = None,
        rounds: OnwardCosts | None = None,
        on_draft: Callable[[str, int, int, float], None] = lambda *_: None,
        make_controller: Callable[[str], Controller] = make_controller,
    ) -> None:
        self._make = make_drafter
        self._make_controller = make_controller
        self._vocab = vocab
        self._clock = clock
        self._step_rows = step_rows
        self._costs = costs or MeasuredCosts()
        self._rounds = rounds or RoundCosts()
        self._on_draft = on_draft
        self._drafters: dict[str, Drafter] = {}
        self._controllers: dict[str, Controller] = {}
        self._of: dict[int, _Speculating] = {}

    @property
    def idle(self) -> bool:
        """Whether no request speculates."""
        return not self._of

    def begin(self, request: Request) -> None:
        name, controls = request.params.speculate, request.params.controller
        if name == "off":
            return
        if name not in self._drafters:
            self._drafters[name] = self._make(name)
        if controls not in self._controllers:
            self._controllers[controls] = self._make_controller(controls)
        one = _Speculating(request, self._drafters[name], self._controllers[controls])
        self._of[request.id] = one
        with _blaming(one, one.drafter.name):
            one.drafter.begin(request.id, request.tokens, request.namespace)
        with _blaming(one, controls):
            one.controller.begin(request.id, name)

    def propose(
        self, rooms: Mapping[int, int], requests: Sequence[Request], *, ahead: bool = False
    ) -> dict[int, Proposal]:
        """Set `drafts` of each of the running requests that speculates and has room.

        ahead: whether the rounds that follow go from drafter to target on the device, so that these are weighed by what such rounds cost.
        """
        proposals: dict[int, Proposal] = {}
        rows: dict[int, int] = {}  # of each request in the step, as far as it is known
        asks: dict[Controller, list[tuple[_Speculating, WidthAsk]]] = {}
        for request in requests:
            request.drafts = ()
            rows[request.id] = len(request.tokens) - request.computed
            one = self._of.get(request.id)
            if one is None:
                continue
            if one.broken:
                proposals[request.id] = Proposal(one.broken)
            elif rooms[request.id] < 1:
                proposals[request.id] = Proposal("no room: prompt or last token")
            elif request.resting:
                proposals |= self.rest([request])
            else:
                asks.setdefault(one.controller, []).append((one, WidthAsk(request.id, rooms[request.id])))
        for controller, asked in asks.items():
            proposals |= self._round(controller, asked, rows, ahead)
        return proposals

    def rest(self, requests: Sequence[Request]) -> dict[int, Proposal]:
        """A round without drafts for those that rest, as it was decided before."""
        proposals = {}
        for request in requests:
            if request.resting:
                request.resting -= 1
                why = f"0: at rest, {request.resting} rounds more without"
                proposals[request.id] = Proposal(why, 0.0, 0, why)
        return proposals

    def resumable(self, requests: Sequence[Request]) -> bool:
        """Whether the drafts of all of them can be made on the device, behind a step whose outcome the host does not know yet."""
        each = (self._of.get(request.id) for request in requests)
        return all(one is None or one.broken or one.resuming is not None for one in each)

    def resume(self, rooms: Mapping[int, int], requests: Sequence[Request]) -> Resumption | None:
        """For a step behind one in flight: set `drafts` of those that speculate, have room and do not rest to so many `UNKNOWN` tokens.

        None where they use several drafters. The requests are `resumable`.
        """
        proposals = self.rest(requests)
        rows: dict[int, int] = {}
        asks: dict[Controller, list[tuple[_Speculating, WidthAsk]]] = {}
        drafters: dict[int, Resuming] = {}
        drafting, light, alone = 0, True, dict[int, bool]()  # without a network
        for request in requests:
            request.drafts = ()
            rows[request.id] = 1 if request.id in rooms else len(request.tokens) - request.computed
            one = self._of.get(request.id)
            if one is None or request.id in proposals or not rooms.get(request.id):
                continue
            if one.broken:
                proposals[request.id] = Proposal(one.broken)
            elif (drafter := one.resuming) is not None:
                if drafting == drafter.places:
                    proposals[request.id] = Proposal(f"no room: {drafting} requests draft in one launch at most")
                    continue
                drafting += 1
                alone[request.id] = drafter.light(request.id)
                light = light and alone[request.id]
                drafters[id(drafter)] = drafter
                most = min(request.params.width, drafter.most)
                if rooms[request.id] < most:  # near its end
                    most = max(width for width in HOT if width <= rooms[request.id])
                asks.setdefault(one.controller, []).append((one, WidthAsk(request.id, most)))
        if len(drafters) > 1:
            return None
        for controller, asked in asks.items():
            start = self._clock()
            costs = self._rounds.light if light else self._rounds.heavy
            choices = self._choose(controller, asked, rows, costs, ahead=True)
            if isinstance(choices, str):
                proposals |= {ask.request_id: Proposal(choices) for _, ask in asked}
                continue
            seconds = (self._clock() - start) / len(asked)
            for (one, ask), choice in zip(asked, choices, strict=True):
                one.request.drafts = (UNKNOWN,) * choice.drafts
                one.request.resting = 0 if choice.drafts else choice.rest
                rows[ask.request_id] += choice.drafts
                note = "" if choice.drafts else choice.why
                subset = one.limits(choice.drafts > 0 and not alone[ask.request_id])
                made = {"resumed": choice.drafts > 0, "light": light and choice.drafts > 0}
                by = COPY if alone[ask.request_id] else one.drafter.name
                proposals[ask.request_id] = Proposal(
                    note, seconds, choice.drafts, choice.why, subset, drafter=by, **made
                )
        return Resumption(proposals, next(iter(drafters.values()), None))

    def commit(self, request: Request, emitted: Sequence[int]) -> None:
        """Tell the drafter what was emitted; one that raises is out of step, so it drafts no more for this request."""
        one = self._of.get(request.id)
        if one is not None and not one.broken:
            with _blaming(one, one.drafter.name):
                one.drafter.commit(request.id, emitted)

    def settled(self, request: Request, proposal: Proposal) -> Proposal:
        """What came of a proposal, once its round is committed: where drafts are made on the device, only then is it known whether they
        were copied."""
        one = self._of.get(request.id)
        if proposal.subset is None or one is None or one.broken or not one.copies:
            return proposal
        return replace(proposal, subset=None)

    def observe(self, request: Request, drafted: int, accepted: int, seconds: float) -> None:
        """Tell the controller what a round came to, drafting included in the seconds."""
        one = self._of.get(request.id)
        if one is not None and not one.broken:
            with _blaming(one, one.controller.name):
                one.controller.observe(request.id, drafted, accepted, seconds)

    def end(self, request: Request) -> None:
        one = self._of.pop(request.id, None)
        if one is None:
            return
        for teller in (one.drafter, one.controller):
            with suppress(Exception):  # a drafter is never worth a request
                teller.end(request.id)

    def remembered(self, namespace: str) -> CorpusTexts:
        """What drafters keep of requests that are over for others of this namespace."""
        corpora = (getattr(drafter, "corpus", None) for drafter in self._drafters.values())
        return next((corpus.texts(namespace) for corpus in corpora if corpus is not None), CorpusTexts())

    def forget(self) -> None:
        """Forget what drafters and controllers that serve no request now have kept of earlier ones."""
        drafters, controllers = (
            {id(getattr(one, part)) for one in self._of.values()} for part in ("drafter", "controller")
        )
        self._drafters = {name: drafter for name, drafter in self._drafters.items() if id(drafter) in drafters}
        self._controllers = {name: one for name, one in self._controllers.items() if id(one) in controllers}

    def _round(
        self, controller: Controller, asked: Sequence[tuple[_Speculating, WidthAsk]], rows: dict[int, int], ahead: bool
    ) -> dict[int, Proposal]:
        """Draft for the requests of one controller, and count the drafts in `rows`."""
        start = self._clock()
        choices = self._choose(controller, asked, rows, self._rounds.heavy if ahead else self._costs, ahead)
        if isinstance(choices, str):
            return {ask.request_id: Proposal(choices) for _, ask in asked}
        proposals: dict[int, Proposal] = {}
        wants: dict[Drafter, list[tuple[_Speculating, DraftAsk]]] = {}
        for (one, ask), choice in zip(asked, choices, strict=True):
            proposals[ask.request_id] = Proposal(choice.why, 0.0, choice.drafts, choice.why)
            one.request.resting = 0 if choice.drafts else choice.rest
            if choice.drafts:
                wants.setdefault(one.drafter, []).append((one, _ask_of(one.request, choice.drafts)))
        answers: list[tuple[_Speculating, Draft]] = []
        cuts: dict[int, str] = {}  # of all that were asked
        for drafter, wanted in wants.items():
            drafts = self._ask(drafter, [ask for _, ask in wanted])
            for (one, ask), drawn in zip(wanted, drafts, strict=True):
                draft, cuts[ask.request_id] = drawn.gated(one.request.params.gate)
                note = "" if draft.tokens else draft.note or "no earlier match"
                by = draft.drafter or drafter.name
                proposals[ask.request_id] = replace(proposals[ask.request_id], note=note, drafter=by)
                if draft.tokens:
                    answers.append((one, draft))
        if ahead:
            for one, draft in answers:
                one.request.drafts = draft.tokens
                rows[one.request.id] += len(draft.tokens)
        else:
            proposals |= self._keep(controller, answers, rows, proposals)
        seconds = (self._clock() - start) / len(asked)
        return {
            request_id: replace(
                proposal,
                seconds=seconds,
                why=proposal.why + cuts.get(request_id, ""),
                subset=self._of[request_id].limits(request_id in cuts and not self._of[request_id].copies),
            )
            for request_id, proposal in proposals.items()
        }

    def _choose(
        self,
        controller: Controller,
        asked: Sequence[tuple[_Speculating, WidthAsk]],
        rows: Mapping[int, int],
        costs: Costs,
        ahead: bool,
    ) -> Sequence[Choice] | str:
        """What the controller asks the drafters for; what is wrong with it, where it raises: it is never worth a request."""
        asks = [ask for _, ask in asked]
        choose = controller.ask_ahead if ahead else controller.ask
        try:
            return _checked(asks, choose(asks, self._beside(asked, rows), costs))
        except Exception as error:  # noqa: BLE001
            return _blame(controller.name, error)

    def _keep(
        self,
        controller: Controller,
        answers: Sequence[tuple[_Speculating, Draft]],
        rows: dict[int, int],
        proposals: Mapping[int, Proposal],
    ) -> dict[int, Proposal]:
        """Let the controller cut the drafts, and give them to their requests."""
        if not answers:
            return {}
        asked = [(one, WidthAsk(one.request.id, len(draft.tokens), draft.confidence)) for one, draft in answers]
        try:
            choices = _checked(
                [ask for _, ask in asked],
                controller.keep([ask for _, ask in asked], self._beside(asked, rows), self._costs),
            )
        except Exception as error:  # noqa: BLE001
            note = _blame(controller.name, error)
            return {ask.request_id: replace(proposals[ask.request_id], note=note) for _, ask in asked}
        kept = {}
        for (one, draft), choice in zip(answers, choices, strict=True):
            request = one.request
            request.drafts = draft.tokens[: choice.drafts]
            rows[request.id] += choice.drafts
            note, by = "" if choice.drafts else choice.why, draft.drafter or one.drafter.name
            kept[request.id] = Proposal(note, 0.0, choice.drafts, choice.why, drafter=by)
        return kept

    def _beside(self, asked: Sequence[tuple[_Speculating, WidthAsk]], rows: Mapping[int, int]) -> int:
        """Rows of a step beside one for each of these requests; what waits to be admitted is not foreseen."""
        own = sum(rows[ask.request_id] for _, ask in asked)
        most = sum(rows.values()) if self._step_rows is None else min(self._step_rows, sum(rows.values()))
        return max(0, most - own)

    def _ask(self, drafter: Drafter, asks: Sequence[DraftAsk]) -> list[Draft]:
        """A draft for each ask, noting why there is none. A drafter that raises costs its drafts, not the request."""
        start = self._clock()
        try:
            drafts = drafter.propose(asks)
            if len(drafts) != len(asks):
                raise ValueError(f"{len(asks)} asks but {len(drafts)} answers")
            drafts = [_cut(draft, ask.width) for ask, draft in zip(asks, drafts, strict=True)]
            if any(not 0 <= token < self._vocab for draft in drafts for token in draft.tokens):
                raise ValueError(f"a draft is outside the vocabulary of {self._vocab}")
        except Exception as error:  # noqa: BLE001  # a drafter is never worth a request
            return [Draft(note=_blame(drafter.name, error))] * len(asks)
        self._on_draft(drafter.name, len(asks), max(ask.width for ask in asks), self._clock() - start)
        return drafts


def _ask_of(request: Request, width: int) -> DraftAsk:
    return DraftAsk(request.id, request.tokens, width, request.params, request.blocks, request.computed)


def _cut(draft: Draft, width: int) -> Draft:
    if draft.confidence and len(draft.confidence) != len(draft.tokens):
        raise ValueError(f"{len(draft.tokens)} drafts with {len(draft.confidence)} confidences")
    if any(not 0.0 <= sure <= 1.0 for sure in draft.confidence):
        raise ValueError("a confidence is no probability")
    return Draft(tuple(draft.tokens[:width]), tuple(draft.confidence[:width]), draft.note, drafter=draft.drafter)


def _checked(asks: Sequence[WidthAsk], choices: Sequence[Choice]) -> Sequence[Choice]:
    if len(choices) != len(asks):
        raise ValueError(f"{len(asks)} asks but {len(choices)} choices")
    for ask, choice in zip(asks, choices, strict=True):
        if not 0 <= choice.drafts <= ask.most:
            raise ValueError(f"{choice.drafts} drafts of at most {ask.most}")
    return choices


def _blame(name: str, error: Exception) -> str:
    return f"{name} failed: {type(error).__name__}: {error}"


@contextmanager
def _blaming(one: _Speculating, name: str) -> Iterator[None]:
    """What raises here breaks the speculation of its request, and nothing else."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        one.broken = _blame(name, error)
