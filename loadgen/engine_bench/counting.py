"""Operations, bytes and fits: the arithmetic behind the figures. Pure."""

from __future__ import annotations

import msgspec
import numpy as np


def product_flops(rows: int, in_features: int, out_features: int) -> int:
    """A multiplication and an addition for each weight and row."""
    return 2 * rows * in_features * out_features


def causal_attention_flops(tokens: int, layers: int, query_heads: int, head_dim: int) -> int:
    """Of a prompt's first `tokens`: token i looks at i + 1 keys and as many values, which is half of all pairs."""
    pairs = tokens * (tokens + 1) // 2
    return layers * query_heads * pairs * 2 * (2 * head_dim)


class Fit(msgspec.Struct, frozen=True):
    """A straight line through points by least squares. `worst` is the largest residual as a share of its value."""

    slope: float
    intercept: float
    worst: float


def fit_line(x: list[float], y: list[float]) -> Fit:
    slope, intercept = np.polyfit(x, y, 1)
    residuals = np.abs(np.polyval((slope, intercept), x) - y) / np.abs(y)
    return Fit(float(slope), float(intercept), float(residuals.max()))
