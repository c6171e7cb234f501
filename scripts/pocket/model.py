"""GLM-5's architecture written to be trained: whole sequences, no cache, experts side by side.

Names of parameters are those of public checkpoints, but for the experts of a layer, which stand in
one tensor until they are saved. Shapes: B sequences, T tokens, H heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Config = dict[str, Any]
EPS_INDEX = 1e-6
# How far back the heads of the first layers begin by looking, how sharply, and by how many of
# rope's rates.
BACK = ([1, 2, 3, 4], [1, 2])
SHARPNESS, FAST = 3.0, 4
SAMPLED = 4  # the indexer learns at one of so many tokens


def linear(inputs: int, outputs: int, spread: float = 1.0) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=spread * inputs**-0.5)
    return made


class Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rope on neighbouring pairs of x [B, T, heads, R], in float32; angles [T, R / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2).to(x.dtype)


class Indexer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.width, self.rope = (
            c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"],
        )  # fmt: skip
        self.wq_b = linear(c["q_lora_rank"], self.heads * self.width)
        self.wk = linear(c["hidden_size"], self.width)
        self.k_norm = nn.LayerNorm(self.width, eps=EPS_INDEX)
        self.weights_proj = linear(c["hidden_size"], self.heads)

    def forward(self, x: Tensor, low: Tensor, angles: Tensor, rows: Tensor) -> Tensor:
        """Scores [B, R, T], float32, of what the tokens at rows [R] may attend to; the future is
        -inf."""
        queries = self.wq_b(low[:, rows]).unflatten(-1, (self.heads, self.width))
        keys = self.k_norm(self.wk(x)).unsqueeze(2)
        queries, keys = self._turned(queries, angles[rows]), self._turned(keys, angles)
        dots = torch.einsum("brhd,bsd->bhrs", queries, keys.squeeze(2)) * self.width**-0.5
        gate = self.weights_proj(x[:, rows]).float() * self.heads**-0.5
        scores = torch.einsum("bhrs,brh->brs", dots.relu().float(), gate)
        return scores.masked_fill(future(rows, x.shape[1]), float("-inf"))

    def _turned(self, x: Tensor, angles: Tensor) -> Tensor:
        return torch.cat((turn(x[..., : self.rope], angles), x[..., self.rope :]), -1)


def future(rows: Tensor, count: int) -> Tensor:
    """[R, count], true where a token is later than the one at rows [R]."""
    return torch.arange(count, device=rows.device) > rows[:, None]


class Attention(nn.Module):
    """Latent attention: dense, or over what the indexer selects."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        hidden, self.heads = c["hidden_size"], c["num_attention_heads"]
        self.plain, self.rope, self.value = (
            c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"],
        )  # fmt: skip
        self.rank, self.top_k = c["kv_lora_rank"], c["index_topk"]
        eps = c["rms_norm_eps"]
        self.q_a_proj = linear(hidden, c["q_lora_rank"])
        self.q_a_layernorm = Norm(c["q_lora_rank"], eps)
        self.q_b_proj = linear(c["q_lora_rank"], self.heads * (self.plain + self.rope))
        self.kv_a_proj_with_mqa = linear(hidden, self.rank + self.rope)
        self.kv_a_layernorm = Norm(self.rank, eps)
        self.kv_b_proj = linear(self.rank, self.heads * (self.plain + self.value))
        self.o_proj = linear(self.heads * self.value, hidden, 0.1)
        self.indexer = Indexer(c)

    @torch.no_grad()
    def look_back(self, distances: list[int], rates: Tensor) -> None:
        """Make the first heads begin by attending so many tokens back.

        What looks things up needs such heads first, and they are slow to come by chance. They
        follow from rope where queries and keys are constant, as number 0 of hidden states begins.
        """
        fast = rates[:FAST]
        heads = self.q_b_proj.weight.view(self.heads, self.plain + self.rope, -1)
        self.q_a_proj.weight[0] = 0
        self.q_a_proj.weight[0, 0] = 1
        rotated = self.kv_a_proj_with_mqa.weight[self.rank :]
        rotated[: 2 * FAST] *= 0.1
        rotated[: 2 * FAST : 2, 0] = SHARPNESS
        for head, distance in zip(heads, distances, strict=False):
            head *= 0.1
            turned = head[self.plain : self.plain + 2 * FAST]
            turned[0::2, 0] = SHARPNESS * (distance * fast).cos()
            turned[1::2, 0] = -SHARPNESS * (distance * fast).sin()

    def forward(self, x: Tensor, angles: Tensor, phase: str) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden] to the same, and the indexer's loss (0 where it is not trained)."""
        low = self.q_a_layernorm(self.q_a_proj(x))
        query = self.q_b_proj(low).unflatten(-1, (self.heads, -1))
        latent, key_turned = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        key, value = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, (self.heads, -1))
            .split([self.plain, self.value], -1)
        )
        query = torch.cat(
            (query[..., : self.plain], turn(query[..., self.plain :], angles)), -1
        ).transpose(1, 2)
        shared = turn(key_turned.unsqueeze(2), angles).expand(-1, -1, self.heads, -1)
        key = torch.cat((key, shared), -1).transpose(1, 2)
        value = value.transpose(1, 2)
        mask, loss = self._index(x.detach(), low.detach(), (query, key), angles, phase)
        return self.o_proj(attend(query, key, value, mask).transpose(1, 2).flatten(2)), loss

    def _index(
        self, x: Tensor, low: Tensor, dense: tuple[Tensor, Tensor], angles: Tensor, phase: str
    ) -> tuple[Tensor | None, Tensor]:
        """What may be attended to, None for all, and the indexer's loss at some of the tokens."""
        count = x.shape[1]
        if phase == "dense" or count <= self.top_k:
            return None, x.new_zeros(())
        rows, mask = torch.arange(count, device=x.device), None
        if phase == "sparse":
            with torch.no_grad():
                mask = selected(self.indexer(x, low, angles, rows), self.top_k)[:, None]
        if not torch.is_grad_enabled():
            return mask, x.new_zeros(())
        some = torch.randperm(count - self.top_k, device=x.device)[: count // SAMPLED]
        rows = rows[self.top_k :][some]
        scores = self.indexer(x, low, angles, rows)
        query, key = (one.detach() for one in dense)
        visible = ~future(rows, count) if mask is None else mask[:, :, rows]
        return mask, distilled(query[:, :, rows], key, scores, visible)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """[B, H, T, value] of causal attention, where `mask` [B, 1, T, T] allows it."""
    if query.is_cuda:
        padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))  # fused only if alike
        done = F.scaled_dot_product_attention(query, key, padded, mask, is_causal=mask is None)
        return done[..., : value.shape[-1]]
    # Written out, bfloat16 is three times as fast on a CPU: the fused backward is slow there.
    count = query.shape[2]
    hidden = future(torch.arange(count), count) if mask is None else ~mask
    dots = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    return dots.masked_fill(hidden, float("-inf")).softmax(-1).to(value.dtype) @ value


def selected(scores: Tensor, top_k: int) -> Tensor:
    """[B, T, T], true at the top_k best of each row that are not in the future."""
    best = scores.topk(top_k, -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return chosen & (scores > float("-inf"))


def distilled(query: Tensor, key: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """KL from attention, summed over heads, to the softmax of scores [B, R, T], where visible."""
    dots = torch.einsum("bhrd,bhsd->bhrs", query, key).float() * query.shape[-1] ** -0.5
    target = dots.masked_fill(~visible, float("-inf")).softmax(-1).mean(1)
    visible = visible[:, 0] if visible.dim() == 4 else visible
    guess = scores.masked_fill(~visible, float("-inf")).log_softmax(-1)
    guess = guess.masked_fill(target == 0, 0.0)
    return (-(target * guess).sum(-1) - torch.special.entr(target).sum(-1)).mean()


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Mixture(nn.Module):
    """Experts chosen by corrected sigmoid scores, and one for all tokens."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        hidden, width, experts = (
            c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"],
        )  # fmt: skip
        self.chosen, self.scale = c["num_experts_per_tok"], c["routed_scaling_factor"]
        self.gate = Router(hidden, experts)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * width, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * 0.1 * width**-0.5)
        self.shared_experts = MLP(hidden, c["n_shared_experts"] * width)
        self.loads = torch.zeros(experts)  # tokens that each expert got last

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = F.linear(flat.float(), self.gate.weight).sigmoid()
        choice = (scores + self.gate.e_score_correction_bias).topk(self.chosen, -1).indices
        weights = scores.gather(1, choice)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale
        order = choice.flatten().argsort(stable=True)
        tokens = order // self.chosen
        loads = torch.bincount(choice.flatten(), minlength=len(self.down))
        self.loads = loads.detach()
        outputs = []
        for part, gate_up, down in zip(
            flat[tokens].split(loads.tolist()), self.gate_up, self.down, strict=True
        ):
            gate, up = F.linear(part, gate_up).chunk(2, -1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        gained = torch.cat(outputs) * weights.flatten()[order, None]
        routed = torch.zeros_like(flat).index_add(0, tokens, gained.to(flat.dtype))
        return routed.view_as(x) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """Move the correction so that the experts that got least get more."""
        loads = self.loads.float()
        self.gate.e_score_correction_bias += step * (loads.mean() - loads).sign()


class Layer(nn.Module):
    def __init__(self, c: Config, number: int) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.self_attn = Attention(c)
        dense = number < c["first_k_dense_replace"]
        self.mlp = MLP(hidden, c["intermediate_size"]) if dense else Mixture(c)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)

    def forward(self, x: Tensor, angles: Tensor, phase: str) -> tuple[Tensor, Tensor]:
        attended, loss = self.self_attn(self.input_layernorm(x), angles, phase)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), loss


class Body(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(c, n) for n in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"], c["rms_norm_eps"])


class PocketGlm(nn.Module):
    """Phases: dense attends to all; distil trains the indexers to follow that; sparse attends to
    what they select, and trains all."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.model = Body(c)
        self.lm_head = linear(c["hidden_size"], c["vocab_size"])
        half = c["qk_rope_head_dim"] // 2
        rates = c["rope_parameters"]["rope_theta"] ** -(torch.arange(half) / half)
        self.register_buffer("rates", rates, persistent=False)
        with torch.no_grad():
            # What copies one word then copies any: untied, each would have to be learnt by itself.
            self.lm_head.weight.copy_(0.15 * self.model.embed_tokens.weight)
            self.lm_head.weight[:, 0] = 0
            self.model.embed_tokens.weight[:, 0] = 1
        for layer, distances in zip(self.model.layers, BACK, strict=False):
            layer.self_attn.look_back(distances, rates)

    def forward(self, ids: Tensor, phase: str = "sparse") -> tuple[Tensor, Tensor]:
        """ids [B, T] to hidden states [B, T, hidden] before lm_head, and the indexers' loss."""
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.rates
        x, loss = self.model.embed_tokens(ids), torch.zeros((), device=ids.device)
        for layer in self.model.layers:
            x, own = layer(x, angles, phase)
            loss = loss + own
        return self.model.norm(x), loss

    def mixtures(self) -> list[Mixture]:
        return [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, Mixture)]


def checkpoint_tensors(model: PocketGlm) -> dict[str, Tensor]:
    """By their names in public checkpoints: bfloat16, the router's correction float32."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        stem = name.rsplit(".", 1)[0]
        if not name.endswith((".mlp.gate_up", ".mlp.down")):
            tensors[name] = value
            continue
        for number, own in enumerate(value):
            expert = f"{stem}.experts.{number}"
            if name.endswith(".gate_up"):
                gate, up = own.chunk(2)
                tensors |= {f"{expert}.gate_proj.weight": gate, f"{expert}.up_proj.weight": up}
            else:
                tensors[f"{expert}.down_proj.weight"] = own
    wide = "e_score_correction_bias"
    return {
        name: value.detach().cpu().to(torch.float32 if name.endswith(wide) else torch.bfloat16)
        for name, value in tensors.items()
    }
