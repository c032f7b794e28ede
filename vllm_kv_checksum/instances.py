"""Read what an instance tells on ``/metrics`` about its KV checksums."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .scrape import Page, printable

PREFIX = "vllm:kv_checksum_"
TRANSFERRED = {"kv_transfer_params", "connector"}
"""Carriers of checksums that go from one instance to another."""

_MAX_REASONS = 40
"""More reasons than this are no page of vLLM's; the others are not shown."""


@dataclass(frozen=True)
class Info:
    """The labels of ``vllm:kv_checksum_info``, as the instance has them."""

    state: str
    definition: str
    payload_version: str
    role: str
    fail_mode: str
    connectors: tuple[str, ...]
    carriers: tuple[str, ...]
    block_size: str

    @property
    def sends(self) -> bool:
        return self.role in ("kv_producer", "kv_both")

    @property
    def loads(self) -> bool:
        return self.role in ("kv_consumer", "kv_both")

    @property
    def transfers(self) -> bool:
        """Tell whether it needs a partner to verify, other than its own stores."""
        return bool(TRANSFERRED & set(self.carriers)) or self.role != "kv_both"


@dataclass
class Instance:
    """One server, as far as its page tells.

    Attributes:
        url: where it was asked.
        problem: why it tells nothing, or an empty string.
        is_vllm: whether the page has metrics of vLLM.
        has_checksums: whether it has metrics of KV checksums.
        info: what it says of itself; None if it does not.
        loads: loads by verdict since it was started.
        sent: bytes of checksums that it sent.
        unverified, unsent, left_out, skipped: counts by reason, those that are not 0.

    """

    url: str
    problem: str = ""
    is_vllm: bool = False
    has_checksums: bool = False
    info: Info | None = None
    loads: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    unverified: dict[str, int] = field(default_factory=dict)
    unsent: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sample:
    name: str
    labels: dict[str, str]
    value: int


def read_instance(page: Page) -> Instance:
    """Return what a page tells; a page that cannot be read is a problem, too."""
    instance = Instance(page.url, page.problem)
    if page.text is None:
        return instance
    lines = page.text.splitlines()
    instance.is_vllm = any(line.startswith("vllm:") for line in lines)
    try:
        samples = list(_samples(line for line in lines if line.startswith(PREFIX)))
    except ImportError:
        instance.problem = (
            "reading its metrics needs prometheus_client: run this where vLLM is "
            "installed, or pip install prometheus-client"
        )
        return instance
    except Exception as error:  # the parser raises many kinds for broken lines
        instance.problem = f"its metrics cannot be read: {printable(error)}"
        return instance
    instance.has_checksums = bool(samples)
    infos = {_info(s.labels) for s in samples if s.name == "info"}
    if len(infos) > 1:
        instance.problem = "it shows several instances at once: ask each by itself"
        return instance
    instance.info = infos.pop() if infos else None
    instance.loads = _by(samples, "loads_total", "verdict")
    instance.sent = sum(s.value for s in samples if s.name == "payload_bytes_total")
    instance.unverified = _by(samples, "unverified_loads_total", "reason")
    instance.unsent = _by(samples, "unsent_total", "reason")
    instance.left_out = _by(samples, "groups_left_out_total", "reason")
    instance.skipped = _by(samples, "skipped_groups", "reason")
    return instance


def _samples(lines: Iterator[str]) -> Iterator[_Sample]:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for s in family.samples:
            labels = {k: printable(v) for k, v in s.labels.items()}
            yield _Sample(s.name.removeprefix(PREFIX), labels, int(s.value))


def _info(labels: dict[str, str]) -> Info:
    """Return the description; what it does not tell is an empty string."""

    def told(name: str) -> str:
        return labels.get(name, "")

    def several(name: str) -> tuple[str, ...]:
        return tuple(filter(None, told(name).split(",")))

    return Info(
        state=told("state"),
        definition=told("definition"),
        payload_version=told("payload_version"),
        role=told("role"),
        fail_mode=told("fail_mode"),
        connectors=several("connectors"),
        carriers=several("carriers"),
        block_size=told("block_size"),
    )


def _by(samples: list[_Sample], name: str, label: str) -> dict[str, int]:
    """Add up a metric by one label; values of 0 are left out."""
    counts: dict[str, int] = {}
    for s in samples:
        if s.name == name and s.value:
            value = s.labels.get(label, "")
            counts[value] = counts.get(value, 0) + s.value
    return dict(list(counts.items())[:_MAX_REASONS])
