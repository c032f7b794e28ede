"""Test the page for authors of connectors: its example is a file that runs, and its commands are run as they stand."""

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_checksum.rig.authors import broken, folder
from rig.model import CACHE

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_checksum import KVChecksumWorker
from vllm.distributed.kv_transfer.kv_checksum.testing import Fault, assert_conforms
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

PAGE = CACHE.parent / "docs/design/connectors.md"
NO_LICENCE = re.compile(r"(# SPDX-.*\n)*")


def blocks(language: str) -> list[str]:
    """Return the page's fenced blocks of a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[Path]:
    """Write the page's example and its test where an author has them."""
    example, test = blocks("python")
    target = tmp_path / "my_package"
    target.mkdir()
    (target / "__init__.py").write_text("")
    (target / "folder.py").write_text(example)
    (target / "test_folder.py").write_text(test)
    monkeypatch.syspath_prepend(tmp_path)
    return target


def test_the_example_is_the_file_that_the_unit_tests_run():
    source = Path(folder.__file__).read_text()
    assert blocks("python")[0] == NO_LICENCE.sub("", source, count=1)


def test_the_example_conforms_by_the_page_s_own_test(package, tmp_path):
    module = importlib.import_module("my_package.test_folder")
    module.test_the_connector_conforms(tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_vllm_takes_the_page_s_configuration(package):
    (text,) = blocks("json")
    config = KVTransferConfig(**json.loads(text))
    assert config.enable_kv_checksum
    found = KVConnectorFactory.get_connector_class(config)
    assert found.__module__ == "my_package.folder"


def test_the_page_shows_what_the_suite_says(package, tmp_path):
    """Break the example as the page says."""
    module = importlib.import_module("my_package.test_folder")
    made = module.Folder(tmp_path)
    made.connector, made.module_path = broken.ShiftsABlock.__name__, broken.__name__
    with pytest.raises(AssertionError) as error:
        assert_conforms(made)
    said = str(error.value).replace("ShiftsABlock", "FolderConnector").splitlines()
    (shown,) = blocks("text")
    assert [line.rstrip(".") for line in shown.splitlines()] == [
        said[0],
        said[1].partition("Map block")[0],
    ]


def test_the_table_has_every_problem():
    text = PAGE.read_text().partition("| problem |")[2]
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == [f.value for f in Fault]


def test_every_method_that_the_page_names_is_there():
    named = set(re.findall(r"`(?:worker\.)?(\w+)(?:\(.*?\))?`", PAGE.read_text()))
    ours = {n for n in vars(KVConnectorBase_V1) if "kv_checksum" in n}
    hidden = {"_kv_checksums_follow_context", "set_kv_checksum_ledger"}
    assert ours - hidden <= named
    vllms = {"get_num_new_matched_tokens", "request_finished", "register_kv_caches"}
    assert not [n for n in vllms if not hasattr(KVConnectorBase_V1, n)]
    worker = {"init_block_checksums", "save_block_checksums"}
    assert worker <= named & set(vars(KVChecksumWorker))
