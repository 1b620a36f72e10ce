"""Fake of FlashInfer's interface (0.7.2) over torch, for machines without a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class FakeFlashInfer:
    """Stand-in for the module. Wrappers keep the tensors of their plan, as FlashInfer does, so reuse is noticed."""

    def __init__(self) -> None:
        self.num_runs = 0

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Tensor, kv_layout: str) -> FakeWrapper:
        assert kv_layout == "HND" and workspace.dtype is torch.uint8
        return FakeWrapper(self)


class FakeWrapper:
    def __init__(self, library: FakeFlashInfer) -> None:
        self._library = library
        self._plan: tuple[Any, ...] | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        rows = qo_indptr, paged_kv_indptr, paged_kv_last_page_len
        assert causal and q_data_type == kv_data_type and num_qo_heads % num_kv_heads == 0
        assert all(of.device.type == "cpu" and of.dtype is torch.int32 for of in rows), (
            "plan arguments on the device would cause a sync"
        )
        assert paged_kv_indices.dtype is torch.int32 and len(paged_kv_indices) == paged_kv_indptr[-1]
        assert (paged_kv_last_page_len >= 1).all() and (paged_kv_last_page_len <= page_size).all()
        self._plan = (
            *(of.tolist() for of in rows),
            paged_kv_indices,
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
        )

    def run(self, q: Tensor, paged_kv_cache: Tensor, *, out: Tensor) -> Tensor:
        assert self._plan and q.is_contiguous()
        begins, kv_begins, last_lens, pages, num_heads, num_kv_heads, dim, page_size = self._plan
        assert q.shape == (begins[-1], num_heads, dim) and paged_kv_cache.shape[1:] == (2, num_kv_heads, page_size, dim)
        for row, (begin, end) in enumerate(pairwise(begins)):
            first, last = kv_begins[row], kv_begins[row + 1]
            num_keys = (last - first - 1) * page_size + last_lens[row]
            kv_2KLD = paged_kv_cache[pages[first:last].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys]
            k_HLD, v_HLD = kv_2KLD.repeat_interleave(num_heads // num_kv_heads, dim=1)
            at_T = torch.arange(num_keys - (end - begin), num_keys)
            hidden_TL = torch.arange(num_keys) > at_T[:, None]
            scores_HTL = (q[begin:end].transpose(0, 1) @ k_HLD.transpose(1, 2)) * dim**-0.5
            weights_HTL = scores_HTL.masked_fill(hidden_TL, -torch.inf).softmax(dim=-1)
            out[begin:end] = (weights_HTL @ v_HLD).transpose(0, 1)
        self._library.num_runs += 1
        return out
