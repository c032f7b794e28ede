"""Judge from ``/metrics`` whether instances will verify each other's KV.

P sends KV, D loads it. Only what the instances tell is judged: their description, and
what they counted since they were started.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from . import reasons
from .instances import TRANSFERRED, Info, Instance, read_instance
from .scrape import ask_all

PROBLEM, UNKNOWN, NOTE = "not verified", "not known", "note"
"""What a finding is about; the exit status follows from the worst."""

STATUS = {PROBLEM: 1, UNKNOWN: 2, NOTE: 0}

_DRILL = "KVChecksumFaultDrill"
_UNIT_TOKENS = 16
_GUIDE = "docs/features/kv_checksum.md"


@dataclass(frozen=True)
class Finding:
    """One thing to know about an instance or a pair.

    Attributes:
        kind: "not verified", "not known" or "note".
        where: the URL, or both.
        what: what was found.
        change: what it means or what to change; may be empty.

    """

    kind: str
    where: str
    what: str
    change: str = ""


@dataclass(frozen=True)
class Pair:
    """A P and a D by their URLs, and why D will not verify what P sends; empty: it will."""

    producer: str
    consumer: str
    why_not: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All that is to say about some servers."""

    instances: list[Instance]
    pairs: list[Pair]
    findings: list[Finding]

    @property
    def status(self) -> int:
        """Return the command's exit status."""
        return max((STATUS[f.kind] for f in self.findings), default=0)

    def to_json(self) -> str:
        content = {"status": self.status, "conclusion": self._conclusion()}
        content |= {k: [asdict(x) for x in getattr(self, k)] for k in self._LISTS}
        return json.dumps(content, indent=1)

    _LISTS = ("instances", "pairs", "findings")

    def to_text(self) -> str:
        lines = [_described(instance) for instance in self.instances] + [""]
        for f in sorted(self.findings, key=lambda f: -STATUS[f.kind]):
            lines.append(f"{f.kind}: {f.where}: {f.what}")
            lines += [f"    {f.change}"] * bool(f.change)
        good = [p for p in self.pairs if not p.why_not]
        if len(good) == 1:
            lines.append(
                f"{good[0].consumer} will verify what {good[0].producer} sends"
            )
        elif good:
            lines.append(
                f"{len(good)} of {len(self.pairs)} pairs of P and D will verify"
            )
        return "\n".join([*lines, self._conclusion()]) + "\n"

    def _conclusion(self) -> str:
        if self.status == 2:
            return (
                "Whether everything is verified could not be found out (exit status 2)"
            )
        if self.status == 1:
            return "Not everything is verified (exit status 1)"
        if self.pairs:
            return "P and D will verify each other (exit status 0)"
        return "Each instance verifies what it loads (exit status 0)"


def diagnose(urls: Sequence[str], timeout: float) -> Diagnosis:
    """Ask all servers and judge what they tell.

    Args:
        urls: such as ``http://host:8000`` or ``host:8000``.
        timeout: seconds after which every answer must be there, all told.

    """
    urls = list(dict.fromkeys(urls))
    return judge([read_instance(page) for page in ask_all(urls, timeout)])


def judge(instances: Sequence[Instance]) -> Diagnosis:
    """Judge what some instances tell."""
    findings = [f for instance in instances for f in _judge_alone(instance)]
    pairs, unpaired = _pairs(instances)
    for pair in pairs:
        where = f"P {pair.producer}, D {pair.consumer}"
        findings += [Finding(PROBLEM, where, why) for why in pair.why_not]
    return Diagnosis(list(instances), pairs, findings + unpaired)


def _described(one: Instance) -> str:
    """Return in one line what an instance is."""
    if one.info is None:
        return f"{one.url}: {one.problem or 'says nothing of KV checksums'}"
    info = one.info
    side = {(True, False): "P", (False, True): "D", (True, True): "P and D"}
    fail = info.fail_mode.replace("closed_", "closed, policy ")
    loads = ", ".join(
        f"{one.loads.get(v, 0)} {v}" for v in ("verified", "mismatch", "unverified")
    )
    return (
        f"{one.url}: {side.get((info.sends, info.loads), 'neither P nor D')}, "
        f"checksums {info.state} (definition {info.definition}, payload version "
        f"{info.payload_version}), fail-{fail}; {', '.join(info.connectors)} "
        f"({', '.join(info.carriers)}); loads since its start: {loads}"
    )


def _judge_alone(one: Instance) -> Iterator[Finding]:
    """Yield what is to say about an instance whatever the others are."""
    if one.problem:
        yield Finding(UNKNOWN, one.url, one.problem)
    elif not one.is_vllm:
        yield Finding(
            UNKNOWN,
            one.url,
            "it has metrics, but none of vLLM's",
            "Ask P and D themselves, not a router; started with --disable-log-stats, "
            "they show none",
        )
    elif not one.has_checksums:
        yield Finding(
            PROBLEM,
            one.url,
            "KV checksums are off there, or it is a vLLM without them",
            'Set "enable_kv_checksum": true in --kv-transfer-config; "vllm-kv-checksum '
            'status" tells there whether vLLM has them',
        )
    elif one.info is None:
        yield Finding(
            UNKNOWN,
            one.url,
            "it has KV checksums of a version that does not describe itself",
            "Update vllm-kv-checksum there, and ask again",
        )
    else:
        yield from _judge_info(one.url, one.info)
        yield from _judge_counts(one, one.info)


def _judge_info(url: str, info: Info) -> Iterator[Finding]:
    if info.state != "on":
        yield Finding(
            PROBLEM,
            url,
            "KV checksums are enabled, but cannot work in this set-up",
            'The line "KV checksums are off" in its log says why',
        )
    elif "none" in info.carriers:
        yield Finding(
            PROBLEM,
            url,
            f"nobody checks the loads of some connector ({', '.join(info.connectors)})",
            'The line "KV checksums do not cover a connector" (or "are off") in its log '
            "says which and why",
        )
    if info.loads and info.fail_mode == "open":
        yield Finding(
            NOTE,
            url,
            "fail-open: loads that differ are logged, counted, and used all the same",
            "Set kv_checksum_fail_closed to have them fail or recomputed",
        )
    if _DRILL in info.connectors:
        yield Finding(
            NOTE, url, f"{_DRILL} damages loads there on purpose", "Never in production"
        )


def _judge_counts(one: Instance, info: Info) -> Iterator[Finding]:
    """Yield what an instance has counted that is not as it should be."""
    total = sum(one.loads.values())
    if bad := one.loads.get("mismatch", 0):
        yield Finding(
            PROBLEM,
            one.url,
            f"{bad} of {total} loads since its start were a mismatch: the KV was damaged "
            "or another request's",
            f'Follow "Runbook: a mismatch" in {_GUIDE}',
        )
    for reason, number in one.unverified.items():
        what = f"{number} of {total} loads since its start were not verified: {reason}"
        yield Finding(PROBLEM, one.url, what, _meaning(reasons.UNVERIFIED, reason))
    for reason, number in one.unsent.items():
        what = (
            f"{number} prefills since its start were sent without checksums: {reason}"
        )
        yield Finding(PROBLEM, one.url, what, _meaning(reasons.UNVERIFIED, reason))
    for reason, number in one.left_out.items():
        what = f"{number} times since its start a part of a load was left out: {reason}"
        yield Finding(NOTE, one.url, what, _meaning(reasons.LEFT_OUT, reason))
    for reason, number in one.skipped.items():
        what = f"{number} KV cache groups are never checked: {reason}"
        yield Finding(PROBLEM, one.url, what, _meaning(reasons.SKIPPED, reason))
    if not (total or one.sent) and info.state == "on":
        yield Finding(
            NOTE,
            one.url,
            "it has loaded and sent nothing yet: which KV cache groups it skips is told "
            "after the first request",
        )


def _meaning(table: dict[str, str], reason: str) -> str:
    return table.get(reason, f"It is not known here what that is: see {_GUIDE}")


def _pairs(instances: Sequence[Instance]) -> tuple[list[Pair], list[Finding]]:
    """Return every pair of P and D, and what is to say of those without a partner."""
    told = [(i.url, i.info) for i in instances if i.info is not None and not i.problem]
    told = [(url, info) for url, info in told if info.transfers]
    pairs = [
        Pair(p_url, d_url, tuple(_why_not(p, d)))
        for p_url, p in told
        for d_url, d in told
        if p.sends and d.loads and p_url != d_url
    ]
    paired = {p.producer for p in pairs} | {p.consumer for p in pairs}
    silent = any(i.info is None for i in instances)
    unpaired = [
        Finding(
            UNKNOWN,
            url,
            f"no {'D' if info.sends else 'P'} was asked beside it",
            "Name the URLs of both sides",
        )
        for url, info in told
        if url not in paired and not silent
    ]
    return pairs, unpaired


def _why_not(p: Info, d: Info) -> Iterator[str]:
    """Yield why D will not verify what P sends."""
    if p.state != "on" or d.state != "on":
        yield "KV checksums do not work on both: every load is unverified"
    if p.definition != d.definition:
        yield (
            f"P sums by definition {p.definition}, D by {d.definition}: finish the rollout"
        )
    if p.payload_version != d.payload_version:
        yield (
            f"P sends payload version {p.payload_version}, D reads {d.payload_version} "
            "(payload_version): finish the rollout"
        )
    names = set(p.connectors), set(d.connectors)
    if not names[0] & names[1] and _DRILL not in names[0] | names[1]:
        yield (
            f"they have different connectors ({', '.join(p.connectors)} and "
            f"{', '.join(d.connectors)}): no KV goes from P to D"
        )
    elif not TRANSFERRED & set(p.carriers) & set(d.carriers):
        yield "no connector that both have carries checksums from P to D"
    if not _fit(p.block_size, d.block_size):
        yield (
            f"block sizes {p.block_size} and {d.block_size} do not fit (block_sizes): "
            "make both multiples of 16, or equal"
        )


def _fit(left: str, right: str) -> bool:
    """Tell whether blocks of two sizes can be compared; what is not known may be.

    Units are compared, in chunks of the larger one: 16 tokens where the block size is a
    multiple of 16, else a block.
    """
    if not (left.isdecimal() and right.isdecimal()):
        return True
    sizes = (int(left), int(right))
    small, large = sorted(n if n % _UNIT_TOKENS else _UNIT_TOKENS for n in sizes)
    return large % small == 0
