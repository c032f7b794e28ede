"""Layers say how TP splits their Mamba-like states.

From a rank's shapes alone it cannot be told which rows of a state it holds, nor that
several ranks hold the same ones. So `MambaSpec` carries the splits, filled from the
layers: Mamba1, Mamba2 and gated delta nets know theirs, other layers answer None. The
arithmetic is the feature's (`state_splits`). The splits are the same on every rank, as
vLLM compares specs over ranks.
"""

from ..edits import Module, assign

interface = Module("v1/kv_cache_interface.py")
interface.define(
    "MambaSpec",
    '''
    @dataclass(frozen=True)
    class MambaStateSplit:
        """How tensor parallelism splits one state along an axis.

        The axis is a run of segments, each with its size on one rank and the number
        of consecutive ranks that hold the same rows of it.
        """

        axis: int
        segments: tuple[tuple[int, int], ...]
    ''',
)
with interface.cls("KVCacheConfig") as c:
    c.after(
        assign("hash_block_size"),
        '''
        kv_checksum_skipped: dict[int, str] | None = None
        """Groups that some worker does not checksum, with the reason (scheduler)."""
        ''',
        past_docstring=True,
    )
with interface.cls("MambaSpec") as c:
    c.after(
        assign("tp_replicated"),
        """
        # How TP splits each of the first states; None: not known.
        state_splits: tuple[MambaStateSplit, ...] | None = None
        """,
    )

abstract = Module("model_executor/layers/mamba/abstract.py")
abstract.imports(
    """
    from vllm.distributed.kv_transfer.kv_checksum import state_splits
    from vllm.v1.kv_cache_interface import MambaStateSplit
    """
)
with abstract.cls("MambaBase") as c:
    c.method(
        '''
        def get_state_splits(self) -> tuple[MambaStateSplit, ...] | None:
            """How TP splits the states of `get_state_shape`; None: not known."""
            return None

        ''',
    )
with abstract.function("MambaBase.get_kv_cache_spec") as f:
    f.keyword("MambaSpec", "state_splits=state_splits.of_layer(self)")

calculator = Module("model_executor/layers/mamba/mamba_utils.py")
calculator.imports("from vllm.distributed.kv_transfer.kv_checksum import state_splits")
with calculator.cls("MambaStateShapeCalculator") as c:
    c.prepend(
        """
        mamba1_state_splits = staticmethod(state_splits.mamba1_state_splits)
        mamba2_state_splits = staticmethod(state_splits.mamba2_state_splits)
        gated_delta_net_state_splits = staticmethod(
            state_splits.gated_delta_net_state_splits
        )

        """
    )

mixer = Module("model_executor/layers/mamba/mamba_mixer.py")
with mixer.cls("MambaMixer") as c:
    c.method(
        """
        def get_state_splits(self):
            return MambaStateShapeCalculator.mamba1_state_splits(
                tp_size=get_tensor_model_parallel_world_size(),
                intermediate_size=self.intermediate_size,
            )

        """,
    )

# `n_groups` is overwritten with what TP makes of it.
mixer2 = Module("model_executor/layers/mamba/mamba_mixer2.py")
with mixer2.function("MambaMixer2.__init__") as f:
    f.after("self.n_groups = n_groups", "self.num_model_groups = n_groups")
with mixer2.cls("MambaMixer2") as c:
    c.prepend("num_model_groups: int | None = None\n\n")
    c.method(
        """
        def get_state_splits(self):
            return MambaStateShapeCalculator.mamba2_state_splits(
                tp_size=self.tp_size,
                intermediate_size=self.intermediate_size,
                n_groups=self.num_model_groups,
                num_heads=self.num_heads,
                state_size=self.ssm_state_size,
            )

        """,
    )

_GDN_SPLITS = """
    def get_state_splits(self):
        return MambaStateShapeCalculator.gated_delta_net_state_splits(
            tp_size=self.tp_size,
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
        )

"""

qwen = Module("model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py")
with qwen.cls("QwenGatedDeltaNetAttention") as c:
    c.method(_GDN_SPLITS)

olmo = Module("model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py")
with olmo.cls("OlmoHybridGatedDeltaNetAttention") as c:
    c.method(_GDN_SPLITS)

MODULES = [interface, abstract, calculator, mixer, mixer2, qwen, olmo]
