"""Read a page of /metrics, all of one moment."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]
"""Every sample of a page, by name and labels."""


def parse(page: str) -> Samples:
    """Return the samples of a page in Prometheus's text format."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of those of the samples that have this name and carry these labels; 0 if there are none."""
    wanted = labels.items()
    return sum(
        value
        for (found, carried), value in samples.items()
        if found == name and wanted <= carried
    )
