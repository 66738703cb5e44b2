"""The components of a block: the norms, the value path, the feed-forward, and their order.

Every TransformerLens block is described by these equations:

    attention_out = O(pattern @ V(N1(x)))            value path
    mid           = Q1(x + s P1(attention_out))      attention branch
    feed_forward  = F(N2(mid))                       or F(N2(x)) if the branches are parallel
    post          = Q2(mid + s P2(feed_forward))     feed-forward branch

N, P and Q are norms or the identity. A pre-norm block has N1 and N2 alone, a post-norm one Q1 and Q2, a
sandwich block N and P, and a block with branch norms P alone (OLMo 2). s is the residual multiplier
(Granite). A decoder block of an encoder-decoder has the cross-attention branch between the two. An anatomy is
used only if `lens_mix._verification.verify` can rebuild the block's recorded output from it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, cast

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from lens_mix._classes.offloading import is_offloaded, load_offloaded
from lens_mix.hooks.mixing import tolerance

Placement = Literal["pre", "post", "sandwich", "branch", "none"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    # BLOOM rounds the constant of the tanh approximation to eight digits, which makes a difference of 1e-9.
    "gelu_tanh_bloom": lambda x: x / 2 * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),
    "silu": functional.silu,
    "relu": functional.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu_squared": lambda x: functional.relu(x).square(),
    "identity": lambda x: x,
}
# These are not smooth: their first or second derivative jumps at 0.
WITH_KINK = frozenset({"relu", "relu_squared"})

T = TypeVar("T")


def constant(compute: Callable[[Any], T]) -> functools.cached_property[T]:
    """Return a property that is computed when it is first read, and that autograd treats as a constant.

    It is computed outside of inference mode, because autograd can't use tensors that were created inside.
    """

    @functools.wraps(compute)
    def compute_without_autograd(owner: Any) -> T:
        with torch.inference_mode(False), torch.no_grad():
            return compute(owner)

    return functools.cached_property(compute_without_autograd)


@dataclasses.dataclass(frozen=True)
class Norm:
    """LayerNorm or RMSNorm; weight and bias are None if absent (folded, or never learned)."""

    kind: Literal["layer", "rms"]
    weight: Float[Tensor, " d_model"] | None
    bias: Float[Tensor, " d_model"] | None
    eps: float

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        """Return the number that the (centered) vector is divided by."""
        # The vector norm needs no tensor of squares, whose sum could overflow float16.
        length: Tensor = torch.linalg.vector_norm(self._centered(x), dim=-1, keepdim=True)
        return ((length / math.sqrt(x.shape[-1])).square() + self.eps).sqrt()

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the output of the norm."""
        out = self._centered(x) / self.scale(x)
        return _plus(out if self.weight is None else out * self.weight.to(x.dtype), self.bias)

    def linear_at(self, state: Float[Tensor, "*batch d_model"]) -> LinearNorm:
        """Return the norm with the scale that it has at a state: a linear map, without the bias."""
        return LinearNorm(self, state)

    def linear_part(self, vectors: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the vectors, centered (LayerNorm) and times the weight, but not divided by a scale."""
        weight = None if self.weight is None else self.weight.detach().to(vectors.dtype)
        if self.kind == "layer":
            centered = self._centered(vectors)
            return centered if weight is None else centered.mul_(weight)
        return vectors if weight is None else vectors * weight

    def _centered(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.kind == "layer" else x


Chain = tuple[Norm, ...]  # Norms whose linear parts are applied to vectors, in this order.


def through(chain: Chain, vectors: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
    """Return vectors after the linear parts of several norms, one after another."""
    for norm in chain:
        vectors = norm.linear_part(vectors)
    return vectors


@dataclasses.dataclass(frozen=True, eq=False)
class LinearNorm:
    """A norm that always divides by its scale at one state; it is linear and differentiable.

    Attributes:
        norm: The norm; None for the identity.
        state: The state that determines the scale, usually the norm's input in the clean pass.
    """

    norm: Norm | None
    state: Float[Tensor, "*batch d_model"]

    @constant
    def scale(self) -> Float[Tensor, "*batch 1"]:
        """Return the number that it divides by; 1 for the identity."""
        return torch.ones_like(self.state[..., :1]) if self.norm is None else self.norm.scale(self.state)

    @property
    def bias(self) -> Float[Tensor, " d_model"] | None:
        """The norm's bias, which the results do not include; the caller adds it."""
        return None if self.norm is None else self.norm.bias

    def __call__(
        self, vectors: Float[Tensor, "*batch d_model"], rows: slice = slice(None)
    ) -> Float[Tensor, "*batch d_model"]:
        """Return γ ⊙ (v - mean v) / scale (RMSNorm does not center).

        Args:
            vectors: The state, or shares or changes of it; an additional axis has several vectors per row.
            rows: The rows of the vectors, on the second axis of the state.
        """
        if self.norm is None:
            return vectors
        scale = self.scale if rows == slice(None) else self.scale[:, rows]
        scale = scale if vectors.ndim == scale.ndim else scale[..., None, :]
        out = self.norm.linear_part(vectors)
        return out / scale if out is vectors else out.div_(scale)

    def transposed(self, directions: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the directions d' with d' · v = d · norm(v) for all vectors v."""
        if self.norm is None:
            return directions
        if self.norm.weight is not None:
            directions = directions * self.norm.weight.detach().to(directions.dtype)
        if self.norm.kind == "layer":
            directions = directions - directions.mean(-1, keepdim=True)
        return directions / self.scale


@dataclasses.dataclass(frozen=True)
class ValuePath:
    """The value and output matrices; W_V has as many heads as the value hook (fewer if grouped)."""

    W_V: Float[Tensor, "value_head d_model d_head"]
    b_V: Float[Tensor, "value_head d_head"] | None
    W_O: Float[Tensor, "head d_head d_model"]
    b_O: Float[Tensor, " d_model"] | None

    def values(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch value_head d_head"]:
        """Return the value vectors of normalized inputs."""
        axes = "... d_model, head d_model d_head -> ... head d_head"
        return _plus(einsum(x, self.W_V.to(x.dtype), axes), self.b_V)

    def project(self, z: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch d_model"]:
        """Return the attention's output from mixed values, with b_O."""
        return _affine(z.flatten(-2), self.W_O.flatten(0, 1), self.b_O)


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """The feed-forward, plain or gated.

    plain: act(x W_in + b_in) W_out + b_out
    gated: (act(x W_gate + b_gate) * (x W_in + b_in) + b_hidden) W_out + b_out
    """

    activation: str
    W_in: Float[Tensor, "d_model d_mlp"]
    W_out: Float[Tensor, "d_mlp d_model"]
    W_gate: Float[Tensor, "d_model d_mlp"] | None = None
    b_in: Float[Tensor, " d_mlp"] | None = None
    b_gate: Float[Tensor, " d_mlp"] | None = None
    b_hidden: Float[Tensor, " d_mlp"] | None = None
    b_out: Float[Tensor, " d_model"] | None = None

    @property
    def input_matrices(self) -> list[Float[Tensor, "d_model d_mlp"]]:
        """W_gate, if there is one, and W_in."""
        return [self.W_in] if self.W_gate is None else [self.W_gate, self.W_in]

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """Return the feed-forward's output from its input."""
        return self.output(self.pre_activations(x))

    def pre_activations(self, x: Float[Tensor, "*batch d_model"]) -> list[Float[Tensor, "*batch d_mlp"]]:
        """Return x times each of `input_matrices`, with biases."""
        up = _affine(x, self.W_in, self.b_in)
        return [up] if self.W_gate is None else [_affine(x, self.W_gate, self.b_gate), up]

    def output(self, pre_activations: list[Float[Tensor, "*batch d_mlp"]]) -> Float[Tensor, "*batch d_model"]:
        """Return the feed-forward's output from its pre-activations."""
        first, *gated = pre_activations
        hidden = ACTIVATIONS[self.activation](first)
        for up in gated:
            hidden = hidden * up
        return _affine(_plus(hidden, self.b_hidden), self.W_out, self.b_out)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _plus(x @ weight.to(x.dtype), bias)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


@dataclasses.dataclass(frozen=True)
class BlockAnatomy:
    """One block's components and their order (see the module's docstring for the equations).

    Attributes:
        placement: The places of the norms.
        parallel: Whether the feed-forward reads the block's input instead of the middle of the block.
        value_path: The value and output matrices. None if they are not known.
        attention_input, attention_branch, attention_residual: The norms before the attention, on its branch
            and on the residual stream after it: N1, P1 and Q1 of the module's docstring. None: there is none.
        feed_forward_input, feed_forward_branch, feed_forward_residual: The same for the feed-forward: N2, P2
            and Q2.
        cross_input, cross_residual: The norms before the cross-attention and on the residual stream after it.
        feed_forward: None if the block has none, or one that has another form.
        feed_forward_kind: "plain", "gated", "mixture", "opaque" (unknown), "offloaded" (its weights can't be
            read) or "none".
        cross: Whether a cross-attention branch is between the two.
        before: The norm after the self-attention, for an anatomy made by `by_cross_attention`; else None.
        residual_multiplier: The factor of the branches before they are added to the residual stream.
    """

    placement: Placement
    parallel: bool
    value_path: ValuePath | None
    feed_forward: FeedForward | None
    feed_forward_kind: str
    attention_input: Norm | None = None
    attention_branch: Norm | None = None
    attention_residual: Norm | None = None
    cross_input: Norm | None = None
    cross_residual: Norm | None = None
    feed_forward_input: Norm | None = None
    feed_forward_branch: Norm | None = None
    feed_forward_residual: Norm | None = None
    cross: bool = False
    before: Norm | None = None
    residual_multiplier: float = 1.0

    def by_cross_attention(self) -> BlockAnatomy:
        """Return the anatomy of the block from its cross-attention on, which is then its attention.

        It starts at the residual stream after the self-attention (`entered`), and its keys are the encoder's
        outputs. `value_path` has to be the cross-attention's.
        """
        return dataclasses.replace(
            self,
            cross=False,
            before=self.attention_residual,
            attention_input=None,
            attention_residual=self.cross_residual,
            cross_input=None,
            cross_residual=None,
        )

    def entered(self, x: Tensor, self_attention_out: Tensor) -> Tensor:
        """Return the residual stream that the cross-attention's branch is added to (`by_cross_attention`)."""
        return _apply(self.before, x + self_attention_out * self.residual_multiplier)

    def after_attention(self, x: Tensor, attention_out: Tensor, cross_out: Tensor | None = None) -> Tensor:
        """Return the residual stream after the attention branch and any cross-attention branch."""
        mid = _apply(self.attention_residual, self.attention_sum(x, attention_out))
        return mid if cross_out is None else _apply(self.cross_residual, mid + cross_out)

    def attention_sum(self, x: Tensor, attention_out: Tensor) -> Tensor:
        """Return the sum of the residual stream and the attention branch, before any norm on it."""
        branch = _apply(self.attention_branch, attention_out) * self.residual_multiplier
        # Value Zeroing computes a branch that has a norm in a wider dtype.
        return x + branch.to(x.dtype)

    def feed_forward_in(self, x: Tensor, mid: Tensor) -> Tensor:
        """Return the feed-forward's input, after its norm."""
        return _apply(self.feed_forward_input, x if self.parallel else mid)

    def after_feed_forward(self, mid: Tensor, feed_forward_out: Tensor | None) -> Tensor:
        """Return the block's output from the feed-forward's."""
        if feed_forward_out is None:
            return mid
        return _apply(self.feed_forward_residual, mid + self.feed_forward_added(feed_forward_out))

    def feed_forward_added(self, feed_forward_out: Tensor) -> Tensor:
        """Return the vector that the feed-forward's branch adds to the residual stream."""
        return _apply(self.feed_forward_branch, feed_forward_out) * self.residual_multiplier

    @property
    def norms_before_feed_forward(self) -> Chain:
        """The norms between the attention's output and the feed-forward's matrices, in this order."""
        norms = (self.attention_branch, self.attention_residual, self.feed_forward_input)
        return tuple(norm for norm in norms if norm is not None)

    @property
    def ends_in_norm(self) -> bool:
        """Whether the block's last operation on the residual stream is a norm (post-norm)."""
        last = self.attention_residual if self.feed_forward_kind == "none" else self.feed_forward_residual
        return last is not None

    @property
    def is_written_down(self) -> bool:
        """Whether the equations give the whole block: its feed-forward is plain, gated, or absent."""
        return self.feed_forward is not None or self.feed_forward_kind == "none"

    def after(self, x: Tensor, attention_out: Tensor, cross_out: Tensor | None = None) -> Tensor:
        """Return the block's output from the attention's, for a block that `is_written_down`."""
        mid = self.after_attention(x, attention_out, cross_out)
        read = self.feed_forward_in(x, mid)
        return self.after_feed_forward(mid, None if self.feed_forward is None else self.feed_forward(read))


def _apply(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


# ------------------------------------------------------------------ reading an anatomy from the model


def read_weight(module: object, name: str) -> Tensor | None:
    """Return a weight by its name in TransformerLens; None if it is absent or can't be read.

    A Bridge computes a weight when it is read, and raises many types of errors if it can't: for a missing
    matrix (AttributeError, TypeError), for latent attention (NotImplementedError), and for heads of another
    size than the configuration's (Gemma 4's own ValueError). Offloaded weights have only a shape.
    """
    try:
        weight = getattr(module, name)
    except (AttributeError, TypeError, NotImplementedError, ValueError, RuntimeError):
        return None
    return weight.detach() if torch.is_tensor(weight) and not weight.is_meta else None


def read_norm(module: nn.Module | None, cfg: Any) -> Norm | None:
    """Return the norm that a module of any class computes; None for no module or an Identity."""
    if module is None or type(module).__name__ == "Identity":
        return None
    # A norm of Hugging Face that TransformerLens does not wrap is read itself.
    inner = getattr(module, "original_component", None if hasattr(module, "hook_scale") else module)
    if type(inner).__name__ == "Identity":
        return None
    if inner is None:  # This is TransformerLens's own class, which has no weights if they were folded.
        kind: Literal["layer", "rms"] = "rms" if "RMS" in type(module).__name__ else "layer"
        return Norm(kind, read_weight(module, "w"), read_weight(module, "b"), float(cast(Any, module).eps))
    # OLMo's norms store no eps.
    eps = getattr(inner, "eps", getattr(inner, "variance_epsilon", None))
    weight, bias = (
        tensor if (tensor := load_offloaded(inner, name)) is not None else read_weight(inner, name)
        for name in ("weight", "bias")
    )
    stored = Norm("layer", weight, bias, float(cfg.eps if eps is None else eps))
    try:
        return _measured(inner, stored, int(cfg.d_model))
    except (TypeError, ValueError, RuntimeError, IndexError):
        # Some norms, such as those over images, take other arguments than a residual stream. If a block uses
        # such a norm, the verification compares its output with that of the stored weights.
        return stored


def _measured(module: nn.Module, stored: Norm, width: int) -> Norm:
    """Return a norm of Hugging Face as measured on four vectors, with its stored numbers if they agree.

    The names and weights of norms are not reliable: T5LayerNorm does not center, and Gemma and Nemotron add 1
    to the weight. `forward` is called directly, so that no hook receives the vectors.
    """
    own = (tensor for tensor in (stored.weight, stored.bias, *module.parameters()) if tensor is not None)
    like = next(own, torch.zeros(width, dtype=torch.float32, device="cpu")).detach()
    # The factor is small enough for eps to have an effect.
    wide, small = torch.promote_types(like.dtype, torch.float32), 2.0**-10
    # The vector has mean 0 and no 0, and it and the vectors made from it are exact in every dtype.
    signs = torch.ones_like(like)
    signs[1::2] = -1
    if len(signs) % 2:
        signs[0], signs[2] = 2, -1
    with torch.no_grad():
        probes = torch.stack([signs, -signs, signs + 1, small * signs])[None]
        up, down, raised, lowered = module.forward(probes)[0].to(wide)
    # Without the bias, the norm of -x is minus that of x, so the mean of both results is the bias.
    signs, bias, accepted = signs.to(wide), (up + down) / 2, tolerance(like.dtype)
    square, eps = float(signs.square().mean()), stored.eps
    # The ratio is 1 if eps is 0. If the stored eps gives another ratio, the equation is solved for eps.
    shrunk = float((lowered - bias) @ (up - bias) / (up - bias).square().sum()) ** 2
    expected = small**2 * (square + eps) / (small**2 * square + eps)
    if abs(shrunk - expected) > 2 * accepted * expected and shrunk > small**2:
        eps = max(0.0, small**2 * square * (1 - shrunk) / (shrunk - small**2))
    multiplier = (up - bias) / signs * math.sqrt(square + eps)
    accepted *= float(torch.linalg.vector_norm(multiplier))
    offset = None if stored.weight is None else 1 + stored.weight.to(wide)
    weight = _nearest(multiplier, [stored.weight, offset], torch.ones_like(multiplier), accepted)
    shift = _nearest(bias, [stored.bias], torch.zeros_like(bias), accepted)
    # A norm that centers has the same output for signs and for signs + 1.
    uncentered = (signs + 1) * multiplier / math.sqrt(square + 1 + eps) + bias
    centers = torch.dist(raised, up) < torch.dist(raised, uncentered)
    return Norm("layer" if centers else "rms", weight, shift, eps)


def _nearest(
    measured: Tensor, stored: list[Tensor | None], neutral: Tensor, accepted: float
) -> Tensor | None:
    """Return stored numbers that agree with the measured ones, or else these; None if they are neutral."""

    def distance(numbers: Tensor) -> float:
        return float(torch.dist(measured, numbers.to(measured.dtype)))

    best = min((numbers for numbers in stored if numbers is not None), key=distance, default=None)
    if best is not None and distance(best) <= accepted:
        return best
    return None if distance(neutral) <= accepted else measured


def read_value_path(attention: nn.Module) -> ValuePath | None:
    """Return the value path of an attention module; None if its weights can't be read."""
    # HookedTransformer can repeat grouped values before the hook, which then has all heads. Otherwise the
    # hook has the grouped heads, as `_W_V` does. Its W_V is expanded, unlike that of a Bridge.
    ungrouped = getattr(getattr(attention, "cfg", None), "ungroup_grouped_query_attention", False)
    grouped = None if ungrouped else read_weight(attention, "_W_V")
    W_V = read_weight(attention, "W_V") if grouped is None else grouped
    b_V = read_weight(attention, "b_V" if grouped is None else "_b_V")
    W_O, b_O = read_weight(attention, "W_O"), read_weight(attention, "b_O")
    if W_V is None or W_O is None or W_V.ndim != 3 or W_O.ndim != 3:
        return None
    return ValuePath(W_V, None if b_V is None else b_V.reshape(W_V.shape[0], -1), W_O, b_O)


def _value_paths(attention: nn.Module) -> Iterator[ValuePath | None]:
    """Yield the value path, and then the one with W_O transposed if its layout is unknown.

    TransformerBridge assumes that a square matrix is [in, out] unless it belongs to a torch.nn.Linear. But
    other layers, such as those of adapters, are [out, in] too.
    """
    path = read_value_path(attention)
    yield path
    layer = getattr(getattr(attention, "o", None), "original_component", None)
    if path is None or layer is None or isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D":
        return
    heads, _, d_model = path.W_O.shape
    matrix = path.W_O.flatten(0, 1)
    if len(matrix) == d_model:
        yield dataclasses.replace(path, W_O=matrix.T.unflatten(0, (heads, -1)))


def _read_feed_forward(mlp: nn.Module | None, activation: str) -> tuple[FeedForward | None, str]:
    """Return the feed-forward and its kind (`BlockAnatomy.feed_forward_kind`)."""
    if mlp is None:
        return None, "none"
    if "MoE" in type(mlp).__name__ or hasattr(mlp, "experts"):
        return None, "mixture"
    if is_offloaded(mlp):
        return None, "offloaded"
    W_in, W_out, W_gate = read_weight(mlp, "W_in"), read_weight(mlp, "W_out"), read_weight(mlp, "W_gate")
    if W_in is None or W_out is None or W_in.ndim != 2 or W_in.shape[1] != W_out.shape[0]:
        return None, "opaque"
    is_bridge = hasattr(mlp, "original_component")
    b_in = read_weight(mlp, "b_in")
    b_gate, b_out = read_weight(mlp, "b_gate"), read_weight(mlp, "b_out")
    if W_gate is None:
        return FeedForward(activation, W_in, W_out, b_in=b_in, b_out=b_out), "plain"
    # The hooked classes add b_in after the product of a gated feed-forward.
    biases = {"b_in": b_in, "b_gate": b_gate} if is_bridge else {"b_hidden": b_in}
    return FeedForward(activation, W_in, W_out, W_gate, b_out=b_out, **biases), "gated"


# The names of the weights, or of the modules with them, that compute gate and up.
_GATE_UP = (
    {"gate", "in"},  # a TransformerBridge
    {"W_gate", "W_in"},  # the hooked classes
    {"gate_proj", "up_proj"},
    {"w1", "w3"},
    {"wi_0", "wi_1"},
)
# The names of the first and the last matrix. If the first has twice as many weights, it computes gate and up.
_FIRST_AND_LAST = (
    ("in", "out"),
    ("W_in", "W_out"),
    ("up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("fc1", "fc2"),
    ("w1", "w2"),
    ("wi", "wo"),
    ("Wi", "Wo"),
)


def _find_gate_up(module: nn.Module) -> set[str] | None:
    """Return the names of what computes gate and up: none without a gate, None if nothing is recognized."""
    sizes = {
        name: sum(weight.numel() for weight in child.parameters() if weight.ndim > 1)
        for name, child in module.named_children()
    }
    sizes |= {name: weight.numel() for name, weight in module.named_parameters(recurse=False)}
    pair = next((pair for pair in _GATE_UP if pair <= set(sizes)), None)
    if pair is not None:
        return pair
    for first, last in _FIRST_AND_LAST:
        if sizes.get(last) and sizes.get(first) in (sizes[last], 2 * sizes[last]):
            return {first} if sizes[first] > sizes[last] else set()
    return None


def find_gated(block: nn.Module) -> list[nn.Module] | None:
    """Return the modules of a block that compute gate and up from their input: its feed-forward or experts.

    They are recognized by the names of weights. The result is None if the feed-forward has matrices that are
    not recognized, other than those of a mixture's router.
    """
    mlp = getattr(block, "mlp", None)
    found: dict[int, nn.Module] = {}
    known: set[int] = set()
    # A block whose feed-forward has another name is searched whole. Containers come before their modules.
    for module in (block if mlp is None else mlp).modules():
        gate_up = None if id(module) in known else _find_gate_up(module)
        if gate_up is None:
            continue
        children = dict(module.named_children())
        if gate_up and "router" in children:  # The router reads the same input, and has no part in the rule.
            found |= {id(children[name]): children[name] for name in gate_up}
        elif gate_up:
            found[id(module)] = module
        known |= {id(each) for each in module.modules()}
    for name, module in () if mlp is None else mlp.named_modules():
        is_router = any(word in name for word in ("gate", "router"))
        own = module.named_parameters(recurse=False)
        if id(module) not in known and not is_router and any(weight.ndim > 1 for _, weight in own):
            return None
    return list(found.values())


def candidates(block: nn.Module, attention: nn.Module, cfg: Any, multiplier: float) -> Iterator[BlockAnatomy]:
    """Yield every anatomy that the block's modules allow, the likeliest first.

    The same module names are used for different orders: ln1 is before attention in GPT-2, after it in BERT,
    and on the branch in OLMo 2 on TransformerLens 3.9. The verification selects the anatomy that fits.
    """
    cross = hasattr(block, "cross_attn")
    mlp = None if getattr(cfg, "attn_only", False) else getattr(block, "mlp", None)
    feed_forward, kind = _read_feed_forward(mlp, "gelu")
    first = bool(getattr(cfg, "parallel_attn_mlp", False))
    # The order of the configuration is tried first, but it may be wrong.
    order = (False,) if cross or mlp is None else (first, not first)
    wirings = list(_wirings(block, cfg, cross, has_mlp=mlp is not None))
    for path, parallel, wiring in itertools.product(_value_paths(attention), order, wirings):
        base = BlockAnatomy("none", parallel, path, feed_forward, kind, cross=cross)
        yield dataclasses.replace(base, residual_multiplier=multiplier, **wiring)


def _wirings(block: nn.Module, cfg: Any, cross: bool, has_mlp: bool) -> Iterator[dict[str, Any]]:
    names = ("ln1", "ln2", "ln3", "ln1_post", "ln2_post")
    ln1, ln2, ln3, ln1_post, ln2_post = (read_norm(getattr(block, name, None), cfg) for name in names)
    if ln1_post is not None:  # These are Gemma 2 and 3 and, without ln1, OLMo 2.
        branch = {"attention_branch": ln1_post, "feed_forward_branch": ln2_post}
        placement = "branch" if ln1 is None else "sandwich"
        yield {"placement": placement, "attention_input": ln1, "feed_forward_input": ln2, **branch}
    elif cross:  # The first is T5, the second BART and Marian.
        yield {"placement": "pre", "attention_input": ln1, "cross_input": ln2, "feed_forward_input": ln3}
        residual = {"attention_residual": ln1, "cross_residual": ln2, "feed_forward_residual": ln3}
        yield {"placement": "post", **residual}
    elif ln2 is None:  # In GPT-J, Phi, Falcon and Cohere, both branches read one norm.
        placement = "none" if ln1 is None else "pre"
        yield {"placement": placement, "attention_input": ln1, "feed_forward_input": ln1 if has_mlp else None}
    else:
        yield {"placement": "pre", "attention_input": ln1, "feed_forward_input": ln2}
        yield {"placement": "post", "attention_residual": ln1, "feed_forward_residual": ln2}  # BERT
        yield {"placement": "branch", "attention_branch": ln1, "feed_forward_branch": ln2}  # OLMo 2, on 3.9
