"""Triton backend of routing: a token a program, top-k by repeated maximum, ties to the lowest."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from detour.ops.device import Device
from detour.ops.op import Need
from detour.ops.routing import RoutingRule, routing
from detour.ops.triton_device import triton_reasons


@triton.jit
def choose(
    logits, bias, weights, experts, scale,
    E: tl.constexpr, EB: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, NORMALISE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, EB)
    mask = at < E
    low = float("-inf")
    value = tl.load(logits + token * E + at, mask=mask, other=low).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        score = tl.exp(value - tl.max(value, 0))
        score = score / tl.sum(score, 0)
    choice = score
    if BIASED:
        choice = score + tl.load(bias + at, mask=mask, other=0.0)
    choice = tl.where(mask, choice, low)
    if GROUPS > 1:
        group = at // (E // GROUPS)
        allowed = tl.zeros((EB,), tl.int32)
        worth = tl.full((EB,), low, tl.float32)  # every expert holds the worth of its group
        for number in tl.static_range(GROUPS):
            inside = tl.where(group == number, choice, low)
            best = tl.max(inside, 0)
            again = tl.where(at == tl.argmax(inside, 0), low, inside)
            worth = tl.where((group == number) & mask, best + tl.max(again, 0), worth)
        for _ in tl.static_range(TOP_GROUPS):
            chosen = tl.argmax(worth, 0) // (E // GROUPS)
            allowed = tl.where(group == chosen, 1, allowed)
            worth = tl.where(group == chosen, low, worth)
        choice = tl.where(allowed == 1, choice, low)
    place = tl.arange(0, TOP_P)
    picked = tl.zeros((TOP_P,), tl.int32)
    picked_score = tl.zeros((TOP_P,), tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.argmax(choice, 0)
        picked = tl.where(place == j, best, picked)
        picked_score = tl.where(
            place == j, tl.sum(tl.where(at == best, score, 0.0), 0), picked_score
        )
        choice = tl.where(at == best, low, choice)
    if NORMALISE:
        picked_score = picked_score / (tl.sum(picked_score, 0) + 1e-20)
    tl.store(weights + token * TOP_K + place, picked_score * scale, mask=place < TOP_K)
    tl.store(experts + token * TOP_K + place, picked.to(tl.int64), mask=place < TOP_K)


def reasons(device: Device, need: Need) -> list[str]:
    found = triton_reasons(device)
    if need["experts"] > 4096:
        found.append(f"{need['experts']} experts are more than a program holds")
    return found


@routing.backend("triton", reasons=reasons, rank=10)
def run(logits: Tensor, bias: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    tokens, count = logits.shape
    weights = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=logits.device)
    if tokens:
        choose[(tokens,)](
            logits, bias, weights, experts, rule.scale,
            E=count, EB=triton.next_power_of_2(count), TOP_K=rule.top_k,
            TOP_P=triton.next_power_of_2(rule.top_k), SIGMOID=rule.scoring == "sigmoid",
            BIASED=len(bias) > 0, NORMALISE=rule.normalise, GROUPS=rule.groups,
            TOP_GROUPS=rule.top_groups, num_warps=1 if count <= 512 else 4,
        )  # fmt: skip
    return weights, experts
