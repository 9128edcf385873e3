"""Linear layers whose rows do not depend on how many rows there are, where the machine allows it.

Greedy speculation is identical to plain decoding only if a token's logits are the same bits whether
it is computed alone or among the rows of a verification. Ordinary GEMM libraries choose another
reduction order for one row than for seven.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from vegas_ops.models import fused

# oneDNN splits longer reductions differently for different row counts.
_MAX_REDUCTION = 1024
# The packing hint; measured: blockings for 4 rows and more serve every row count alike.
_PACK_ROWS = 8
# Row count that `fixed_rows` layers always compute.
_FIXED_ROWS = 64


class Linear:
    """`x @ weight.T + bias`, and optionally `+ residual`, or over an RMSNorm of x, for inference.

    On the CPU in fp32 and bf16 the weight is packed once for oneDNN (about twice as fast as
    `F.linear`, which packs in every call) in slices of at most 1,024 input features. On a
    GPU few rows go through the kernels of `fused`, the others through `F.linear`. `fixed_rows=True`
    insists: where the layer would not treat rows alike, it computes tiles of 64 rows, or always 64 rows,
    padded, so that the library picks the same kernel for every row count.

    weight: (out_features, in_features). bias: (out_features,) or None. The weight is not kept when
    it could be packed.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, fixed_rows: bool = False
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.fixed_rows = fixed_rows
        self._cuts: list[int] = []  # between slices of input features
        self._packed: list[torch.Tensor] = []
        self._weight: torch.Tensor | None = None
        if not self._pack(weight) or (fixed_rows and not self.is_row_invariant()):
            self._packed, self._weight = [], weight.contiguous()

    @property
    def packed(self) -> bool:
        return self._weight is None

    def _pack(self, weight: torch.Tensor) -> bool:
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        slices = -(-self.in_features // _MAX_REDUCTION)
        width = -(-self.in_features // slices // 64) * 64  # whole cache lines
        self._cuts = list(range(width, self.in_features, width))
        try:
            self._packed = [
                torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _PACK_ROWS)
                for part in weight.tensor_split(self._cuts, dim=1)
            ]
            self(weight.new_zeros(1, self.in_features), weight.new_zeros(1, self.out_features))
        except (AttributeError, RuntimeError):  # a dtype or a torch without this path
            self._packed = []
            return False
        return True

    def _fused(self, x: torch.Tensor, logits: bool = False) -> bool:
        if self.bias is not None or not fused.available(x):
            return False
        return self._serves(x, self.in_features, logits)

    def _serves(self, x: torch.Tensor, in_features: int, logits: bool = False) -> bool:
        return fused.serves(None if self.fixed_rows else x.shape[0], in_features, logits)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: (rows, in_features) -> (rows, out_features); the result may lie in `residual`'s memory."""
        if self._weight is not None:
            if self._fused(x):
                return fused.linear(x, self._weight, residual=residual, fixed=self.fixed_rows)
            if residual is not None and self.bias is None and not self.fixed_rows:
                return residual.addmm_(x, self._weight.t())  # one kernel instead of two
            out = self._fixed(x) if self.fixed_rows else F.linear(x, self._weight, self.bias)
            return out if residual is None else out + residual
        pointwise = torch.ops.mkldnn._linear_pointwise
        if len(self._packed) == 1:
            if residual is None:
                return pointwise(x, self._packed[0], self.bias, "none", [], "")
            return pointwise.binary(x, residual, self._packed[0], self.bias, "add")
        parts = x.tensor_split(self._cuts, dim=1)
        out = pointwise(parts[0], self._packed[0], self.bias, "none", [], "")
        for part, weight in zip(parts[1:], self._packed[1:], strict=True):
            out = pointwise.binary(part, out, weight, None, "add")
        return out if residual is None else out + residual

    def then_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, fused.Scaled | None]:
        """`self(x, residual)`; and, where it saves a launch, what `of_norm` of a layer behind it that has
        the same `fixed_rows` takes for the RMSNorm with the weight `norm` (None: there is none)."""
        sizes = (self.in_features, self.out_features)
        apart = all(fused.norms_apart(size) and self._serves(x, size) for size in sizes)
        if norm is None or self._weight is None or not apart or not self._fused(x):
            return self(x, residual), None
        return fused.scaling_linear(x, self._weight, residual, norm, fixed=self.fixed_rows)

    def of_norm(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, gated: bool = False,
        scaled: fused.Scaled | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The layer over RMSNorm(x) with the weight `norm`; gated: SiLU of the first half of its output
        features times the second half; scaled: of x, if `then_norm` gave it."""
        if self._weight is not None and self._fused(x):
            rows = x if scaled is None else scaled
            return fused.linear(rows, self._weight, norm=norm, eps=eps, gated=gated, fixed=self.fixed_rows)
        out = self(fused.rms_norm(x, norm, eps))
        return fused.gate(out) if gated else out

    def rotated(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, head_norm: torch.Tensor, rope: torch.Tensor,
        positions: torch.Tensor, target: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """Of a layer that gives queries, keys and values: the queries of RMSNorm(x), after QK-norm and RoPE,
        with K and V in the cache (`fused.rotated_heads`); None where one kernel does not do all that."""
        if self._weight is None or target is None or not self._fused(x):
            return None
        if not fused.joins(self.in_features, head_norm.shape[1], x.device):
            return None
        return fused.rotated_heads(
            x, self._weight, norm, head_norm, rope, positions, eps, target, self.fixed_rows
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output in fp32, where the machine allows it without a rounding in between."""
        if self._weight is not None and self._fused(x, logits=True):
            return fused.linear(x, self._weight, dtype=torch.float32, fixed=self.fixed_rows)
        plain = self.bias is None and not self.fixed_rows and x.dtype != torch.float32
        if self._weight is not None and x.is_cuda and plain:
            return torch.mm(x, self._weight.t(), out_dtype=torch.float32)  # no launch to cast many logits
        return self(x).float()

    def _fixed(self, x: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None
        rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -rows % _FIXED_ROWS))
        parts = [F.linear(part, self._weight, self.bias) for part in padded.split(_FIXED_ROWS)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[:rows]

    def is_row_invariant(self) -> bool:
        """Whether the first rows come out the same, to the bit, among 1, 2, 7, 8, 40 and 112
        rows.

        A probe, not a proof: it runs the layer on random data on this machine.
        """
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(112, self.in_features, generator=generator)
        like = self._packed[0] if self.packed else self._weight
        assert like is not None
        x = x.to(device=like.device, dtype=like.dtype)
        whole = self(x)
        return all(torch.equal(self(x[:rows]), whole[:rows]) for rows in (1, 2, 7, 8, 40))
