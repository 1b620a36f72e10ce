"""ctypes structs and enums of the C++ sources, with the same names and fields; documented in the named headers."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum

import numpy as np
import torch


class Step(ctypes.Structure):
    """Arguments shared by all calls of a run; see team.h."""

    _fields_ = (
        ("tokens", c_int64),
        ("undrafted", c_int64),
        ("sequences", c_int64),
        ("table_width", c_int64),
        ("slots", c_void_p),
        ("angles", c_void_p),
        ("tables", c_void_p),
        ("query_lens", c_void_p),
        ("context_lens", c_void_p),
        ("state_reads", c_void_p),
        ("state_writes", c_void_p),
        ("window_slots", c_void_p),
        ("window_tables", c_void_p),
        ("window_width", c_int64),
        ("threads", c_int32),
    )


class Angles(ctypes.Structure):
    """Cosines and sines of one kind of rotation; see team.h."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("pairs", c_int64))


class Kind(IntEnum):
    """Operation of a call, the first field of every call struct; see team.h."""

    MULTIPLY_BF16 = 0
    MULTIPLY_INT8 = 1
    MULTIPLY_FEW_BITS = 2
    ROTATE = 3
    ATTEND = 4
    ADD_NORM = 5
    CONVOLVE = 6
    RECUR = 7
    GATED_NORM = 8


class FormatName(IntEnum):
    """Storage format of a low-bit matrix; see formats.h.

    INT4, INT8: codes with a zero per group. F32: scales in fp32, otherwise fp16. LEVELS: any 16 numbers, such as NF4.
    """

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7
    INT4 = 8
    INT4_F32 = 9
    INT8 = 10
    INT8_F32 = 11
    NVFP4 = 12
    MXFP4 = 13
    LEVELS = 14
    FP8 = 15
    MXFP8 = 16


class Norm(ctypes.Structure):
    """RMS norm; see norm.h."""

    _fields_ = (("weight", c_void_p), ("eps", c_float), ("rounds_late", c_int32))


class ProductCall(ctypes.Structure):
    """Matrix product; see product.h."""

    _fields_ = (
        ("kind", c_int32),
        ("format", c_int32),
        ("span", c_int32),
        ("group", c_int32),
        ("levels", c_void_p),
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("order", c_void_p),
        ("before", c_int32),
        ("norm", Norm),
        ("alpha", c_float),
        ("limit", c_float),
        ("features", c_int64),
        ("x", c_void_p),
        ("residual", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("is_wide", c_int32),
        ("tile_rows", c_int64),
    )


class StoredRows(ctypes.Structure):
    """Rows to dequantize; see few_bits.h."""

    _fields_ = (
        ("format", c_int32),
        ("span", c_int32),
        ("group", c_int32),
        ("panels", c_void_p),
        ("levels", c_void_p),
        ("factors", c_void_p),
        ("inputs", c_int64),
        ("count", c_int64),
        ("rows", c_void_p),
        ("out", c_void_p),
    )


class Coding(IntEnum):
    """Encoding of codes in a pool or payload; see pool.h."""

    PLAIN = 0
    E4M3 = 1
    INT8 = 2
    INT4 = 3

    @classmethod
    def of(cls, dtype: torch.dtype) -> Coding:
        return _CODINGS.get(dtype, cls.PLAIN)


_CODINGS = {torch.float8_e4m3fn: Coding.E4M3, torch.int8: Coding.INT8, torch.uint8: Coding.INT4}


class PoolView(ctypes.Structure):
    """View of a KV pool; see pool.h."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("coding", c_int32),
        ("is_windowed", c_int32),
        ("kv_heads", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
    )


class Basis(ctypes.Structure):
    """Matrices of a layer's KV heads; see basis.h."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p), ("queries", c_void_p), ("outputs", c_void_p))


class RotaryCall(ctypes.Structure):
    """Norm, rotation and KV store; see rotary.h."""

    _fields_ = (
        ("kind", c_int32),
        ("pool", PoolView),
        ("heads", c_void_p),
        ("q_norm", Norm),
        ("k_norm", Norm),
        ("v_norm", Norm),
        ("q_heads", c_int64),
        ("rope", c_int64),
        ("stores", c_int32),
        ("has_gates", c_int32),
        ("basis", Basis),
    )


class AttentionCall(ctypes.Structure):
    """Attention call; see pieces.h."""

    _fields_ = (
        ("kind", c_int32),
        ("pool", PoolView),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("has_gates", c_int32),
        ("out", c_void_p),
        ("q_heads", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("chunk", c_int64),
        ("by_tiles", c_int32),
        ("output_basis", c_void_p),
    )


class AddNormCall(ctypes.Structure):
    """Norm of an update, and its addition to the residual stream; see norm.h."""

    _fields_ = (("kind", c_int32), ("norm", Norm), ("update", c_void_p), ("x", c_void_p), ("features", c_int64))


class ConvCall(ctypes.Structure):
    """Causal convolution; see causal_conv.h."""

    _fields_ = (
        ("kind", c_int32),
        ("is_fp32", c_int32),
        ("activates", c_int32),
        ("x", c_void_p),
        ("before", c_void_p),
        ("after", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("channels", c_int64),
        ("width", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("states", c_void_p),
        ("state_stride", c_int64),
    )


class RecurrenceCall(ctypes.Structure):
    """Recurrence of a matrix per head; see recurrence.h."""

    _fields_ = (
        ("kind", c_int32),
        ("is_fp32", c_int32),
        ("is_delta", c_int32),
        ("rows", c_void_p),
        ("row_stride", c_int64),
        ("dt", c_void_p),
        ("dt_stride", c_int64),
        ("beta", c_void_p),
        ("beta_stride", c_int64),
        ("rates", c_void_p),
        ("dt_bias", c_void_p),
        ("skips", c_void_p),
        ("min_dt", c_float),
        ("max_dt", c_float),
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("query_offset", c_int64),
        ("key_offset", c_int64),
        ("value_offset", c_int64),
        ("out", c_void_p),
        ("states", c_void_p),
        ("state_stride", c_int64),
    )


class GatedNormCall(ctypes.Structure):
    """Gated RMS norm of groups; see gated_norm.h."""

    _fields_ = (
        ("kind", c_int32),
        ("is_fp32", c_int32),
        ("gates_first", c_int32),
        ("shares_weight", c_int32),
        ("eps", c_float),
        ("x", c_void_p),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("weight", c_void_p),
        ("groups", c_int64),
        ("dim", c_int64),
        ("out", c_void_p),
    )


Call = ProductCall | RotaryCall | AttentionCall | AddNormCall | ConvCall | RecurrenceCall | GatedNormCall


class Wire(ctypes.Structure):
    """Transfer between pool and payload; see wire.h."""

    # Keeps the tensors alive that the struct points to.
    tensors: tuple[object, ...]

    _fields_ = (
        ("pool", PoolView),
        ("coding", c_int32),
        ("row_bytes", c_int64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("slots", c_void_p),
        ("tokens", c_int64),
        ("first_head", c_int64),
        ("heads", c_int64),
    )


class Payload(ctypes.Structure):
    """Payload to checksum; see wire.h."""

    _fields_ = (("bytes", c_void_p), ("num_words", c_int64), ("sum", c_uint64))


class DraftDraws(ctypes.Structure):
    """Drawing of draft tokens; see draft_draws.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_int64),
        ("vocabulary", c_int64),
        ("kinds", c_void_p),
        ("temperatures", c_void_p),
        ("numbers", c_void_p),
        ("is_drawn", c_int32),
        ("tokens", c_void_p),
        ("shares", c_void_p),
        ("threads", c_int32),
    )


class TokenChoices(ctypes.Structure):
    """Choice of tokens; see choice.h. `row` is the address of an array of CHOICE_ROW."""

    _fields_ = (("row", c_void_p), ("rows", c_int64), ("vocabulary", c_int64), ("threads", c_int32))


CHOICE_ROW = np.dtype([("logits", np.int64), ("penalties", np.int64), ("greatest", np.int64), ("most", np.float64)])
