"""Test that objects built without ``__init__``, and stand-ins that know nothing of checksums, do with checksums off.

vLLM's own tests, and code outside it, make such objects. With checksums off, what the series inserts must not ask more
of them than stock vLLM does.

vLLM's tests themselves: ``make test-upstream``.
"""

import ast
import importlib
import textwrap
from types import SimpleNamespace

import pytest
import torch

from vllm_kv_checksum.series import load_series


def _classes_and_attributes():
    """Yield class and attribute of every ``self.attribute = ...`` that the series inserts."""
    for module in load_series():
        name = "vllm." + module.path.removesuffix(".py").replace("/", ".")
        for edit in module.edits:
            owner = edit.scope.split(".")[0]
            if edit.where == "keyword" or "." not in edit.scope:
                continue
            for node in ast.walk(ast.parse(textwrap.dedent(edit.code))):
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                    continue
                for target in targets:
                    if ast.unparse(target).startswith("self."):
                        yield name, owner, target.attr


ADDED = sorted(set(_classes_and_attributes()))

# What a step brings to workers is made by its constructor, and read with checksums on.
METADATA = ("MooncakeConnectorMetadata", "NixlConnectorMetadata")


def test_the_list_is_of_what_is_inserted():
    names = {(owner, attribute) for _, owner, attribute in ADDED}
    assert {
        ("ActiveKVConnector", "kv_checksum_worker"),
        ("MambaMixer2", "num_model_groups"),
        ("NixlPushConnectorWorker", "kv_checksums"),
        ("Scheduler", "kv_checksum"),
    } <= names


@pytest.mark.parametrize(("module", "owner", "attribute"), ADDED)
def test_an_object_without_init_has_what_is_asked_of_it(module, owner, attribute):
    if owner in METADATA:
        pytest.skip("made by its constructor")
    default = getattr(getattr(importlib.import_module(module), owner), attribute)
    assert not default or attribute == "_kv_checksums_not_stored"


def test_multi_connector_overrides_what_the_base_class_got():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
    )

    public = [n for n in vars(KVConnectorBase_V1) if "kv_checksum" in n and n[0] != "_"]
    assert "kv_checksum_carrier" in public
    for name in public:
        assert name in vars(MultiConnector)


def test_a_layer_that_knows_of_no_splits_has_none():
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.kv_cache_interface import MambaSpec

    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            mamba_block_size=16,
            mamba_page_size_padded=None,
            mamba_cache_mode="none",
            use_replayssm=False,
            use_kda_recoverssm=False,
        ),
        speculative_config=None,
        num_speculative_tokens=0,
    )
    layer = SimpleNamespace(
        get_state_shape=lambda: ((4, 8),),
        get_state_dtype=lambda: (torch.float32,),
        mamba_type="mamba2",
        is_kv_cache_tp_replicated=False,
    )
    spec = MambaBase.get_kv_cache_spec(layer, config)
    assert isinstance(spec, MambaSpec) and spec.state_splits is None


def test_a_mixer_without_init_has_no_splits():
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    mixer = object.__new__(MambaMixer2)
    torch.nn.Module.__init__(mixer)
    mixer.tp_size, mixer.intermediate_size, mixer.num_heads = 2, 64, 8
    mixer.ssm_state_size = 16
    assert mixer.get_state_splits() is None


class Unconfigured:
    """A configuration in which nothing is set, and which knows of no transfer."""

    def __init__(self):
        from vllm.config import ParallelConfig

        self.parallel_config = ParallelConfig()
        self.scheduler_config = SimpleNamespace(async_scheduling=False)

    def __getattr__(self, name):
        if name == "kv_transfer_config":
            raise AttributeError(name)
        return (lambda: False) if name.startswith("_") else None


def test_a_configuration_may_lack_the_transfer():
    from vllm.config import VllmConfig

    assert not VllmConfig._get_v1_model_runner_unsupported_features(Unconfigured())


def test_an_engine_s_configuration_may_lack_the_transfer():
    from vllm.distributed.kv_transfer.kv_checksum import support

    support.refuse_unchecked(Unconfigured(), None)
