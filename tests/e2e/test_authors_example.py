"""Run the example of the page for authors of connectors in real servers, as its configuration says."""

from __future__ import annotations

import json
import re

import pytest
from rig.model import CACHE, tiny_qwen3
from rig.routing import prefill_decode
from rig.servers import Server, serving

from e2e import pairs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = CACHE.parent / "docs/design/connectors.md"
LOADS = """

FolderMetadata.loads_by_request = lambda self: {
    req_id: {0: block_ids} for req_id, (_, block_ids) in self.loads.items()
}
"""
"""What the servers' rig asks the metadata, to compare loads with what is summed."""

LENGTHS = (1, 31, 32, 33, 300, 700)


def block(language: str) -> str:
    """Return the page's first block of a language."""
    found = re.search(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[1]


def test_the_example_s_loads_are_verified(tmp_path):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "folder.py").write_text(block("python") + LOADS)
    settings = json.loads(block("json"))
    settings["kv_connector_extra_config"] = {"folder": str(tmp_path)}
    name, _ = settings.pop("kv_connector"), settings.pop("kv_role")
    common = {"model": tiny_qwen3(), "env": {"PYTHONPATH": str(tmp_path)}}
    p = Server("authors-p", "kv_producer", connector=name, transfer=settings, **common)
    d = Server("authors-d", "kv_consumer", connector=name, transfer=settings, **common)
    prompts = [pairs.prompt_of(n) for n in LENGTHS]
    with serving(p, d):
        expected = pairs.reference_texts(p, prompts, 8)
        answers = [prefill_decode(p, d, prompt, 8) for prompt in prompts]
        assert [pairs.text_of(a) for a in answers] == expected
        assert pairs.loads(d) == {
            "verified": len(prompts),
            "mismatch": 0,
            "unverified": 0,
        }
    assert not list(tmp_path.glob("*.kv"))
