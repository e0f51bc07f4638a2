"""Losses of given tokens, for supervised fine-tuning: one number per token out. No mask, no mean."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(logp_cur: Tensor) -> Tensor:
    """-log pi_cur. [B,T] -> [B,T]"""
    return -logp_cur


def dft(logp_cur: Tensor) -> Tensor:
    """-sg(pi_cur) log pi_cur: tokens the policy finds unlikely pull less. [B,T] -> [B,T]. DFT, arXiv:2508.05629."""
    return -logp_cur.detach().exp() * logp_cur
