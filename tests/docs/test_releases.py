"""Test the guide's table of what each release of vLLM covers: it is what the program finds."""

from contextlib import ExitStack

import pytest
from rig import releases
from rig.stock import link_stock_vllm

from vllm_kv_checksum import KNOWN_VERSIONS
from vllm_kv_checksum.stock import open_stock


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Return the unpatched vLLM under test."""
    folder = tmp_path_factory.mktemp("stock")
    link_stock_vllm(folder)
    with open_stock(folder, None) as opened:
        yield opened


def test_the_column_of_this_release_is_what_is_found(stock):
    found = {label: cells[0] for label, cells in releases.rows([stock])}
    expected = releases.column(releases.release(stock))
    for label in expected.keys() - found.keys():  # a connector of other releases
        assert expected[label] == "not there"
    assert {k: v for k, v in expected.items() if k in found} == found
    # Known answers, so that the program does not judge itself.
    assert found["the series"] == "whole"
    assert found["`NixlPullConnector`"] == found["`NixlPushConnector`"] == "carried"
    assert found["`MooncakeConnector`"] == "carried"
    assert found["`MooncakeStoreConnector`"] == "stored"
    assert found["`SimpleCPUOffloadConnector`"] == "stored"
    assert found["`MultiConnector`"] == "as the one inside"
    from vllm.v1.engine import EngineCoreOutput

    told = "the reason" if hasattr(EngineCoreOutput, "error") else "general error"
    assert told in found["a failed request's client reads"]


def test_every_supported_release_has_a_column():
    head = releases.written().splitlines()[0]
    assert [cell.strip() for cell in head.strip("|").split("|")][1:] == [
        *KNOWN_VERSIONS
    ]


@pytest.mark.slow
def test_the_whole_table_is_what_the_program_makes():
    with ExitStack() as stack:
        wheels = [releases.wheel_of(version) for version in KNOWN_VERSIONS]
        stocks = [stack.enter_context(open_stock(None, wheel)) for wheel in wheels]
        assert releases.written() == releases.table(stocks)
