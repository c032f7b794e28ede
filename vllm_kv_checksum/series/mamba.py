"""Let Mamba-like layers say how TP splits their states.

From a rank's shapes alone it cannot be told which rows of a state it holds, nor that
several ranks hold the same ones. So `MambaSpec` carries the splits, filled from the
layers: Mamba1, Mamba2, gated delta nets, Kimi's delta attention (KDA), short
convolutions and linear attention know theirs, other layers answer None. The splits are
the same on every rank, as vLLM compares specs over ranks.
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
with interface.cls("MambaSpec") as c:
    c.after(
        assign("tp_replicated"),
        """
        # TP's split of each of the first states; None if it is not known.
        state_splits: tuple[MambaStateSplit, ...] | None = None
        """,
    )

abstract = Module("model_executor/layers/mamba/abstract.py")
abstract.imports(
    """
    from vllm.model_executor.layers.mamba.mamba_utils import get_layer_state_splits
    from vllm.v1.kv_cache_interface import MambaStateSplit
    """
)
with abstract.cls("MambaBase") as c:
    c.method(
        '''
        def get_state_splits(self) -> tuple[MambaStateSplit, ...] | None:
            """Return how TP splits the states of `get_state_shape`; None if not known."""
            return None

        ''',
    )
with abstract.function("MambaBase.get_kv_cache_spec") as f:
    f.keyword("MambaSpec", "state_splits=get_layer_state_splits(self)")

calculator = Module("model_executor/layers/mamba/mamba_utils.py")
calculator.imports(
    """
    from typing import Any
    from vllm.v1.kv_cache_interface import MambaStateSplit
    """
)
calculator.define(
    "MambaStateShapeCalculator",
    '''
    StateSplits: TypeAlias = tuple[MambaStateSplit, ...]


    def get_layer_state_splits(layer: Any) -> StateSplits | None:
        """Return how TP splits a layer's states, or None if the layer does not tell."""
        tell = getattr(layer, "get_state_splits", None)
        return None if tell is None else tell()


    def _tp_share(size: int, tp_size: int) -> int | None:
        """Return a rank's share of `size`, or None if TP does not divide it."""
        return None if size % tp_size else size // tp_size


    def _conv_split(conv: tuple[tuple[int, int], ...]) -> MambaStateSplit:
        """Build the split of a conv state's channels."""
        return MambaStateSplit(0 if is_conv_state_dim_first() else 1, conv)


    def _rows_split(rows: int) -> MambaStateSplit:
        """Build the split of a temporal state's rows."""
        return MambaStateSplit(0, ((rows, 1),))


    def _state_splits(conv: tuple[tuple[int, int], ...], temporal: int) -> StateSplits:
        """Build the splits of a conv state's channels and a temporal state's rows."""
        return _conv_split(conv), _rows_split(temporal)
    ''',
)
# They are named after the functions that give the shapes of the same states.
with calculator.cls("MambaStateShapeCalculator") as c:
    c.method(
        '''
        @staticmethod
        def mamba1_state_splits(tp_size: int, intermediate_size: int) -> StateSplits | None:
            """Return the splits of a conv state [x] and a temporal state [channels].

            None where TP does not divide the sizes; the same on every rank.
            """
            channels = _tp_share(intermediate_size, tp_size)
            if channels is None:
                return None
            return _state_splits(((channels, 1),), channels)

        @staticmethod
        def mamba2_state_splits(
            tp_size: int,
            intermediate_size: int,
            n_groups: int | None,
            num_heads: int,
            state_size: int,
        ) -> StateSplits | None:
            """Return the splits of a conv state [x, B, C] and a temporal state [heads].

            A single group's B and C are on every rank.

            Args:
                tp_size: number of tensor-parallel ranks.
                intermediate_size: channels of all ranks.
                n_groups: groups of the model, before any are added for TP; None: not
                    known.
                num_heads: heads of all ranks.
                state_size: size of a head's state, per group.

            """
            if n_groups is None:
                return None
            inner = _tp_share(intermediate_size, tp_size)
            heads = _tp_share(num_heads, tp_size)
            groups, replicas = _tp_share(n_groups, tp_size), 1
            if n_groups == 1:
                groups, replicas = 1, tp_size
            if inner is None or heads is None or groups is None:
                return None
            bc = (groups * state_size, replicas)
            return _state_splits(((inner, 1), bc, bc), heads)

        @staticmethod
        def gated_delta_net_state_splits(
            tp_size: int,
            num_k_heads: int,
            num_v_heads: int,
            head_k_dim: int,
            head_v_dim: int,
        ) -> StateSplits | None:
            """Return the splits of a conv state [Q, K, V] and a temporal state [V heads].

            None where TP does not divide the heads.
            """
            k_heads = _tp_share(num_k_heads, tp_size)
            v_heads = _tp_share(num_v_heads, tp_size)
            if k_heads is None or v_heads is None:
                return None
            keys, values = (k_heads * head_k_dim, 1), (v_heads * head_v_dim, 1)
            return _state_splits((keys, keys, values), v_heads)

        @staticmethod
        def kda_state_splits(
            tp_size: int, num_heads: int, head_dim: int
        ) -> StateSplits | None:
            """Return the splits of a conv state [Q, K, V] and a recurrent state [heads].

            None where TP does not divide the heads.
            """
            heads = _tp_share(num_heads, tp_size)
            if heads is None:
                return None
            return _state_splits(((heads * head_dim, 1),) * 3, heads)

        @staticmethod
        def short_conv_state_splits(
            tp_size: int, intermediate_size: int
        ) -> StateSplits | None:
            """Return the split of a conv state [x], the only one.

            None where TP does not divide the channels.
            """
            channels = _tp_share(intermediate_size, tp_size)
            return None if channels is None else (_conv_split(((channels, 1),)),)

        @staticmethod
        def linear_attention_state_splits(
            tp_size: int, num_heads: int
        ) -> StateSplits | None:
            """Return the split of a state [heads], the only one.

            None where TP does not divide the heads.
            """
            heads = _tp_share(num_heads, tp_size)
            return None if heads is None else (_rows_split(heads),)
        '''
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

# The mixer overwrites `n_groups` with the number of groups that TP needs.
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

short_conv = Module("model_executor/layers/mamba/short_conv.py")
with short_conv.cls("ShortConv") as c:
    c.method(
        """
        def get_state_splits(self):
            return MambaStateShapeCalculator.short_conv_state_splits(
                tp_size=get_tensor_model_parallel_world_size(),
                intermediate_size=self.conv_dim,
            )

        """,
    )

linear = Module("model_executor/layers/mamba/linear/base.py")
with linear.cls("LinearAttention") as c:
    c.method(
        """
        def get_state_splits(self):
            return MambaStateShapeCalculator.linear_attention_state_splits(
                tp_size=self.tp_size, num_heads=self.num_heads
            )

        """,
    )

# Kimi's delta attention: each of these classes calls `kda_state_shape` alike.
_KDA_LAYERS = (
    (
        "model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py",
        "KimiGatedDeltaNetAttention",
        "",
    ),
    (
        "model_executor/models/bailing_moe_v3.py",
        "BailingMoeV3KimiDeltaAttention",
        "",
    ),
    ("models/glm5next/common/kda.py", "Glm5NextLinearAttention", "0.31.0"),
    ("models/kimi_k3/amd/kda.py", "KimiK3DeltaAttention", ""),
    ("models/kimi_k3/nvidia/kda.py", "KimiK3DeltaAttention", ""),
)
_KDA_SPLITS = """
    def get_state_splits(self):
        return MambaStateShapeCalculator.kda_state_splits(
            tp_size=self.tp_size, num_heads=self.num_heads, head_dim=self.head_dim
        )

"""

kda = []
for _path, _class, _since in _KDA_LAYERS:
    kda.append(Module(_path))
    with kda[-1].cls(_class, since=_since) as c:
        c.method(_KDA_SPLITS)

MODULES = [
    interface,
    abstract,
    calculator,
    mixer,
    mixer2,
    qwen,
    olmo,
    short_conv,
    linear,
    *kda,
]
